"""What watchers of the prefix cache hear: each change once its step is answered, in order, and nothing private."""

import asyncio

import numpy as np
import pytest

from blockplane.control_plane.engine.kv_events import MAX_BATCHES_BEHIND, KVEventFeed, KVWatcher
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.errors import CapacityError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEventBatch
from blockplane.protos.plan import Configure, StepResult
from blockplane.protos.sampling import SamplingParams

B = 4


class Recorder(KVWatcher):
    """A watcher that keeps what it is told at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[KVEventBatch] = []

    def put(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)

    def events(self) -> list[object]:
        """All events since the last call, tokens as lists."""
        events = [event for batch in self.batches for event in batch.events]
        self.batches.clear()
        return [
            ("stored", event.block_hashes, event.parent_block_hash, np.frombuffer(event.token_bytes, np.int32).tolist())
            if isinstance(event, BlocksStored)
            else ("removed", event.block_hashes)
            if isinstance(event, BlocksRemoved)
            else "cleared"
            for event in events
        ]


def key(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True) + b"the rest"


def tokens(number: int) -> bytes:
    return np.full(B, number, np.int32).tobytes()


def store(feed: KVEventFeed, number: int, parent: int | None = None) -> None:
    feed.stored(key(number), None if parent is None else key(parent), tokens(number))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def feed(recorder: Recorder) -> KVEventFeed:
    feed = KVEventFeed(B, [recorder])
    assert recorder.events() == ["cleared"], "watchers of the old epoch learn of the new one"
    return feed


def test_a_change_is_told_once_the_step_that_made_it_is_answered(feed: KVEventFeed, recorder: Recorder) -> None:
    store(feed, 1)
    feed.planned(1)
    store(feed, 2)
    feed.planned(2)
    assert recorder.events() == []
    feed.answered(1)
    assert recorder.events() == [("stored", (1,), None, [1] * B)]
    feed.answered(2)
    assert recorder.events() == [("stored", (2,), None, [2] * B)]


def test_what_an_answer_makes_known_waits_for_what_stands_before_it(feed: KVEventFeed, recorder: Recorder) -> None:
    """With two plans in flight, the first one's answer comes after the second was made."""
    feed.planned(1)
    store(feed, 1)
    feed.planned(2)
    feed.removed(key(1))
    feed.answered(1)
    assert recorder.events() == []
    feed.answered(2)
    assert recorder.events() == [("stored", (1,), None, [1] * B), ("removed", (1,))]


def test_blocks_that_chain_become_one_event_and_so_do_removals(feed: KVEventFeed, recorder: Recorder) -> None:
    for number, parent in [(-1, None), (2, -1), (3, 2), (4, None), (5, 3)]:
        store(feed, number, parent)
    feed.removed(key(4))
    feed.removed(key(5))
    feed.answered(1)
    assert recorder.events() == [
        ("stored", (-1, 2, 3), None, [-1] * B + [2] * B + [3] * B),
        ("stored", (4,), None, [4] * B),
        ("stored", (5,), 3, [5] * B),
        ("removed", (4, 5)),
    ]


def test_a_removed_block_that_nobody_was_told_of_is_told_to_nobody(feed: KVEventFeed, recorder: Recorder) -> None:
    feed.removed(key(1))
    feed.answered(1)
    assert recorder.batches == []


def test_an_id_is_the_key_s_first_bytes_as_a_signed_number(feed: KVEventFeed, recorder: Recorder) -> None:
    feed.stored(b"\xfe" + b"\xff" * 15, b"\1" + b"\0" * 15, tokens(1))
    feed.answered(1)
    assert recorder.events() == [("stored", (-2,), 1, [1] * B)]


def test_numbers_follow_each_other_whoever_watches(recorder: Recorder) -> None:
    watchers: list[KVWatcher] = []
    feed = KVEventFeed(B, watchers)
    store(feed, 1)
    feed.answered(1)
    snapshot = feed.snapshot()
    watchers.append(recorder)
    store(feed, 2)
    feed.answered(2)
    feed.answered(3)
    feed.removed(key(1))
    feed.answered(4)
    assert [snapshot.sequence, *(batch.sequence for batch in recorder.batches)] == [2, 3, 4]
    assert {batch.epoch for batch in recorder.batches} == {snapshot.epoch}
    assert snapshot.block_size == B


