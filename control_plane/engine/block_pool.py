"""Who holds which KV block, and in which order free ones are reused; knows neither requests nor what blocks hold."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

NULL_BLOCK_ID = 0


class BlockPool:
    """The blocks 1 .. num_blocks - 1 of a worker group. Block 0, the null block, is never handed out (seed 000).

    A block may have several holders, who share its content. Without a holder it is free, and keeps its content until it
    is reused: the block that has been free longest goes first.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None]) -> None:
        """`on_reuse` hears of every block whose content is given up."""
        self.num_usable = num_blocks - 1
        self._on_reuse = on_reuse
        # Both written here only. Keys of `_free` are in the order of reuse.
        self._num_holders = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(NULL_BLOCK_ID + 1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these nobody holds: holding them takes them from the free ones."""
        return sum(not self._num_holders[block_id] for block_id in block_ids)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks, or none at all: None means no room now, and the pool is as it was."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
            self._on_reuse(block_id)
        return block_ids

    def hold(self, block_ids: Sequence[int]) -> None:
        """Become one more holder of blocks, free ones or shared."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                del self._free[block_id]
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Be no holder any more. Of the blocks of one request the last is reused before the first, which more share."""
        for block_id in reversed(block_ids):
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                self._free[block_id] = None
