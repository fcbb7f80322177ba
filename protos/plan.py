"""The hot messages between engine and worker, as frozen values; knows neither protobuf nor gRPC."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


def no_rows() -> Int32Array:
    """An empty column."""
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Configure:
    """What the engine decided for a worker group; the worker builds it or refuses.

    `num_blocks` includes the null block. `max_model_len` in tokens. The last bucket of each list is the limit:
    `max_num_batched_tokens` and `max_num_seqs`.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    num_batched_tokens_buckets: tuple[int, ...]
    num_seqs_buckets: tuple[int, ...]

    @property
    def max_num_batched_tokens(self) -> int:
        return self.num_batched_tokens_buckets[-1]

    @property
    def max_num_seqs(self) -> int:
        return self.num_seqs_buckets[-1]

    @property
    def max_blocks_per_row(self) -> int:
        """Row width of a block table: room for max_model_len, aligned to `max(1, 128 // block_size)` (seed 004)."""
        alignment = max(1, 128 // self.block_size)
        num_blocks = -(-self.max_model_len // self.block_size)
        return -(-num_blocks // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a row. `token_ids`, int32, are all that is known of it: prompt and, if it resumes, its output."""

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What changes on a worker in one step; applied in the order of the fields. All columns are int32.

    Attributes:
        step: 1, 2, 3, ... since the attach.
        released_rows: rows that are free again.
        admissions: requests that take a row.
        block_rows, block_ids: per new block, the row that gets it as its next logical block, and its id.
        prefill_rows, prefill_num_tokens: per prefill segment, its row and how many tokens it computes.
        decode_rows: rows that compute one token and sample the next; None = as in the last plan.
    """

    step: int
    released_rows: Int32Array = field(default_factory=no_rows)
    admissions: tuple[Admission, ...] = ()
    block_rows: Int32Array = field(default_factory=no_rows)
    block_ids: Int32Array = field(default_factory=no_rows)
    prefill_rows: Int32Array = field(default_factory=no_rows)
    prefill_num_tokens: Int32Array = field(default_factory=no_rows)
    decode_rows: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: a token id for each decode row, then for each prefill segment that reached its row's last
    token, in the plan's order. -1 stands where the row's logits were not finite.
    """

    step: int
    token_ids: Int32Array
