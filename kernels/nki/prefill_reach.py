"""Which keys the queries of each group see, in bounds that a NeuronCore computes from lengths; knows no keys.

A group is up to `num_queries` neighbouring tokens of one request, the first at position `prior_tokens`. Bounds are
float32, exact below 2^24 positions, relative to the start of what is read: the group's own tokens, or the segment of
prior KV that comes next. Everything stands on all 128 partitions alike, except what differs from query to query.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

NUM_PARTITIONS = 128


@dataclass
class Reach(nl.NKIObject):
    """Of `num_groups` groups of `num_tiles` tiles of 128 queries.

    Attributes:
        own_end: float32 [128, num_tiles], own_before: float32 [128, num_groups, num_tiles]: query p of a tile sees the
            group's own tokens between these two, both excluded. What padding sees is of no account.
        prior: float32 [128, num_groups, 2 + num_tiles], of the segment that comes next: the end of what is prior, the
            first position that any query sees, and for each tile what lies before a query's reach. `next_segment` moves
            it on.
        tokens: float32 [128, num_groups], the group's valid tokens; what is behind them is padding.
        is_token: int32 [128, num_groups, num_tiles], -1 for valid tokens, 0 for padding.
        own_block: int32 [128, num_groups], the first block of the group's own tokens in its row of the block table.
        segment_block: int32 [128, num_groups], the first block of the segment that comes next.
        num_segments: int32 [1, 1], how many segments the group with most of them reads.
    """

    own_end: nl.NkiTensor
    own_before: nl.NkiTensor
    prior: nl.NkiTensor
    tokens: nl.NkiTensor
    is_token: nl.NkiTensor
    own_block: nl.NkiTensor
    segment_block: nl.NkiTensor
    num_segments: nl.NkiTensor


def reach_of(
    prior_tokens: nl.NkiTensor,
    num_tokens: nl.NkiTensor,
    num_queries: int,
    block_size: int,
    kv_segment_size: int,
    sliding_window: int,
    attention_chunk_size: int,
) -> Reach:
    """From int32 [num_groups, 1] each in HBM; no window or chunk is 0, and a chunk is a power of two and overrules a
    window. Without segments (0) what concerns them means nothing."""
    num_groups, num_tiles = prior_tokens.shape[0], num_queries // NUM_PARTITIONS
    segment_size = kv_segment_size if kv_segment_size else block_size
    prior = _on_all_partitions(prior_tokens)
    first = _first_in_reach(prior, sliding_window, attention_chunk_size)
    start = _rounded_down(first, segment_size)
    reach = Reach(
        own_end=_queries(num_tiles, 1),
        own_before=nl.ndarray((NUM_PARTITIONS, num_groups, num_tiles), dtype=nl.float32, buffer=nl.sbuf),
        prior=nl.ndarray((NUM_PARTITIONS, num_groups, 2 + num_tiles), dtype=nl.float32, buffer=nl.sbuf),
        tokens=_as_float(_on_all_partitions(num_tokens)),
        is_token=nl.ndarray((NUM_PARTITIONS, num_groups, num_tiles), dtype=nl.int32, buffer=nl.sbuf),
        own_block=_shifted_right(prior, block_size),
        segment_block=_shifted_right(start, block_size),
        num_segments=_most_segments(prior, start, segment_size),
    )
    prior, first, start = _as_float(prior), _as_float(first), _as_float(start)
    nisa.tensor_tensor(reach.prior[:, :, 0], prior, start, op=nl.subtract)
    nisa.tensor_tensor(reach.prior[:, :, 1], first, start, op=nl.subtract)
    query = _queries(num_tiles, 0)
    for group in range(num_groups):
        own, segment = prior[:, group : group + 1], start[:, group : group + 1]
        before = _before_reach(query, own, sliding_window, attention_chunk_size)
        nisa.tensor_scalar(reach.own_before[:, group, :], before, op0=nl.subtract, operand0=own)
        nisa.tensor_scalar(reach.prior[:, group, 2:], before, op0=nl.subtract, operand0=segment)
        is_token, tokens = reach.is_token[:, group, :], reach.tokens[:, group : group + 1]
        nisa.tensor_scalar(is_token, query, op0=nl.less, operand0=tokens, op1=nl.multiply, operand1=-1.0)
    return reach


def next_segment(reach: Reach, block_size: int, kv_segment_size: int) -> None:
    """Make the bounds and the blocks those of the following segment, for all groups."""
    nisa.tensor_scalar(reach.prior, reach.prior, op0=nl.subtract, operand0=float(kv_segment_size))
    blocks = float(kv_segment_size // block_size)
    nisa.tensor_scalar(reach.segment_block, reach.segment_block, op0=nl.add, operand0=blocks)


def _on_all_partitions(lengths: nl.NkiTensor) -> nl.NkiTensor:
    """int32 [128, num_groups] of [num_groups, 1] in HBM."""
    num_groups = lengths.shape[0]
    copies = nl.ndarray((NUM_PARTITIONS, num_groups), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=copies, src=lengths.ap(pattern=[[0, NUM_PARTITIONS], [1, num_groups]]))
    return copies


def _queries(num_tiles: int, first: int) -> nl.NkiTensor:
    """float32 [128, num_tiles], each query's place in its group, counted from `first`."""
    places = nl.ndarray((NUM_PARTITIONS, num_tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(places, pattern=[[NUM_PARTITIONS, num_tiles]], offset=first, channel_multiplier=1)
    return places


def _as_float(integers: nl.NkiTensor) -> nl.NkiTensor:
    floats = nl.ndarray(integers.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(floats, integers)
    return floats


def _first_in_reach(prior: nl.NkiTensor, sliding_window: int, attention_chunk_size: int) -> nl.NkiTensor:
    """int32 [128, num_groups], the first position that the group's first query sees."""
    if attention_chunk_size:
        return _rounded_down(prior, attention_chunk_size)
    first = nl.ndarray(prior.shape, dtype=nl.int32, buffer=nl.sbuf)
    if sliding_window:
        nisa.tensor_scalar(first, prior, op0=nl.add, operand0=float(1 - sliding_window), op1=nl.maximum, operand1=0.0)
    else:
        nisa.memset(first, 0)
    return first


def _before_reach(
    query: nl.NkiTensor, prior: nl.NkiTensor, sliding_window: int, attention_chunk_size: int
) -> nl.NkiTensor:
    """float32 [128, num_tiles], the last position that is too far back for each query of a group."""
    before = nl.ndarray(query.shape, dtype=nl.float32, buffer=nl.sbuf)
    if attention_chunk_size:
        positions = nl.ndarray(query.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(positions, query, op0=nl.add, operand0=prior)
        chunk = _rounded_down(positions, attention_chunk_size)
        nisa.tensor_scalar(before, chunk, op0=nl.subtract, operand0=1.0)
    elif sliding_window:
        nisa.tensor_scalar(before, query, op0=nl.add, operand0=prior, op1=nl.subtract, operand1=float(sliding_window))
    else:
        nisa.memset(before, -1.0)
    return before


def _most_segments(prior: nl.NkiTensor, start: nl.NkiTensor, segment_size: int) -> nl.NkiTensor:
    """int32 [1, 1], the greatest of ceil((prior - start) / segment_size), where start is a multiple of the size."""
    rest = nl.ndarray(prior.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(rest, prior, start, op=nl.subtract)
    nisa.tensor_scalar(rest, rest, op0=nl.add, operand0=float(segment_size - 1))
    counts = _shifted_right(rest, segment_size)
    most = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_reduce(most, op=nl.maximum, data=counts[0:1, :], axis=1)
    return most


def _rounded_down(positions: nl.NkiTensor, size: int) -> nl.NkiTensor:
    """int32, the multiple of a power of two that is not above a position."""
    rounded = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(rounded, positions, op0=nl.bitwise_and, operand0=-size)
    return rounded


def _shifted_right(positions: nl.NkiTensor, size: int) -> nl.NkiTensor:
    """int32, how many whole sizes, a power of two, are below a position."""
    shifted = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(shifted, positions, op0=nl.right_shift, operand0=_log2(size))
    return shifted


def _log2(size: int) -> int:
    exponent = 0
    while size > 1 << exponent:
        exponent += 1
    return exponent
