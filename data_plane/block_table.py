"""Which physical block each row's logical blocks are: rows that grow, shrink to nothing and are read in batches.

Knows neither requests nor who allots blocks.
"""

import numpy as np
from numpy.typing import NDArray

from blockplane.kernels.slots import NULL_BLOCK_ID, SKIP_BLOCK_ID
from blockplane.protos.plan import Int32Array


class BlockTable:
    """int32 [num_groups, max_num_rows, max_blocks_per_row]; entry j of a row is the block id of its logical block j in
    that KV cache group (seed 004).

    A row has as many logical blocks in one group as in the others; entries beyond them are the null block. What left a
    group's window keeps its id, though the block may be another row's by now: nothing is read there. Written by plans
    only.
    """

    def __init__(self, num_groups: int, max_num_rows: int, max_blocks_per_row: int) -> None:
        self.block_ids: Int32Array = np.full((num_groups, max_num_rows, max_blocks_per_row), NULL_BLOCK_ID, np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_rows, np.int32)

    def append_row(self, row: int, block_ids: Int32Array) -> None:
        """Add blocks, [num_groups, num_new_blocks], to a row's end; none changes nothing."""
        start = self.num_blocks[row]
        end = start + block_ids.shape[1]
        self.block_ids[:, row, start:end] = block_ids
        self.num_blocks[row] = end

    def add_row(self, row: int, block_ids: Int32Array) -> None:
        """Replace a row's blocks; no id of the earlier ones is left behind."""
        self.clear_row(row)
        self.append_row(row, block_ids)

    def clear_row(self, row: int) -> None:
        self.block_ids[:, row, : self.num_blocks[row]] = NULL_BLOCK_ID
        self.num_blocks[row] = 0

    def gather(self, rows: NDArray[np.integer], num_rows_padded: int, width: int) -> Int32Array:
        """The attention boundary: int32 [num_groups, num_rows_padded, width], -1 for null blocks and padding rows."""
        gathered = np.full((len(self.block_ids), num_rows_padded, width), SKIP_BLOCK_ID, np.int32)
        gathered[:, : len(rows)] = null_to_skip(self.block_ids[:, rows, :width])
        return gathered


def null_to_skip(block_table: Int32Array) -> Int32Array:
    """Mark unused entries for the kernels: block id 0 becomes -1, which they skip (seed 000, "Sentinel -1")."""
    return np.where(block_table == NULL_BLOCK_ID, np.int32(SKIP_BLOCK_ID), block_table)
