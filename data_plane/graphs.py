"""The shapes that a worker computes in: all built before it is ready, none after. Knows neither rows nor plans.

A shape is what a compiler or a captured graph fixes; a build is one forward in it, over padding alone. Where nothing is
compiled one shape of each kind is tried, and the others are there with it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatch, AttentionBatches, DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.backend import Backend, Compute
from blockplane.data_plane.packing import has_lone_prefills, max_segments
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Configure

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """What one graph takes: a decode of `num_seqs` rows, or a prefill, which has no such axis, 0.

    `num_tokens` counts padding too, `context_len` is 0 where contexts are data and not a shape. `is_lone`: a prefill
    of one request, where `packing.has_lone_prefills`.
    """

    num_tokens: int
    num_seqs: int = 0
    context_len: int = 0
    is_lone: bool = False

    def __str__(self) -> str:
        if not self.num_seqs:
            return f"prefill of {self.num_tokens} tokens{' of one request' if self.is_lone else ''}"
        context = f" over {self.context_len} tokens of context" if self.context_len else ""
        return f"decode of {self.num_seqs} rows by {self.num_tokens // self.num_seqs} tokens{context}"


class Graphs:
    """A computation in the shapes that were built, and in no other.

    Attributes:
        num_builds: so far; it grows no more once the worker is ready.
        num_runs, num_padding_tokens: by shape that was built, steps and how many of their tokens no request had.
        build_seconds: by shape, what its build took.
    """

    def __init__(
        self, compute: Compute, idle_inputs: Callable[[Shape], tuple[Any, ...]], configure: Configure, backend: Backend
    ) -> None:
        """`idle_inputs`: what `compute` is given in a shape where there is nothing to do."""
        self.num_builds = 0
        self.num_runs: dict[Shape, int] = {}
        self.num_padding_tokens: dict[Shape, int] = {}
        self.build_seconds: dict[Shape, float] = {}
        self._compute, self._idle_inputs = compute, idle_inputs
        self._configure, self._backend = configure, backend
        self._built: dict[Shape, Compute] = {}

    def build(self) -> None:
        """Build every shape that `configure` asks for, a line of the log each."""
        shapes = list(shapes_of(self._configure))
        least = {min(shape for shape in shapes if bool(shape.num_seqs) == is_decode) for is_decode in (False, True)}
        for number, shape in enumerate(shapes, start=1):
            start = time.perf_counter()
            self._built[shape] = self._compute
            if self._backend.is_compiled:
                self._built[shape] = self._backend.build(self._compute, self._idle_inputs(shape))
            elif shape in least:
                self._compute(*self._idle_inputs(shape))
            self.num_builds += 1
            self.num_runs[shape] = self.num_padding_tokens[shape] = 0
            self.build_seconds[shape] = seconds = time.perf_counter() - start
            logger.info("built %d of %d, %s, in %.2f s", number, len(shapes), shape, seconds)

    def run(self, shape: Shape, *inputs: Any) -> Any:
        """What is computed of these inputs, which have the shapes of that shape's idle ones.

        Raises:
            ProtocolError: the shape was not built.
        """
        if shape not in self.num_runs:
            raise ProtocolError(
                f"a step needs a {shape}, which is none of the {len(self.num_runs)} graphs that were built before this "
                "worker said it was ready; the engine must plan within the buckets that it configured."
            )
        self.num_runs[shape] += 1
        return self._built[shape](*inputs)


def shapes_of(configure: Configure) -> Iterator[Shape]:
    """Every bucket of every list, the largest first: what does not fit in memory fails at once."""
    for num_tokens in reversed(configure.num_batched_tokens_buckets):
        yield Shape(num_tokens)
        if has_lone_prefills(num_tokens, configure):
            yield Shape(num_tokens, is_lone=True)
    for num_seqs in reversed(configure.num_seqs_buckets):
        for context_len in reversed(configure.decode_context_length_buckets or (0,)):
            yield Shape(num_seqs * configure.decode_token_threshold, num_seqs, context_len)


def table_width(group: KVCacheGroup, context_len: int, configure: Configure) -> int:
    """Blocks of a row in a decode's table over `context_len` tokens; of a window, those that its last may lie in."""
    width = -(-context_len // configure.block_size)
    if group.sliding_window is None or group.attention_chunk_size is not None:
        return width
    # What the first new token sees before itself, and the new tokens; the first of all may stand at a block's end.
    num_seen = group.sliding_window - 1 + configure.decode_token_threshold
    return min(width, -(-(num_seen + configure.block_size - 1) // configure.block_size))


def prefill_table_width(configure: Configure, seq_len: int | None) -> int:
    """Blocks of a segment in a prefill's table, of `seq_len` tokens at most; None = for all that may be asked."""
    # A gap's tokens have places too, none of which has a block.
    num_tokens = max(configure.max_model_len if seq_len is None else seq_len, configure.prefill_multiple_of)
    return -(-num_tokens // configure.block_size)


def idle_tensors(
    shape: Shape, configure: Configure, *, is_compiled: bool = False
) -> tuple[Tensor, Tensor, AttentionBatches]:
    """A forward's tensors of padding alone: no slot is written, no block read, and nothing is there to sample.

    `is_compiled`: they have the shapes of every step's; see `Backend`.
    """
    nothing = torch.zeros(shape.num_tokens, dtype=torch.int64)
    slot_mapping = torch.full_like(nothing, PAD_SLOT_ID)
    num_rows = shape.num_seqs
    if is_compiled and not num_rows:
        num_rows = 1 if shape.is_lone else max_segments(shape.num_tokens, configure)
    bounds, lens = torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32)

    def batch_of(group: KVCacheGroup) -> AttentionBatch:
        if shape.num_seqs:
            context_len = shape.context_len or (configure.max_model_len if is_compiled else 1)
            width = table_width(group, context_len, configure)
        else:
            width = prefill_table_width(configure, None if is_compiled else 1)
        block_table = torch.full((num_rows, width), SKIP_BLOCK_ID, dtype=torch.int32)
        if shape.num_seqs:
            return DecodeBatch(slot_mapping, block_table, lens)
        return PrefillBatch(slot_mapping, block_table, bounds, lens, configure.kv_segment_size)

    return nothing, nothing, tuple(map(batch_of, configure.kv_cache_groups))
