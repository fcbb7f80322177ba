"""Which rows of the cache each request reads for its decoding, and where these stand; knows no key and no query.

All of it is reckoned on chip from the lengths and the block table, for all requests at once. A row is read when all its
positions are cached and a query can see one of them; every other row has the id -1 or less, which a DMA skips, and is
hidden. What of a row that is read lies beyond some query's window or chunk is hidden from that query position by
position.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki import cache_rows
from blockplane.kernels.nki.decode_plan import NUM_PARTITIONS, DecodePlan, Piece, log2
from blockplane.kernels.nki.psum_softmax import HIDDEN


@dataclass
class Lengths(nl.NKIObject):
    """What the lengths say, on all partitions alike.

    Attributes:
        starts: float32 [128, num_requests], the position of the first new token; negative if there are fewer.
        num_rows: int32 [128, num_requests], whole rows before `starts`.
        least: float32 [128, num_requests, num_new_tokens], the first position that each new token sees, if limited.
    """

    starts: nl.NkiTensor
    num_rows: nl.NkiTensor
    least: nl.NkiTensor


@dataclass
class ContextRows(nl.NKIObject):
    """The rows of all requests.

    Attributes:
        ids: for each KV head int32 [128, num_requests, num_gathers], in the flattened head-major cache.
        hidden: bfloat16 [128, num_requests, num_gathers], HIDDEN where a row is not read, else 0.
        positions: float32 [128, num_gathers, positions_per_row], counted from the first block read.
        least: as of `Lengths`, counted likewise.
    """

    ids: list[nl.NkiTensor]
    hidden: nl.NkiTensor
    positions: nl.NkiTensor
    least: nl.NkiTensor


def lengths_of(plan: DecodePlan, seq_lens: nl.NkiTensor) -> Lengths:
    """From int32 [batch, 1] in HBM."""
    shape = (NUM_PARTITIONS, plan.share.num_requests)
    lens = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=lens,
        src=seq_lens.ap(pattern=[[0, NUM_PARTITIONS], [1, plan.share.num_requests]], offset=plan.share.first_request),
    )
    starts = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(starts, lens, op0=nl.subtract, operand0=float(plan.num_new_tokens))
    num_rows = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(num_rows, starts, op0=nl.maximum, operand0=0.0)
    nisa.tensor_scalar(num_rows, num_rows, op0=nl.right_shift, operand0=log2(plan.positions_per_row))
    return Lengths(starts, num_rows, _least(plan, starts))


def context_rows(plan: DecodePlan, lengths: Lengths, block_table: nl.NkiTensor) -> ContextRows:
    """From int32 [batch, table_width] in HBM."""
    shape = (NUM_PARTITIONS, plan.share.num_requests, plan.num_gathers)
    num_rows = lengths.num_rows
    least = lengths.least
    if plan.starts_late():
        first_blocks = _first_blocks(plan, least)
        blocks = _blocks_from(plan, block_table, first_blocks)
        num_rows = _minus(num_rows, first_blocks, plan.rows_per_block)
        least = _minus(least, first_blocks.expand_dim(2).broadcast(2, plan.num_new_tokens), plan.block_size)
    else:
        blocks = _blocks_of_table(plan, block_table)
    rows = nl.ndarray((NUM_PARTITIONS, plan.num_gathers), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(rows, pattern=[[NUM_PARTITIONS, plan.num_gathers]], offset=0, channel_multiplier=1)
    rows_of_all = rows.expand_dim(1).broadcast(1, plan.share.num_requests)
    _skip_where(blocks, rows_of_all, num_rows.expand_dim(2).broadcast(2, plan.num_gathers), nl.greater_equal)
    if plan.is_limited:
        # Rows that end before what the first new token sees.
        ends = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        per_row = float(plan.positions_per_row)
        nisa.tensor_scalar(ends, rows, op0=nl.multiply, operand0=per_row, op1=nl.add, operand1=per_row)
        ends_of_all = ends.expand_dim(1).broadcast(1, plan.share.num_requests)
        _skip_where(blocks, ends_of_all, least[:, :, 0:1].broadcast(2, plan.num_gathers), nl.less_equal)
    hidden = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(hidden, blocks, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=HIDDEN)
    return ContextRows(_ids(plan, blocks), hidden, _positions(plan), least)


def of_piece(plan: DecodePlan, piece: Piece, gathers: nl.NkiTensor) -> nl.NkiTensor:
    """A piece's gathers of a tile [128, num_gathers, ...]."""
    first = plan.share.shard + piece.first_gather * plan.share.num_shards
    last = first + (piece.num_gathers - 1) * plan.share.num_shards
    return gathers[:, first : last + 1 : plan.share.num_shards]


