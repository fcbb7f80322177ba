"""Brings the KV of a span of positions to where matmuls take it: rows from the cache, keys transposed; no attention.

Prior KV is read in rows of several positions, so that a DMA's runs are long; a group's own tokens in rows of one, so
that a chunk is a tile of 128 neighbours and a causal mask can leave out whole tiles.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki import cache_rows
from blockplane.kernels.nki.online_softmax import CHUNKS_PER_BANK, Span
from blockplane.kernels.nki.prefill_reach import Reach

NUM_PARTITIONS = 128
MAX_ROW_BYTES, MAX_POSITIONS_PER_ROW = 2048, 8
"""A DMA's run is long enough at 2 KiB; 8 positions of 2 bytes are as far apart as engines read at full pace."""


@dataclass
class Cache(nl.NKIObject):
    """A layer's KV and the table that finds it.

    Attributes:
        keys, values: [num_blocks, num_kv_heads, block_size, head_dim] in HBM.
        block_table: int32 [num_groups, width] in HBM.
    """

    keys: nl.NkiTensor
    values: nl.NkiTensor
    block_table: nl.NkiTensor


def own_span(cache: Cache, reach: Reach, group: int, kv_head: int, num_queries: int, dtype: nl.NkiTensor) -> Span:
    """The group's own tokens, in `dtype`; padding is not read."""
    first_block = reach.own_block[0:1, group : group + 1]
    num_tiles, block_size = num_queries // NUM_PARTITIONS, cache.keys.shape[2]
    blocks = cache_rows.block_ids(cache.block_table, group, first_block, block_size, num_tiles)
    first = nl.ndarray((NUM_PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(first, 0.0)
    cache_rows.skip_outside(blocks, 1, first, reach.tokens[:, group : group + 1])
    return _load(cache, blocks, kv_head, 1, dtype)


def prior_span(cache: Cache, reach: Reach, group: int, kv_head: int, segment_size: int, dtype: nl.NkiTensor) -> Span:
    """The segment that comes next, in `dtype`; what is not prior or in no query's reach is not read."""
    block_size, head_dim = cache.keys.shape[2], cache.keys.shape[3]
    positions_per_row = _positions_per_row(block_size, head_dim, segment_size)
    # A group that has no more segments may be past the table's end: it looks at the last blocks and reads nothing.
    last = cache.block_table.shape[1] - segment_size // block_size
    first_block = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    next_block = reach.segment_block[0:1, group : group + 1]
    nisa.tensor_scalar(first_block, next_block, op0=nl.minimum, operand0=float(last))
    num_gathers = segment_size // (NUM_PARTITIONS * positions_per_row)
    rows_per_block = block_size // positions_per_row
    blocks = cache_rows.block_ids(cache.block_table, group, first_block, rows_per_block, num_gathers)
    cache_rows.skip_outside(blocks, positions_per_row, first=reach.prior[:, group, 1:2], end=reach.prior[:, group, 0:1])
    return _load(cache, blocks, kv_head, positions_per_row, dtype)


def _positions_per_row(block_size: int, head_dim: int, segment_size: int) -> int:
    """A divisor of block_size, as all of these are powers of two."""
    return min(MAX_POSITIONS_PER_ROW, MAX_ROW_BYTES // (2 * head_dim), block_size, segment_size // NUM_PARTITIONS)


def _load(cache: Cache, blocks: nl.NkiTensor, kv_head: int, positions_per_row: int, dtype: nl.NkiTensor) -> Span:
    _, num_kv_heads, block_size, head_dim = cache.keys.shape
    rows = cache_rows.row_ids(blocks, block_size // positions_per_row, num_kv_heads, kv_head)
    shape = (NUM_PARTITIONS, blocks.shape[1], positions_per_row, head_dim)
    keys = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    cache_rows.gather(keys, cache.keys, rows)
    values = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    # A weight of 0 hides a value only if that is finite. Keys may be anything: their logits are masked.
    nisa.memset(values, 0.0, engine=nisa.engine.gpsimd)
    cache_rows.gather(values, cache.values, rows)
    return Span(_transposed(keys), values)


def _transposed(keys: nl.NkiTensor) -> nl.NkiTensor:
    """[min(128, head_dim), head_dim / 128 rounded up, num_positions] in order of positions, from rows of keys."""
    _, num_gathers, positions_per_row, head_dim = keys.shape
    height = min(NUM_PARTITIONS, head_dim)
    num_positions = num_gathers * NUM_PARTITIONS * positions_per_row
    turned = nl.ndarray((height, head_dim // height, num_positions), dtype=keys.dtype, buffer=nl.sbuf)
    # [height, head_dim // height, num_gathers, positions_per_row, 128]
    by_chunk = turned.reshape_dim(2, (num_gathers, NUM_PARTITIONS, positions_per_row)).permute((0, 1, 2, 4, 3))
    step = CHUNKS_PER_BANK // positions_per_row
    for dims in range(head_dim // height):
        for start in range(0, num_gathers, step):
            end = min(start + step, num_gathers)
            shape = (height, end - start, positions_per_row, NUM_PARTITIONS)
            bank = nl.ndarray(shape, dtype=keys.dtype, buffer=nl.psum)
            for gather in range(start, end):
                for position in range(positions_per_row):
                    nisa.nc_transpose(
                        bank[:, gather - start, position, :],
                        keys[:, gather, position, dims * height : (dims + 1) * height],
                        engine=nisa.engine.tensor,
                    )
            nisa.tensor_copy(by_chunk[:, dims, start:end, :, :], bank, engine=nisa.engine.scalar)
    return turned
