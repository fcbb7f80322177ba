"""Which physical block each row's logical blocks are: rows that grow, shrink to nothing and are read in batches.

Knows neither requests nor who allots blocks.
"""

import numpy as np
from numpy.typing import NDArray

from blockplane.kernels.slots import NULL_BLOCK_ID, SKIP_BLOCK_ID
from blockplane.protos.plan import Int32Array


class BlockTable:
    """int32 [max_num_rows, max_blocks_per_row]; entry j of a row is the block id of its logical block j (seed 004).

    Entries beyond a row's blocks are the null block. Written by plans only.
    """

    def __init__(self, max_num_rows: int, max_blocks_per_row: int) -> None:
        self.block_ids: Int32Array = np.full((max_num_rows, max_blocks_per_row), NULL_BLOCK_ID, np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_rows, np.int32)

    def append_row(self, row: int, block_ids: Int32Array) -> None:
        """Add blocks to a row's end; an empty list changes nothing."""
        start = self.num_blocks[row]
        self.block_ids[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def add_row(self, row: int, block_ids: Int32Array) -> None:
        """Replace a row's blocks; no id of the earlier ones is left behind."""
        self.clear_row(row)
        self.append_row(row, block_ids)

    def clear_row(self, row: int) -> None:
        self.block_ids[row, : self.num_blocks[row]] = NULL_BLOCK_ID
        self.num_blocks[row] = 0

    def gather(self, rows: NDArray[np.integer], num_rows_padded: int, width: int) -> Int32Array:
        """The attention boundary: int32 [num_rows_padded, width], with -1 for the null block and for padding rows."""
        gathered = np.full((num_rows_padded, width), SKIP_BLOCK_ID, np.int32)
        gathered[: len(rows)] = null_to_skip(self.block_ids[rows, :width])
        return gathered


def null_to_skip(block_table: Int32Array) -> Int32Array:
    """Mark unused entries for the kernels: block id 0 becomes -1, which they skip (seed 000, "Sentinel -1")."""
    return np.where(block_table == NULL_BLOCK_ID, np.int32(SKIP_BLOCK_ID), block_table)
