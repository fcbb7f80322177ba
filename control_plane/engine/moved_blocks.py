"""The blocks of a request that moves, at either end: held until they are read, and until they hold the same.

Knows neither groups nor streams. With `KVBlocks` the only one that takes blocks from a pool.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockplane.control_plane.engine.kv_blocks import KVBlocks, Prefix
from blockplane.control_plane.engine.request import Request
from blockplane.protos.plan import NO_ROWS, Int32Array


class Lease:
    """Blocks that are held from its making to its release, whatever their rows do meanwhile."""

    def __init__(self, blocks: KVBlocks, block_ids: Int32Array) -> None:
        """`block_ids`: int32, each named once."""
        self._blocks, self.block_ids = blocks, block_ids
        blocks.pool.hold(block_ids)
        blocks.num_lent += len(block_ids)

    def grow(self, num_blocks: int) -> Int32Array | None:
        """Take so many new blocks too, and return their ids; None = there is no room now, and nothing has changed."""
        block_ids = self._blocks.pool.allocate(num_blocks)
        if block_ids is not None:
            self._blocks.num_lent += num_blocks
            self.block_ids = np.concatenate((self.block_ids, block_ids))
        return block_ids

    def release(self) -> None:
        """Let go of them, once: afterwards it holds none."""
        block_ids, self.block_ids = self.block_ids, NO_ROWS
        # Of a chain the last goes first, which fewest share.
        self._blocks.pool.release(block_ids[::-1])
        self._blocks.num_lent -= len(block_ids)


@dataclass(frozen=True, slots=True)
class Room:
    """Where the whole blocks of a request come to be at another worker group, whose keys mean the same.

    Attributes:
        is_missing: bool [num_blocks, num_groups], those that the next query sees and that are not cached there.
        block_ids: int32, new blocks for these, in the array's order. Nobody finds them before `publish`.
        lease: of the new blocks, and of the cached ones that the request will find beside them.
    """

    blocks: KVBlocks
    request: Request
    is_missing: NDArray[np.bool_]
    block_ids: Int32Array
    lease: Lease

    @property
    def missing_keys(self) -> set[bytes]:
        """Of the blocks that nobody else needs to bring here."""
        keys = self.request.keys
        return {keys[number + 1] for number in np.flatnonzero(self.is_missing.any(axis=1)).tolist()}

    def publish(self) -> None:
        """Let the new blocks be found: they hold now what they are for."""
        table = np.zeros(self.is_missing.shape, np.int32)
        table[self.is_missing] = self.block_ids
        self.blocks.publish_table(self.request, 0, table, self.request.token_ids.tobytes())


def make_room(blocks: KVBlocks, request: Request, num_rows: int) -> Room | None:
    """Hold room for the whole blocks of a request that comes from another worker group; None = there is none now.

    `num_rows`: that run at the group or are about to; one more logical block is left for each. 0 = whatever fits.
    """
    keys, token_bytes, size = request.keys, request.token_ids.tobytes(), blocks.cache.block_bytes
    is_missing = blocks.seen_behind(len(keys) - 1)
    cached = np.zeros(is_missing.shape, np.int32)
    for index, kind in enumerate(blocks.kinds):
        for j in np.flatnonzero(is_missing[:, kind.groups.start]).tolist():
            found = blocks.cache.find(index, keys[j + 1], token_bytes[j * size : (j + 1) * size])
            if found is not None:
                cached[j, kind.groups] = found
    is_missing &= cached == 0
    prefix = Prefix(cached)
    if num_rows and not blocks.has_room(request.num_tokens + 1, prefix, num_rows):
        return None
    lease = Lease(blocks, prefix.held)
    block_ids = lease.grow(int(np.count_nonzero(is_missing)))
    if block_ids is None:
        lease.release()
        return None
    return Room(blocks, request, is_missing, block_ids, lease)


def lease_computed(blocks: KVBlocks, row: int, is_needed: NDArray[np.bool_]) -> Lease:
    """Hold those of a row's blocks, which are computed; `is_needed` as `Room.is_missing`, whose order they have."""
    return Lease(blocks, blocks.tables[row, : len(is_needed)][is_needed])