def test_a_snapshot_holds_what_is_told_and_not_what_is_unanswered(feed: KVEventFeed, recorder: Recorder) -> None:
    for number, parent in [(1, None), (2, 1), (3, None)]:
        store(feed, number, parent)
    feed.answered(1)
    feed.removed(key(3))
    store(feed, 4)
    feed.planned(2)
    recorder.events()
    recorder.put(feed.snapshot())
    assert recorder.events() == [
        "cleared",
        ("stored", (1, 2), None, [1] * B + [2] * B),
        ("stored", (3,), None, [3] * B),
    ]


def test_after_a_reset_nothing_of_before_is_told(feed: KVEventFeed, recorder: Recorder) -> None:
    store(feed, 1)
    feed.planned(1)
    store(feed, 2)
    feed.cleared()
    feed.release()
    assert recorder.events() == ["cleared"]
    store(feed, 3)
    feed.answered(1)
    assert recorder.events() == [("stored", (3,), None, [3] * B)]


def test_a_lost_worker_s_blocks_are_gone_and_its_unanswered_never_come(feed: KVEventFeed, recorder: Recorder) -> None:
    store(feed, 1)
    feed.answered(1)
    store(feed, 2)
    feed.planned(2)
    store(feed, 3)
    recorder.events()
    feed.suspend()
    assert recorder.events() == ["cleared"]
    assert feed.snapshot().events == (AllBlocksCleared(),)
    feed.cleared()
    feed.release()
    assert recorder.events() == [], "while it is away there is nothing to tell"


def test_a_worker_that_comes_back_begins_an_epoch_with_what_the_cache_still_has(
    feed: KVEventFeed, recorder: Recorder
) -> None:
    store(feed, 1)
    store(feed, 2)
    feed.answered(1)
    store(feed, 3)
    feed.planned(2)
    feed.removed(key(1))
    feed.removed(key(3))
    before = feed.snapshot().epoch
    feed.suspend()
    recorder.events()
    feed.resume()
    assert recorder.events() == ["cleared", ("stored", (2,), None, [2] * B)]
    snapshot = feed.snapshot()
    assert (snapshot.sequence, snapshot.epoch == before) == (1, False)


def test_every_worker_begins_an_epoch() -> None:
    assert KVEventFeed(B, []).snapshot().epoch != KVEventFeed(B, []).snapshot().epoch


def test_a_model_without_full_attention_tells_nothing(feed: KVEventFeed, recorder: Recorder) -> None:
    configure = Configure(B, 20, 40, (8,), (1,), (KVCacheGroup(sliding_window=6),))
    scheduler = Scheduler(configure, WaitingQueue(10, 100, 1), vocab_size=100, watcher=feed)
    scheduler.add([Request("a", np.arange(8, dtype=np.int32), 8, SamplingParams(1), 0)])
    plan = scheduler.schedule()
    assert plan is not None
    feed.planned(plan.step)
    scheduler.update(StepResult(plan.step, np.array([1], np.int32)))
    feed.answered(plan.step)
    assert recorder.events() == []


# -- one watcher -------------------------------------------------------------------------------------------------------


def batch(sequence: int) -> KVEventBatch:
    return KVEventBatch(1, sequence, B, (AllBlocksCleared(),))


def test_a_watcher_takes_batches_one_by_one_in_order_and_waits_for_the_next() -> None:
    async def scenario() -> None:
        watcher = KVWatcher()
        watcher.put(batch(1))
        watcher.put(batch(2))
        assert [(await watcher.take()).sequence for _ in range(2)] == [1, 2]
        task = asyncio.ensure_future(watcher.take())
        await asyncio.sleep(0)
        assert not task.done()
        watcher.put(batch(3))
        assert (await asyncio.wait_for(task, 5)).sequence == 3

    asyncio.run(scenario())


def test_a_watcher_that_falls_too_far_behind_is_told_to_subscribe_anew_and_keeps_nothing() -> None:
    async def scenario() -> None:
        watcher = KVWatcher()
        for sequence in range(MAX_BATCHES_BEHIND):
            watcher.put(batch(sequence))
        assert (await watcher.take()).sequence == 0
        watcher.put(batch(MAX_BATCHES_BEHIND))
        watcher.put(batch(MAX_BATCHES_BEHIND + 1))
        for _ in range(2):
            with pytest.raises(CapacityError, match="subscribe anew"):
                await watcher.take()
            watcher.put(batch(MAX_BATCHES_BEHIND + 2))
            assert not watcher._batches

    asyncio.run(scenario())