def _least(plan: DecodePlan, starts: nl.NkiTensor) -> nl.NkiTensor:
    shape = (NUM_PARTITIONS, plan.share.num_requests, plan.num_new_tokens)
    least = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    if not plan.is_limited:
        return least
    tokens = nl.ndarray((NUM_PARTITIONS, plan.num_new_tokens), dtype=nl.float32, buffer=nl.sbuf)
    is_chunked = plan.attention_chunk_size > 0
    nisa.iota(tokens, pattern=[[1, plan.num_new_tokens]], offset=0 if is_chunked else 1 - plan.sliding_window)
    nisa.tensor_tensor(
        least,
        starts.expand_dim(2).broadcast(2, plan.num_new_tokens),
        tokens.expand_dim(1).broadcast(1, plan.share.num_requests),
        op=nl.add,
    )
    if is_chunked:
        whole = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(whole, least)
        nisa.tensor_scalar(whole, whole, op0=nl.bitwise_and, operand0=-plan.attention_chunk_size)
        nisa.tensor_copy(least, whole)
    return least


def _first_blocks(plan: DecodePlan, least: nl.NkiTensor) -> nl.NkiTensor:
    """int32 [128, num_requests], where each request's span starts: so that it does not run out of the table."""
    first = nl.ndarray((NUM_PARTITIONS, plan.share.num_requests), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(first, least[:, :, 0], op0=nl.maximum, operand0=0.0)
    nisa.tensor_scalar(first, first, op0=nl.right_shift, operand0=log2(plan.block_size))
    nisa.tensor_scalar(first, first, op0=nl.minimum, operand0=float(plan.table_width - plan.span_width))
    return first


def _blocks_from(plan: DecodePlan, block_table: nl.NkiTensor, first_blocks: nl.NkiTensor) -> nl.NkiTensor:
    """int32 [128, num_requests, num_gathers], the block of each row; -1 behind the span."""
    blocks = _no_blocks(plan)
    num_gathers = plan.span_width * plan.rows_per_block // NUM_PARTITIONS
    for request in range(plan.share.num_requests):
        span = cache_rows.block_ids(
            block_table,
            plan.share.first_request + request,
            first_blocks[0:1, request : request + 1],
            plan.rows_per_block,
            num_gathers,
        )
        nisa.tensor_copy(blocks[:, request, 0:num_gathers], span)
    return blocks


def _blocks_of_table(plan: DecodePlan, block_table: nl.NkiTensor) -> nl.NkiTensor:
    """int32 [128, num_requests, num_gathers], the block of each row; -1 behind the table."""
    blocks = _no_blocks(plan)
    blocks_per_gather = NUM_PARTITIONS // plan.rows_per_block
    whole = plan.table_width // blocks_per_gather
    rest = plan.table_width % blocks_per_gather
    offset = plan.share.first_request * plan.table_width
    requests = [plan.table_width, plan.share.num_requests]
    if whole:
        nisa.dma_copy(
            dst=blocks[:, :, 0:whole],
            src=block_table.ap(
                pattern=[[1, blocks_per_gather], [0, plan.rows_per_block], requests, [blocks_per_gather, whole]],
                offset=offset,
            ),
        )
    if rest:
        nisa.dma_copy(
            dst=blocks[0 : rest * plan.rows_per_block, :, whole],
            src=block_table.ap(
                pattern=[[1, rest], [0, plan.rows_per_block], requests], offset=offset + whole * blocks_per_gather
            ),
        )
    return blocks


def _no_blocks(plan: DecodePlan) -> nl.NkiTensor:
    shape = (NUM_PARTITIONS, plan.share.num_requests, plan.num_gathers)
    blocks = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(blocks, -1)
    return blocks


def _minus(values: nl.NkiTensor, first_blocks: nl.NkiTensor, factor: int) -> nl.NkiTensor:
    """values - first_blocks * factor, in the dtype of `values`."""
    moved = nl.ndarray(values.shape, dtype=values.dtype, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        moved, first_blocks, op0=nl.multiply, operand0=-float(factor), op1=nl.add, operand1=values
    )
    return moved


def _skip_where(blocks: nl.NkiTensor, left: nl.NkiTensor, right: nl.NkiTensor, comparison: nl.NkiTensor) -> None:
    """Make -1 the blocks where the comparison holds: all bits of -1 are set, so that "or" leaves the others."""
    holds = nl.ndarray(blocks.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(holds, left, right, op=comparison)
    unread = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(unread, holds, op0=nl.multiply, operand0=-1.0)
    nisa.tensor_tensor(blocks, blocks, unread, op=nl.bitwise_or)


def _ids(plan: DecodePlan, blocks: nl.NkiTensor) -> list[nl.NkiTensor]:
    ids = []
    flat = blocks.reshape((NUM_PARTITIONS, plan.share.num_requests * plan.num_gathers))
    for kv_head in range(plan.num_kv_heads):
        of_head = cache_rows.row_ids(flat, plan.rows_per_block, plan.num_kv_heads, kv_head)
        ids.append(of_head.reshape(blocks.shape))
    return ids


def _positions(plan: DecodePlan) -> nl.NkiTensor:
    shape = (NUM_PARTITIONS, plan.num_gathers, plan.positions_per_row)
    positions = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    if plan.is_limited:
        nisa.iota(
            positions,
            pattern=[[NUM_PARTITIONS * plan.positions_per_row, plan.num_gathers], [1, plan.positions_per_row]],
            offset=0,
            channel_multiplier=plan.positions_per_row,
        )
    return positions
