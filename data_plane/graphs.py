"""The shapes that a worker computes in: all built before it is ready, none after. Knows neither rows nor plans.

A shape is what a compiler or a captured graph fixes; a build is one forward in it, over padding alone. Where nothing is
compiled one shape of each kind is tried, and the others are there with it.
"""

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatch, AttentionBatches, DecodeBatch, PrefillBatch
from blockplane.data_plane.models.interface import Model
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Configure

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """What one graph takes: a decode of `num_seqs` rows, or a prefill, which has no such axis, 0.

    `num_tokens` counts padding too, `context_len` is 0 where contexts are data and not a shape.
    """

    num_tokens: int
    num_seqs: int = 0
    context_len: int = 0

    def __str__(self) -> str:
        if not self.num_seqs:
            return f"prefill of {self.num_tokens} tokens"
        context = f" over {self.context_len} tokens of context" if self.context_len else ""
        return f"decode of {self.num_seqs} rows by {self.num_tokens // self.num_seqs} tokens{context}"


class Graphs:
    """A model's forward, in the shapes that were built and in no other.

    Attributes:
        num_builds: so far; it grows no more once the worker is ready.
        num_runs: by shape that was built.
    """

    def __init__(self, model: Model, configure: Configure, *, is_compiled: bool = False) -> None:
        """`is_compiled`: whether a forward is bound to its shapes, and so each must be run once; eager ones are not."""
        self.num_builds = 0
        self.num_runs: dict[Shape, int] = {}
        self._model = model
        self._configure = configure
        self._is_compiled = is_compiled

    def build(self) -> None:
        """Build every shape that `configure` asks for, a line of the log each."""
        shapes = list(shapes_of(self._configure))
        least = {min(shape for shape in shapes if bool(shape.num_seqs) == is_decode) for is_decode in (False, True)}
        to_run = set(shapes) if self._is_compiled else least
        for number, shape in enumerate(shapes, start=1):
            start = time.perf_counter()
            if shape in to_run:
                self._model.forward(*idle_tensors(shape, self._configure))
            self.num_builds += 1
            self.num_runs[shape] = 0
            logger.info("built %d of %d, %s, in %.2f s", number, len(shapes), shape, time.perf_counter() - start)

    def run(self, shape: Shape, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        """Hidden states [num_tokens, hidden_size].

        Raises:
            ProtocolError: the shape was not built.
        """
        if shape not in self.num_runs:
            raise ProtocolError(
                f"a step needs a {shape}, which is none of the {len(self.num_runs)} graphs that were built before this "
                "worker said it was ready; the engine must plan within the buckets that it configured."
            )
        self.num_runs[shape] += 1
        return self._model.forward(input_ids, positions, batches)


def shapes_of(configure: Configure) -> Iterator[Shape]:
    """Every bucket of every list, the largest first: what does not fit in memory fails at once."""
    for num_tokens in reversed(configure.num_batched_tokens_buckets):
        yield Shape(num_tokens)
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


def idle_tensors(shape: Shape, configure: Configure) -> tuple[Tensor, Tensor, AttentionBatches]:
    """A forward's tensors of padding alone: no slot is written, no block read, and nothing is there to sample."""
    nothing = torch.zeros(shape.num_tokens, dtype=torch.int64)
    slot_mapping = torch.full_like(nothing, PAD_SLOT_ID)
    bounds, lens = torch.zeros(1, dtype=torch.int32), torch.zeros(shape.num_seqs, dtype=torch.int32)

    def batch_of(group: KVCacheGroup) -> AttentionBatch:
        width = table_width(group, shape.context_len or 1, configure)
        block_table = torch.full((shape.num_seqs, width), SKIP_BLOCK_ID, dtype=torch.int32)
        if shape.num_seqs:
            return DecodeBatch(slot_mapping, block_table, lens)
        return PrefillBatch(slot_mapping, block_table, bounds, lens, configure.kv_segment_size)

    return nothing, nothing, tuple(map(batch_of, configure.kv_cache_groups))
