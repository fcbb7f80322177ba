"""A router's mirror of what one engine's prefix caches hold, kept by the engine's KV events; knows no connection."""

from collections.abc import Sequence

import numpy as np

from blockplane.protos.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEventBatch
from blockplane.protos.plan import Int32Array

_TOKEN = np.dtype("<i4")


class KVIndex:
    """Says how many tokens of a prompt an engine need not compute, so that requests go where their prefixes are.

    Apply all batches of one `WatchKVEvents` call in order, and after a gap those of a new call to the same index.
    """

    def __init__(self) -> None:
        self._groups: dict[int, GroupIndex] = {}

    def __len__(self) -> int:
        """Blocks that the engine's worker groups hold, all together."""
        return sum(map(len, self._groups.values()))

    def apply(self, batch: KVEventBatch) -> bool:
        """Fold a batch in; one of an older epoch of its group, or that came before, changes nothing.

        Returns:
            False where batches before this one are missing. Nothing has changed then; watch anew, since the first
            batches of a new call have all that is cached.
        """
        return self._groups.setdefault(batch.group, GroupIndex()).apply(batch)

    def longest_prefix(self, token_ids: Sequence[int] | Int32Array) -> int:
        """How many leading tokens the worker group has cached that has the most of them."""
        return max(self.longest_prefixes(token_ids).values(), default=0)

    def longest_prefixes(self, token_ids: Sequence[int] | Int32Array) -> dict[int, int]:
        """By worker group, how many leading tokens are cached: whole blocks, all of `token_ids` included."""
        return {number: group.longest_prefix(token_ids) for number, group in self._groups.items()}


class GroupIndex:
    """What one worker group's cache holds."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._past_epochs: set[int] = set()
        self._sequence = 0
        self._block_size = 0
        # Each is the other's inverse. A block's parent may be gone: the block cannot be found until that comes back.
        self._blocks: dict[int, tuple[int | None, bytes]] = {}
        self._hashes: dict[tuple[int | None, bytes], int] = {}

    def __len__(self) -> int:
        """Blocks that the group holds."""
        return len(self._blocks)

    def apply(self, batch: KVEventBatch) -> bool:
        """As `KVIndex.apply`, of this group's batches."""
        if batch.epoch in self._past_epochs or (batch.epoch == self._epoch and batch.sequence <= self._sequence):
            return True
        is_next = batch.epoch == self._epoch and batch.sequence == self._sequence + 1
        if not is_next and not (batch.events and isinstance(batch.events[0], AllBlocksCleared)):
            return False
        if self._epoch is not None and batch.epoch != self._epoch:
            self._past_epochs.add(self._epoch)
        self._epoch, self._sequence, self._block_size = batch.epoch, batch.sequence, batch.block_size
        for event in batch.events:
            self._apply(event)
        return True

    def longest_prefix(self, token_ids: Sequence[int] | Int32Array) -> int:
        """How many leading tokens the group has cached: whole blocks, all of `token_ids` included."""
        if not self._block_size:
            return 0
        if not self._blocks:
            return 0
        tokens, size = np.asarray(token_ids, _TOKEN), self._block_size
        parent = None
        for start in range(0, len(tokens) - size + 1, size):
            parent = self._hashes.get((parent, tokens[start : start + size].tobytes()))
            if parent is None:
                return start
        return len(tokens) - len(tokens) % size

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, BlocksStored):
            parent, num_bytes = event.parent_block_hash, self._block_size * _TOKEN.itemsize
            for index, block_hash in enumerate(event.block_hashes):
                self._store(block_hash, parent, event.token_bytes[index * num_bytes : (index + 1) * num_bytes])
                parent = block_hash
        elif isinstance(event, BlocksRemoved):
            for block_hash in event.block_hashes:
                self._remove(block_hash)
        else:
            self._blocks.clear()
            self._hashes.clear()

    def _store(self, block_hash: int, parent: int | None, token_bytes: bytes) -> None:
        self._blocks[block_hash] = parent, token_bytes
        self._hashes[parent, token_bytes] = block_hash

    def _remove(self, block_hash: int) -> None:
        if block_hash in self._blocks:
            del self._hashes[self._blocks.pop(block_hash)]
