"""Who holds which KV block, and in which order free ones are reused; knows neither requests nor what blocks hold."""

from collections.abc import Callable

import numpy as np

from blockplane.protos.plan import Int32Array

NULL_BLOCK_ID = 0


class BlockPool:
    """The blocks 1 .. num_blocks - 1 of a worker group. Block 0, the null block, is never handed out (seed 000).

    A block may have several holders, who share its content. Without a holder it is free, and keeps its content until it
    is reused: the block that has been free longest goes first.

    The free list is a queue of block ids. A block that is held again keeps its old place there, which no longer counts;
    so nothing is ever moved, and every operation costs what it names, however many blocks are free.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[Int32Array], None]) -> None:
        """`on_reuse` hears of the blocks whose content is given up."""
        self.num_usable = num_blocks - 1
        self.num_free = num_blocks - 1
        self._on_reuse = on_reuse
        # All written here only. A free block stands in the queue at its place; a held one has place -1.
        self._num_holders = np.zeros(num_blocks, np.int32)
        self._place = np.arange(-1, num_blocks - 1)
        self._queue = np.zeros(2 * num_blocks, np.int32)
        self._queue[: num_blocks - 1] = np.arange(NULL_BLOCK_ID + 1, num_blocks)
        self._head, self._tail = 0, num_blocks - 1

    def num_free_among(self, block_ids: Int32Array) -> int:
        """How many of these, each named once, nobody holds: holding them takes them from the free ones."""
        return int(np.count_nonzero(self._num_holders[block_ids] == 0))

    def num_holders(self, block_id: int) -> int:
        return int(self._num_holders[block_id])

    def free_list(self) -> list[int]:
        """The free blocks in the order of their reuse."""
        block_ids: list[int] = self._standing(self._head, self._tail).tolist()
        return block_ids

    def allocate(self, num_blocks: int) -> Int32Array | None:
        """Take `num_blocks` blocks, or none at all: None means no room now, and the pool is as it was."""
        if num_blocks > self.num_free:
            return None
        found, num_missing = [], num_blocks
        while num_missing:
            standing = self._standing(self._head, self._head + num_missing)
            self._head += num_missing
            num_missing -= len(standing)
            found.append(standing)
        block_ids = found[0] if len(found) == 1 else np.concatenate([self._queue[:0], *found])
        self._place[block_ids] = -1
        self._num_holders[block_ids] = 1
        self.num_free -= num_blocks
        self._on_reuse(block_ids)
        return block_ids

    def hold(self, block_ids: Int32Array) -> None:
        """Become one more holder of blocks, free ones or shared, each named once."""
        self.num_free -= self.num_free_among(block_ids)
        self._place[block_ids] = -1
        self._num_holders[block_ids] += 1

    def release(self, block_ids: Int32Array) -> None:
        """Be a holder no more, once for every time that a block is named. The first of them is reused first."""
        np.subtract.at(self._num_holders, block_ids, 1)
        freed = block_ids[self._num_holders[block_ids] == 0]
        # Two holders may let go of a block at once; its place is then the last that was written.
        order = np.arange(len(freed))
        self._place[freed] = order
        freed = freed[self._place[freed] == order]
        if self._tail + len(freed) > len(self._queue):
            self._close_gaps(freed)
        self._place[freed] = np.arange(self._tail, self._tail + len(freed))
        self._queue[self._tail : self._tail + len(freed)] = freed
        self._tail += len(freed)
        self.num_free += len(freed)

    def _standing(self, start: int, stop: int) -> Int32Array:
        """The blocks whose place is in this part of the queue, in order; a copy."""
        block_ids = self._queue[start:stop]
        standing: Int32Array = block_ids[self._place[block_ids] == np.arange(start, start + len(block_ids))]
        return standing

    def _close_gaps(self, freed: Int32Array) -> None:
        """Move what stands in the queue to its front; at most once for as many releases as there are blocks."""
        self._place[freed] = -1
        standing = self._standing(self._head, self._tail)
        self._head, self._tail = 0, len(standing)
        self._queue[: self._tail] = standing
        self._place[standing] = np.arange(self._tail)
