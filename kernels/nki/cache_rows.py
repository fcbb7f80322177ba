"""Reads a head-major KV cache by rows of neighbouring positions, as one span of positions needs; knows no attention.

A row is `positions_per_row` positions of one block and KV head, contiguous in HBM; the block size is a multiple of it.
Row r of a span stands on partition r % 128 of gather r // 128, so each gather is one DMA of 128 rows. Row ids are exact
32-bit integers, from GpSimd, and those of a block -1 are negative: out of bounds, so the DMA skips them.
"""

import nki.isa as nisa
import nki.language as nl

NUM_PARTITIONS = 128


def block_ids(
    block_table: nl.NkiTensor, table_row: int, first_block: nl.NkiTensor, rows_per_block: int, num_gathers: int
) -> nl.NkiTensor:
    """int32 [128, num_gathers], the block of each row of a span, of which only the start is known at run time.

    Args:
        block_table: int32 [num_rows, width] in HBM; the span's blocks must lie within the width.
        first_block: int32 [1, 1] in SBUF, which of the table row's blocks is the span's first.
    """
    blocks = nl.ndarray((NUM_PARTITIONS, num_gathers), dtype=nl.int32, buffer=nl.sbuf)
    blocks_per_gather = NUM_PARTITIONS // rows_per_block
    nisa.dma_copy(
        dst=blocks,
        src=block_table.ap(
            pattern=[[1, blocks_per_gather], [0, rows_per_block], [blocks_per_gather, num_gathers]],
            offset=table_row * block_table.shape[1],
            scalar_offset=first_block,
            indirect_dim=1,
        ),
    )
    return blocks


def skip_outside(blocks: nl.NkiTensor, positions_per_row: int, first: nl.NkiTensor, end: nl.NkiTensor) -> None:
    """Make -1 the blocks of rows that have nothing within [first, end), float32 [128, 1] from the span's start on."""
    num_gathers = blocks.shape[1]
    pattern = [[NUM_PARTITIONS * positions_per_row, num_gathers]]
    starts = nl.ndarray(blocks.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(starts, pattern=pattern, offset=0, channel_multiplier=positions_per_row)
    ends = nl.ndarray(blocks.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(ends, pattern=pattern, offset=positions_per_row, channel_multiplier=positions_per_row)
    # All bits of a -1 are set, so that "or" leaves -1 where a row is outside and the block where not.
    behind = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(behind, starts, op0=nl.greater_equal, operand0=end, op1=nl.multiply, operand1=-1.0)
    nisa.tensor_tensor(blocks, blocks, behind, op=nl.bitwise_or)
    before = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(before, ends, op0=nl.less_equal, operand0=first, op1=nl.multiply, operand1=-1.0)
    nisa.tensor_tensor(blocks, blocks, before, op=nl.bitwise_or)


def row_ids(blocks: nl.NkiTensor, rows_per_block: int, num_kv_heads: int, kv_head: int) -> nl.NkiTensor:
    """int32 [128, num_gathers], where each row stands in the cache of rows: (block * heads + head) * rows + row.

    Negative for a block of -1, whatever the head and the row.
    """
    rows = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(rows, pattern=[[0, blocks.shape[1]]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(rows, rows, op0=nl.bitwise_and, operand0=rows_per_block - 1)
    stride = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(stride, num_kv_heads * rows_per_block)
    head = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(head, kv_head * rows_per_block)
    first_rows = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(first_rows, blocks, stride, op=nl.multiply)
    nisa.tensor_tensor(first_rows, first_rows, head, op=nl.add)
    nisa.tensor_tensor(rows, rows, first_rows, op=nl.add)
    return rows


def gather(tile: nl.NkiTensor, cache: nl.NkiTensor, rows: nl.NkiTensor) -> None:
    """Fill a tile [128, num_gathers, positions_per_row, head_dim], cast to its dtype; skipped rows keep what they had.

    Args:
        cache: [num_blocks, num_kv_heads, block_size, head_dim] in HBM.
        rows: int32 [128, num_gathers] of `row_ids`.
    """
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    _, num_gathers, positions_per_row, _ = tile.shape
    width = positions_per_row * head_dim
    cache_rows = cache.reshape((num_blocks * num_kv_heads * block_size // positions_per_row, width))
    tile_rows = tile.reshape((NUM_PARTITIONS, num_gathers, width))
    for each in range(num_gathers):
        nisa.dma_copy(
            dst=tile_rows[:, each, :],
            src=cache_rows.ap(
                pattern=[[width, NUM_PARTITIONS], [1, width]],
                vector_offset=rows[:, each : each + 1],
                indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )
