"""Which physical block each row's logical blocks are: rows that grow, shrink to nothing and are read in batches.

Knows neither requests nor who allots blocks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockplane.kernels.slots import ALONE, NULL_BLOCK_ID, SKIP_BLOCK_ID, ContextParallel
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.plan import Int32Array, IntArray


class BlockTable:
    """The block ids of every row in every KV cache group (seed 004).

    A row has as many logical blocks in one group as in the others. What left a group's window keeps its id, though the
    block may be another row's by now: nothing is read there. Written by plans only.

    Attributes:
        entries: int32 [num_groups, max_num_rows, max_blocks_per_row]; entry j of a row is the block id of its logical
            block j. The null block and what is beyond a row's blocks are SKIP_BLOCK_ID, as the kernels want them:
            remapped once, when written, and not at every step.
        num_blocks: int64 [max_num_rows].
        block_size, context_parallel: what slots are reckoned by: tokens of a block that this rank keeps, and which.
    """

    def __init__(
        self,
        num_groups: int,
        max_num_rows: int,
        max_blocks_per_row: int,
        block_size: int = 1,
        kernel_block_size: int | None = None,
        context_parallel: ContextParallel = ALONE,
    ) -> None:
        """`kernel_block_size` is the block size of what `gather` returns; None = `block_size`, in tokens too.

        Raises:
            ConfigurationError: it does not divide `block_size`.
        """
        self.entries: Int32Array = np.full((num_groups, max_num_rows, max_blocks_per_row), SKIP_BLOCK_ID, np.int32)
        self.num_blocks = np.zeros(max_num_rows, np.int64)
        self.block_size, self.context_parallel = block_size, context_parallel
        self._num_parts = num_kernel_blocks(block_size, kernel_block_size or block_size)
        self._groups = np.arange(num_groups)[:, None]

    @property
    def block_ids(self) -> Int32Array:
        """int32 [num_groups, max_num_rows, max_blocks_per_row] as the control plane has them: no block is block 0."""
        return np.where(self.entries == SKIP_BLOCK_ID, np.int32(NULL_BLOCK_ID), self.entries)

    def next_logical_blocks(self, rows: IntArray) -> NDArray[np.integer]:
        """Per row named in `rows`, the logical block that it gets next; a row that is named again gets one more."""
        order = np.argsort(rows, kind="stable")
        in_order = rows[order]
        logical_blocks = np.empty(len(rows), np.int64)
        logical_blocks[order] = self.num_blocks[in_order] + np.arange(len(rows)) - np.searchsorted(in_order, in_order)
        return logical_blocks

    def append(self, rows: IntArray, block_ids: Int32Array) -> None:
        """Add blocks to the ends of many rows, in order.

        Args:
            rows: [num_new_blocks], one at least; a row may be named more than once.
            block_ids: int32 [num_groups, num_new_blocks].

        Raises:
            IndexError: there is no such row, or it has no room; nothing was changed.
        """
        num_new = np.bincount(rows, minlength=len(self.num_blocks))
        logical_blocks = self.num_blocks[rows] if num_new.max() == 1 else self.next_logical_blocks(rows)
        self.entries[:, rows, logical_blocks] = null_to_skip(block_ids)
        self.num_blocks += num_new

    def append_row(self, row: int, block_ids: Int32Array) -> None:
        """Add blocks, [num_groups, num_new_blocks], to a row's end; none changes nothing."""
        if block_ids.shape[1]:
            rows = np.full(block_ids.shape[1], row)
            self.append(rows, block_ids)

    def add_row(self, row: int, block_ids: Int32Array) -> None:
        """Replace a row's blocks; no id of the earlier ones is left behind."""
        self.clear_row(row)
        self.append_row(row, block_ids)

    def clear_row(self, row: int) -> None:
        self.entries[:, row, : self.num_blocks[row]] = SKIP_BLOCK_ID
        self.num_blocks[row] = 0

    def clear(self) -> None:
        self.entries[:] = SKIP_BLOCK_ID
        self.num_blocks[:] = 0

    def move_row(self, source: int, target: int) -> None:
        """Give one row's blocks to another, in place of its own; the source is left empty.

        This and `swap_row` are for backends that want the rows of a batch dense.
        """
        if source != target:
            self.swap_row(source, target)
            self.clear_row(source)

    def swap_row(self, row: int, other: int) -> None:
        self.entries[:, [row, other]] = self.entries[:, [other, row]]
        self.num_blocks[[row, other]] = self.num_blocks[[other, row]]

    def gather(
        self, rows: IntArray, num_rows_padded: int, width: int, groups: Sequence[int] | None = None
    ) -> Int32Array:
        """The attention boundary: what a step reads of these groups, in one array that goes to the device in one copy.

        Args:
            rows: [num_rows]. num_rows_padded: at least as many; the rest are padding rows.
            width: blocks of each row, its first ones.
            groups: None = all.

        Returns:
            int32 [num_groups, num_rows_padded, width in kernel blocks], -1 for null blocks and padding.
        """
        padded = np.zeros(num_rows_padded, np.int64)
        padded[: len(rows)] = rows
        # Indexed by group too, since with a slice there numpy would lay the groups side by side within a row.
        gathered = self.entries[self._groups if groups is None else self._groups[groups], padded, :width]
        gathered[:, len(rows) :] = SKIP_BLOCK_ID
        if width > gathered.shape[2]:
            missing = width - gathered.shape[2]
            gathered = np.pad(gathered, ((0, 0), (0, 0), (0, missing)), constant_values=SKIP_BLOCK_ID)
        return map_to_kernel_blocks(gathered, self._num_parts)

    def gather_tails(
        self, group: int, rows: IntArray, num_rows_padded: int, first_blocks: IntArray, width: int
    ) -> Int32Array:
        """The same of one group, `width` blocks of each row from a logical block of its own on.

        Args:
            first_blocks: [num_rows].

        Returns:
            int32 [num_rows_padded, width in kernel blocks].
        """
        entries = self.entries[group]
        logical_blocks = first_blocks[:, None] + np.arange(width)
        last = entries.shape[1] - 1
        tails = np.full((num_rows_padded, width), SKIP_BLOCK_ID, np.int32)
        found = entries[rows[:, None], np.minimum(logical_blocks, last)]
        tails[: len(rows)] = np.where(logical_blocks > last, SKIP_BLOCK_ID, found)
        return map_to_kernel_blocks(tails, self._num_parts)


def null_to_skip(block_table: Int32Array) -> Int32Array:
    """Mark unused entries for the kernels: block id 0 becomes -1, which they skip (seed 000, "Sentinel -1")."""
    is_null = block_table == NULL_BLOCK_ID
    return np.where(is_null, np.int32(SKIP_BLOCK_ID), block_table) if is_null.any() else block_table


def num_kernel_blocks(block_size: int, kernel_block_size: int) -> int:
    """How many blocks of a kernel that wants smaller ones make one of ours; sizes in tokens.

    Raises:
        ConfigurationError: the smaller size does not divide the larger.
    """
    if block_size % kernel_block_size:
        raise ConfigurationError(
            f"block_size is {block_size}, and the kernel's blocks of {kernel_block_size} tokens do not divide it; make"
            f" block_size a multiple of {kernel_block_size}."
        )
    return block_size // kernel_block_size


def map_to_kernel_blocks(block_ids: Int32Array, num_parts: int) -> Int32Array:
    """Split each block into `num_parts` of the kernel's (seed 004, "kernel block_size"); every token keeps its slot.

    int32 [..., num_blocks] -> int32 [..., num_blocks * num_parts]; -1 stays -1, which skips.
    """
    if num_parts == 1:
        return block_ids
    offsets: Int32Array = np.arange(num_parts, dtype=np.int32)
    parts: Int32Array = block_ids[..., None] * num_parts + offsets
    parts[block_ids == SKIP_BLOCK_ID] = SKIP_BLOCK_ID
    return parts.reshape(*block_ids.shape[:-1], -1)
