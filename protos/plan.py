"""The hot messages between engine and worker, as frozen values; knows neither protobuf nor gRPC."""

from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockplane.protos.kv_cache import KVCacheGroup, KVCacheTensor
from blockplane.protos.logprobs import Logprobs
from blockplane.protos.sampling import SamplingParams

Int32Array = NDArray[np.int32]
IntArray = NDArray[np.integer[Any]]

NO_ROWS: Int32Array = np.empty(0, np.int32)
"""The empty column."""
NO_ROWS.flags.writeable = False


def no_rows() -> Int32Array:
    return NO_ROWS


@dataclass(frozen=True, slots=True)
class Configure:
    """What the engine decided for a worker group; the worker builds it or refuses.

    The last bucket of each list is the limit: `max_num_batched_tokens` and `max_num_seqs`.

    Attributes:
        num_blocks: the null block included.
        max_model_len: tokens.
        kv_cache_groups: each has its own block table over the one pool.
        kv_cache_tensors: the memory that the groups share; none = one for each layer.
        kv_segment_size: tokens of prior KV that a prefill reads at a time; 0 = unsegmented, a prompt is one segment and
            no prior KV is read (seed 001).
        decode_context_length_buckets: tokens; none = the backend takes contexts as data, not as shapes.
        prefill_multiple_of: tokens; every segment but a prompt's last is a multiple of it, and of block_size. Each
            begins at a multiple of it in its bucket.
        num_draft_tokens: the most that a row may be granted beside its next token.
        epoch: drawn for this attach; every result names it.
        keeps_kv: the KV cache of the attach before is still there, and used; rows start anew in any case.
        last_step: plans are numbered from the next on.
        heartbeat_milliseconds: how often the worker says that it lives; 0 = never.
        context_parallel_size: ranks that share the positions of each block, which spans block_size of them.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    num_batched_tokens_buckets: tuple[int, ...]
    num_seqs_buckets: tuple[int, ...]
    kv_cache_groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    kv_cache_tensors: tuple[KVCacheTensor, ...] = ()
    kv_segment_size: int = 512
    decode_context_length_buckets: tuple[int, ...] = ()
    prefill_multiple_of: int = 1
    num_draft_tokens: int = 0
    epoch: int = 0
    keeps_kv: bool = False
    last_step: int = 0
    heartbeat_milliseconds: int = 0
    context_parallel_size: int = 1

    @property
    def rank_block_size(self) -> int:
        """Tokens of a block that one rank keeps: as many places as its caches have for a block."""
        return self.block_size // self.context_parallel_size

    @property
    def max_num_batched_tokens(self) -> int:
        return self.num_batched_tokens_buckets[-1]

    @property
    def max_num_seqs(self) -> int:
        return self.num_seqs_buckets[-1]

    @property
    def segment_multiple(self) -> int:
        """Tokens; keeps the KV before a segment block-aligned (seed 001, "Block Alignment")."""
        return lcm(self.block_size, self.prefill_multiple_of)

    def num_bucket_tokens(self, num_tokens: Any) -> Any:
        """What a prefill segment takes of its bucket, the padding behind it included.

        `num_tokens` is a number or an integer array, and so is the answer. The segments of one step take the last
        bucket's tokens together at most.
        """
        return -(-num_tokens // self.prefill_multiple_of) * self.prefill_multiple_of

    @property
    def decode_token_threshold(self) -> int:
        """A row of at most so many new tokens decodes (seed 001, "Attention Metadata")."""
        return 1 + self.num_draft_tokens

    @property
    def max_blocks_per_row(self) -> int:
        """Row width of a block table: room for max_model_len, aligned to `max(1, 128 // block_size)` (seed 004)."""
        alignment = max(1, 128 // self.block_size)
        num_blocks = -(-self.max_model_len // self.block_size)
        return -(-num_blocks // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a row. `token_ids`, int32, are all that is known of it: prompt and, if it resumes, its output.

    `seed` is the one that its noise comes from, whether or not `params` names one.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What changes on a worker in one step; applied in the order of the fields. All columns are int32.

    Attributes:
        step: one more with each plan, from `Configure.last_step` on.
        released_rows: rows that are free again.
        admissions: requests that take a row.
        block_rows: per new logical block, the row that gets it as its next one.
        block_ids: the block's ids in each group, group after group within a block: [num_new_blocks * num_groups]. The
            null block stands where a group's layers see nothing of it any more.
        prefill_rows, prefill_num_tokens: per prefill segment, its row and how many tokens it computes.
        decode_rows: rows that compute their newest token and sample the next; None = as in the last plan.
        decode_num_tokens: per decode row, how many tokens it may compute: its newest and drafts; None = as in the last
            plan if `decode_rows` is None too, else 1 each.
    """

    step: int
    released_rows: Int32Array = field(default_factory=no_rows)
    admissions: tuple[Admission, ...] = ()
    block_rows: Int32Array = field(default_factory=no_rows)
    block_ids: Int32Array = field(default_factory=no_rows)
    prefill_rows: Int32Array = field(default_factory=no_rows)
    prefill_num_tokens: Int32Array = field(default_factory=no_rows)
    decode_rows: Int32Array | None = None
    decode_num_tokens: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: the new tokens of each decode row, then one for each prefill segment that reached its row's
    last token, in the plan's order, end to end. -1 stands where the row's logits were not finite.

    Attributes:
        num_tokens: int32, how many each decode row got, which is one more than its drafts that were accepted; None = 1
            each.
        logprobs: of `token_ids`; those of a failed row have no entries. None = nobody asks.
        prompt_logprobs: of the prompt tokens that follow one which the step computed, for each prefill segment whose
            request asks, in the plan's order, end to end; None = nobody asks.
        num_draft_tokens: drafts that the step computed, accepted or not.
        epoch: of the attach that the plan came with.
        times: when the worker did what, as `StepTimes` packs it, and no part of what it computed; empty = it does
            not tell.
    """

    step: int
    token_ids: Int32Array
    num_tokens: Int32Array | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    num_draft_tokens: int = 0
    epoch: int = 0
    times: bytes = field(default=b"", compare=False)
