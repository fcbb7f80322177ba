"""Where a step's prefill segments stand in their bucket, and the padding between them. Knows no tokens and no rows.

A backend's kernel may want each segment from one of its tiles on (`Configure.prefill_multiple_of`). What is left of the
tile before it is a gap: a segment of no blocks, which reads nothing, and whose output nobody reads.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockplane.kernels.slots import SKIP_BLOCK_ID
from blockplane.protos.plan import Configure, Int32Array, IntArray


@dataclass(frozen=True, slots=True)
class Packing:
    """Segments of several requests in one bucket.

    Attributes:
        starts: [num_requests], where each request's first token stands.
        token_indices: int64 [num_actual_tokens], where each token stands, request after request.
        offsets: int64 [num_actual_tokens], how many tokens of its segment come before it.
        query_start_loc: int32 [num_segments + 1]. prior_tokens: int32 [num_segments], 0 for a gap.
    """

    starts: IntArray
    token_indices: NDArray[np.int64]
    offsets: NDArray[np.int64]
    query_start_loc: Int32Array
    prior_tokens: Int32Array

    def spread(self, block_tables: Int32Array, configure: Configure) -> Int32Array:
        """Each request's blocks, int32 [num_groups, num_requests, width], -> each segment's; -1 for gaps."""
        stride, (num_groups, num_requests, width) = _stride(configure), block_tables.shape
        if num_requests == len(self.prior_tokens):
            return block_tables
        spread = np.full((num_groups, len(self.prior_tokens), width), SKIP_BLOCK_ID, np.int32)
        spread[:, : num_requests * stride : stride] = block_tables
        return spread


def pack(
    configure: Configure, num_tokens: Int32Array, prior_tokens: Int32Array, num_segments: int | None = None
) -> Packing:
    """Place segments one behind the other, each from a multiple of `prefill_multiple_of` on.

    Args:
        num_tokens, prior_tokens: int32 [num_requests], of each segment and before it.
        num_segments: with empty ones behind the last; None = without.
    """
    num_requests, stride = len(num_tokens), _stride(configure)
    num_taken = configure.num_bucket_tokens(num_tokens)
    starts = np.cumsum(num_taken) - num_taken
    offsets = np.arange(num_tokens.sum()) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
    num_segments = num_segments or num_requests * stride
    query_start_loc = np.full(num_segments + 1, starts[-1] + num_tokens[-1], np.int32)
    priors = np.zeros(num_segments, np.int32)
    query_start_loc[: num_requests * stride : stride] = starts
    if stride > 1:
        query_start_loc[1 : num_requests * stride : stride] = starts + num_tokens
    priors[: num_requests * stride : stride] = prior_tokens
    return Packing(starts, np.repeat(starts, num_tokens) + offsets, offsets, query_start_loc, priors)


def max_segments(num_bucket_tokens: int, configure: Configure) -> int:
    """Segments that a prefill bucket may hold, gaps included."""
    return max_requests(num_bucket_tokens, configure) * _stride(configure)


def max_requests(num_bucket_tokens: int, configure: Configure) -> int:
    """Requests whose segments a prefill bucket may hold."""
    return min(num_bucket_tokens // configure.prefill_multiple_of, configure.max_num_seqs)


def has_lone_prefills(num_bucket_tokens: int, configure: Configure) -> bool:
    """Whether a prefill bucket has a shape for one request alone beside that for several.

    Where segments begin at tiles, each tile of several requests reads its prior KV for itself; those of one, which the
    shape tells a kernel, read it together.
    """
    return configure.prefill_multiple_of > 1 and max_requests(num_bucket_tokens, configure) > 1


def _stride(configure: Configure) -> int:
    """Segments from one request's to the next one's: with its gap two."""
    return 1 if configure.prefill_multiple_of == 1 else 2
