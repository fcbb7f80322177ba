"""What a prefix cache's watchers are told, and when: each change once the step that made it is answered.

Knows neither blocks nor requests nor gRPC.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import TypeAlias

from blockplane.protos.errors import BlockplaneError, CapacityError
from blockplane.protos.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEventBatch

MAX_BATCHES_BEHIND = 1024

Stored: TypeAlias = tuple[bytes, bytes | None, bytes]
"""A block's key, its parent's, None = it begins a sequence, and its tokens, int32."""

Change: TypeAlias = Stored | bytes | None
"""A block is stored; the one of a key is removed; None = all are. Plain values, since steps make them by the dozen."""


class KVWatcher:
    """What one watcher has not taken yet. One that falls far behind loses its feed rather than the engine its memory.

    Written by the feed, emptied by the watcher's stream, both in one event loop.
    """

    def __init__(self) -> None:
        self._batches: deque[KVEventBatch] = deque()
        self._error: BlockplaneError | None = None
        self._filled = asyncio.Event()

    def put(self, batch: KVEventBatch) -> None:
        if len(self._batches) == MAX_BATCHES_BEHIND:
            self._error = CapacityError(
                f"the watcher fell {MAX_BATCHES_BEHIND} batches of KV events behind; subscribe anew and read faster."
            )
            self._batches.clear()
        if self._error is None:
            self._batches.append(batch)
        self._filled.set()

    async def take(self) -> KVEventBatch:
        """Wait for the next batch. Raises CapacityError once the watcher has fallen too far behind."""
        await self._filled.wait()
        if self._error is not None:
            raise self._error
        batch = self._batches.popleft()
        if not self._batches:
            self._filled.clear()
        return batch


class KVEventFeed:
    """Hears from the cache of one worker group and, while its worker is there, tells the watchers: a `CacheWatcher`.

    A block can be found as soon as a plan fills it, but whoever watches is to know only what is computed: changes wait,
    in order, for the answer to the plan that they were made with. What is told then is kept here too, so that a new
    watcher can be told all of it.
    """

    def __init__(self, block_size: int, watchers: Collection[KVWatcher], group: int = 0) -> None:
        """Begin a new epoch. `watchers` is read whenever there is something to tell; their owner changes it."""
        self._block_size = block_size
        self._watchers = watchers
        self._group = group
        self._epoch = secrets.randbits(64)
        self._sequence = 0
        self._is_away = False
        """The worker is: then the watchers know of nothing, whatever is kept for its return."""
        self._recorded: list[Change] = []
        """Changes since the last mark."""
        self._unanswered: deque[tuple[int, list[Change]]] = deque()
        """Those before, by the step whose answer they wait for."""
        self._known: dict[bytes, Stored] = {}
        """What the watchers know of, by key."""
        self._tell([None])

    # -- what the cache says -------------------------------------------------------------------------------------------

    def stored(self, key: bytes, parent: bytes | None, token_bytes: bytes) -> None:
        self._recorded.append((key, parent, token_bytes))

    def removed(self, key: bytes) -> None:
        """Of a block that was not stored here, too, such as a salted one: it is told to nobody."""
        self._recorded.append(key)

    def cleared(self) -> None:
        self._recorded.append(None)

    # -- marks ---------------------------------------------------------------------------------------------------------

    def planned(self, step: int) -> None:
        """What was recorded since the last mark was made with this plan."""
        if self._recorded:
            self._unanswered.append((step, self._recorded))
            self._recorded = []

    def answered(self, step: int) -> None:
        """What was recorded since the last mark was made with this answer. Tells all that waits for no later one."""
        if not self._recorded and not self._unanswered:
            return
        self.planned(step)
        changes: list[Change] = []
        while self._unanswered and self._unanswered[0][0] <= step:
            changes += self._unanswered.popleft()[1]
        self._tell(changes)

    def release(self) -> None:
        """Tell all that was recorded, answered or not."""
        self._tell(self._take_all())

    def suspend(self) -> None:
        """The worker is gone. What it cached is kept in mind, should it come back; the cache has let go of the rest."""
        self._fold(self._take_all())
        self._is_away = True
        self._send([None])

    def resume(self) -> None:
        """The worker is back, with all that is cached: a new epoch, which begins with that."""
        self._fold(self._take_all())
        self._epoch, self._sequence, self._is_away = secrets.randbits(64), 0, False
        self._send([None, *self._known.values()])

    def _take_all(self) -> list[Change]:
        """All that was recorded and not told yet, answered or not."""
        changes = [change for _, made_with_a_plan in self._unanswered for change in made_with_a_plan]
        changes += self._recorded
        self._unanswered.clear()
        self._recorded = []
        return changes

    # -- what the watchers hear ----------------------------------------------------------------------------------------

    def snapshot(self) -> KVEventBatch:
        """All that the watchers know of, for a new one; the next batch has the next number."""
        return self._batch([None] if self._is_away else [None, *self._known.values()])

    def _tell(self, changes: list[Change]) -> None:
        changes = self._fold(changes)
        if changes and not self._is_away:
            self._send(changes)

    def _send(self, changes: list[Change]) -> None:
        self._sequence += 1
        if self._watchers:
            batch = self._batch(changes)
            for watcher in self._watchers:
                watcher.put(batch)

    def _fold(self, changes: list[Change]) -> list[Change]:
        """Make changes in what the watchers know. Returns those that say something new."""
        known, news = self._known, list[Change]()
        for change in changes:
            if isinstance(change, tuple):
                known[change[0]] = change
            elif change is None:
                known.clear()
                # Nothing before it matters any more.
                news.clear()
            elif known.pop(change, None) is None:
                continue
            news.append(change)
        return news

    def _batch(self, changes: Iterable[Change]) -> KVEventBatch:
        return KVEventBatch(self._epoch, self._sequence, self._block_size, tuple(_events(changes)), self._group)


def _events(changes: Iterable[Change]) -> list[KVEvent]:
    """Neighbouring changes that are all removals, or make one chain, become one event."""
    events: list[KVEvent] = []
    for kind, run in groupby(changes, type):
        if kind is tuple:
            events += map(_stored, _chains(change for change in run if isinstance(change, tuple)))
        elif kind is bytes:
            events.append(BlocksRemoved(tuple(_block_hash(change) for change in run if isinstance(change, bytes))))
        else:
            events.append(AllBlocksCleared())
    return events


def _chains(stored: Iterable[Stored]) -> list[list[Stored]]:
    chains: list[list[Stored]] = []
    for block in stored:
        if chains and block[1] == chains[-1][-1][0]:
            chains[-1].append(block)
        else:
            chains.append([block])
    return chains


def _stored(chain: list[Stored]) -> BlocksStored:
    parent = chain[0][1]
    return BlocksStored(
        block_hashes=tuple([_block_hash(key) for key, _, _ in chain]),
        parent_block_hash=None if parent is None else _block_hash(parent),
        token_bytes=b"".join([token_bytes for _, _, token_bytes in chain]),
    )


def _block_hash(key: bytes) -> int:
    """int64, from the key's first bytes: so much tells blocks apart, and the rest remains the cache's secret."""
    return int.from_bytes(key[:8], "little", signed=True)
