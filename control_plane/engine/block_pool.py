"""Which KV blocks are free; knows neither requests nor what blocks hold."""

from collections import deque

NULL_BLOCK_ID = 0


class BlockPool:
    """The blocks 1 .. num_blocks - 1 of a worker group. Block 0, the null block, is never handed out (seed 000)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        # Oldest freed first, so that a freed block keeps its content as long as possible. Written here only.
        self._free = deque(range(NULL_BLOCK_ID + 1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks, or none at all: None means no room now, and the pool is as it was."""
        if num_blocks > len(self._free):
            return None
        return [self._free.popleft() for _ in range(num_blocks)]

    def release(self, block_ids: list[int]) -> None:
        """Give blocks back. A request's last block is reused before its first."""
        self._free.extend(reversed(block_ids))
