"""The slot formula, once; knows neither requests nor devices: it works on numpy arrays and torch tensors alike."""

from typing import Any

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0
SKIP_BLOCK_ID = -1


def slots_of(block_table: Any, rows: Any, positions: Any, block_size: int) -> Any:
    """Map token positions to cache slots (seed 000, "The Core Formula").

    Args:
        block_table: integer [num_rows, max_blocks_per_row], physical block ids.
        rows: integer [num_tokens], the row of `block_table` that each token belongs to.
        positions: int64 [num_tokens], each token's position in its sequence.
        block_size: tokens per block.

    Returns:
        int64 [num_tokens]: `block_id * block_size + position % block_size`.
    """
    logical_blocks = positions // block_size
    # Written as a shift of the position so that the arithmetic runs in its int64: a product with the int32 table
    # would overflow past 2^31 slots.
    return positions + (block_table[rows, logical_blocks] - logical_blocks) * block_size
