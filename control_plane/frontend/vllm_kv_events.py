"""The prefix caches' events as the public vLLM engine protocol tells them to one subscriber. Knows no connection.

The protocol knows one cache behind an address, a frontend may serve several worker groups: a group that forgets all it
has is told as the removal of its blocks, whose ids are no other group's.
"""

import time
from collections.abc import Iterable, Iterator

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from blockplane.protos.kv_events import BlocksRemoved, BlocksStored, KVEvent, KVEventBatch

MAX_BATCH_BYTES = 1 << 20
"""About; what is cached as a whole may take a hundred times as much."""

_BLOCK_BYTES, _TOKEN_BYTES, _HASH_BYTES = 32, 5, 10
"""What a block takes at most beside its tokens, what a token does, and what a removed block does."""


class Subscription:
    """Numbers one subscriber's batches 1, 2, 3, ...; the first says that nothing is cached, and what follows adds."""

    def __init__(self) -> None:
        self._sequence = 0
        self._event_id = 0
        self._block_hashes: dict[int, dict[int, None]] = {}
        """By group, those of the blocks that the subscriber knows of, in the order in which they were stored."""

    def begin(self) -> common.KvEventBatch:
        """The first batch."""
        return self._batch([common.KvCacheEvent(cleared=common.KvCacheCleared())])

    def batches(self, batch: KVEventBatch) -> Iterator[common.KvEventBatch]:
        """The same in batches that are not too large; none where nothing is new."""
        events: list[common.KvCacheEvent] = []
        num_bytes = 0
        for event in batch.events:
            for part, part_bytes in self._parts(event, batch):
                if events and num_bytes + part_bytes > MAX_BATCH_BYTES:
                    yield self._batch(events)
                    events, num_bytes = [], 0
                events.append(part)
                num_bytes += part_bytes
        if events:
            yield self._batch(events)

    def _parts(self, event: KVEvent, batch: KVEventBatch) -> Iterator[tuple[common.KvCacheEvent, int]]:
        """An event in parts, and about how many bytes each takes."""
        known = self._block_hashes.setdefault(batch.group, {})
        if isinstance(event, BlocksStored):
            known.update(dict.fromkeys(event.block_hashes))
            yield from _stored(event, batch.block_size)
        elif isinstance(event, BlocksRemoved):
            for block_hash in event.block_hashes:
                known.pop(block_hash, None)
            yield from _removed(event.block_hashes)
        else:
            gone = tuple(known)
            known.clear()
            # A chain's tail before its head.
            yield from _removed(gone[::-1])

    def _batch(self, events: Iterable[common.KvCacheEvent]) -> common.KvEventBatch:
        self._sequence += 1
        batch = common.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), events=events)
        for event in batch.events:
            self._event_id += 1
            event.event_id = self._event_id
        return batch


def _stored(event: BlocksStored, block_size: int) -> Iterator[tuple[common.KvCacheEvent, int]]:
    block_bytes = _BLOCK_BYTES + _TOKEN_BYTES * block_size
    num_blocks = max(1, MAX_BATCH_BYTES // block_bytes)
    tokens = np.frombuffer(event.token_bytes, "<i4").reshape(-1, block_size)
    parent = event.parent_block_hash
    for start in range(0, len(event.block_hashes), num_blocks):
        block_hashes = event.block_hashes[start : start + num_blocks]
        blocks = [
            common.KvBlock(block_hash=block_hash, token_ids=token_ids, block_size=block_size)
            for block_hash, token_ids in zip(block_hashes, tokens[start : start + num_blocks].tolist(), strict=True)
        ]
        stored = common.KvBlocksStored(blocks=blocks, parent_block_hash=parent)
        yield common.KvCacheEvent(stored=stored), len(blocks) * block_bytes
        parent = block_hashes[-1]


def _removed(block_hashes: tuple[int, ...]) -> Iterator[tuple[common.KvCacheEvent, int]]:
    num_blocks = MAX_BATCH_BYTES // _HASH_BYTES
    for start in range(0, len(block_hashes), num_blocks):
        part = block_hashes[start : start + num_blocks]
        yield common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=part)), len(part) * _HASH_BYTES
