"""A random walk over the scheduler with an index that hears the events: it knows what can be found, and no more."""

from itertools import count

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from blockplane.client.kv_index import KVIndex
from blockplane.control_plane.engine.kv_events import KVEventFeed, KVWatcher
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.errors import CapacityError, InvalidRequestError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.kv_events import KVEventBatch
from blockplane.protos.plan import Configure, StepResult
from blockplane.protos.sampling import SamplingParams

B = 4


class Mirror(KVWatcher):
    """A watcher whose index must never miss a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KVIndex()

    def put(self, batch: KVEventBatch) -> None:
        assert self.index.apply(batch)


def told(index: KVIndex) -> dict[int, bytes]:
    """Tokens of blocks by id."""
    blocks = index._groups[0]._blocks if index._groups else {}
    return {block_hash: token_bytes for block_hash, (_, token_bytes) in blocks.items()}


class FeedWalk(RuleBasedStateMachine):
    """Requests come and go in a cache that is too small, some of them private, with two plans in flight."""

    @initialize(usable_blocks=st.integers(4, 14), window=st.sampled_from([None, 6]), max_num_seqs=st.integers(1, 3))
    def start(self, usable_blocks: int, window: int | None, max_num_seqs: int) -> None:
        groups = (KVCacheGroup(),) if window is None else (KVCacheGroup(), KVCacheGroup(sliding_window=window))
        self.configure = Configure(B, usable_blocks + 1, 40, (8,), (max_num_seqs,), groups)
        self.mirror = Mirror()
        self.names = count()
        self.requests: list[Request] = []
        self.private_keys: set[bytes] = set()
        self.attach([])

    def attach(self, held: list[Request]) -> None:
        self.feed = KVEventFeed(B, [self.mirror])
        queue = WaitingQueue(100, 10_000, 10)
        self.scheduler = Scheduler(self.configure, queue, vocab_size=100, eos_token_ids=(0,), watcher=self.feed)
        self.unanswered: list[int] = []
        assert told(self.mirror.index) == {}
        for request in held:
            self.scheduler.resume(request)

    @rule(
        length=st.integers(1, 30),
        split=st.integers(0, 30),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from(["", "", "a"]),
        skip=st.sampled_from([False, False, True]),
        num_samples=st.integers(1, 2),
    )
    def submit(self, length: int, split: int, max_tokens: int, salt: str, skip: bool, num_samples: int) -> None:
        prompt = np.array([1 + index + (length if index >= split else 0) for index in range(length)], np.int32)
        name = str(next(self.names))
        requests = [
            Request(name, prompt, length, SamplingParams(max_tokens), index, cache_salt=salt, skip_prefix_cache=skip)
            for index in range(num_samples)
        ]
        try:
            self.scheduler.add(requests)
        except (CapacityError, InvalidRequestError):
            return
        self.requests += requests

    @rule()
    def plan(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.feed.planned(plan.step)
            self.unanswered.append(plan.step)

    @precondition(lambda self: self.unanswered)
    @rule(seed=st.integers(0, 99))
    def take_an_answer(self, seed: int) -> None:
        self.answer(np.random.default_rng(seed))

    def answer(self, sampler: np.random.Generator) -> None:
        """Some rows fail and some texts end."""
        step = self.unanswered.pop(0)
        num_sampled = len(self.scheduler._in_flight[0].sampled.requests)
        self.scheduler.update(StepResult(step, sampler.integers(-1, 30, num_sampled, np.int32)))
        self.feed.answered(step)
        self.check()

    @rule(num_steps=st.integers(1, 9), seed=st.integers(0, 99))
    def run(self, num_steps: int, seed: int) -> None:
        """One plan at a time, as long as there is work, up to so many."""
        sampler = np.random.default_rng(seed)
        for _ in range(num_steps):
            self.plan()
            if self.unanswered:
                self.answer(sampler)

    @precondition(lambda self: any(not request.ended for request in self.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [request for request in self.requests if not request.ended]
        self.scheduler.end(live[data.draw(st.integers(0, len(live) - 1))])

    @rule(renews=st.booleans())
    def reset(self, renews: bool) -> None:
        if renews:
            self.scheduler.renew_weights()
        else:
            self.scheduler.blocks.cache.reset()
        self.feed.release()
        assert told(self.mirror.index) == {}

    @rule(returns=st.booleans())
    def lose_the_worker(self, returns: bool) -> None:
        """It comes back with all that it had cached, or another takes its place."""
        self.note_private_keys()
        held, _ = self.scheduler.lose()
        self.feed.suspend()
        newcomer = KVIndex()
        assert newcomer.apply(self.feed.snapshot())
        assert told(self.mirror.index) == told(newcomer) == {}
        if not returns:
            self.attach(held)
            return
        self.unanswered = []
        self.feed.resume()
        for request in held:
            self.scheduler.resume(request)
        self.check()

    def note_private_keys(self) -> None:
        """What stands behind a salt, or behind weights that are no more."""
        for request in self.requests:
            if request.keys[:1] != [self.scheduler.blocks._public_root]:
                self.private_keys.update(request.keys)

    def check(self) -> None:
        """Nobody is told too much; and once nothing is unanswered, nothing is missing."""
        self.note_private_keys()
        cached = {
            number(key): token_bytes
            for key, (_, token_bytes) in self.scheduler.blocks.cache._entries[0].items()
            if key not in self.private_keys
        }
        if not self.unanswered:
            assert told(self.mirror.index) == cached
            self.check_prefixes()
        newcomer = KVIndex()
        assert newcomer.apply(self.feed.snapshot())
        assert told(newcomer) == told(self.mirror.index)

    def check_prefixes(self) -> None:
        """The index finds of every text what the cache does."""
        cache, root = self.scheduler.blocks.cache, self.scheduler.blocks._public_root
        for request in self.requests:
            keys, token_bytes = [root], request.token_ids.tobytes()
            cache.extend(keys, token_bytes)
            num_blocks = len(cache.find_run(0, keys[1:], token_bytes))
            assert self.mirror.index.longest_prefix(request.token_ids) == num_blocks * B


def number(key: bytes) -> int:
    return int(np.frombuffer(key[:8], "<i8")[0])


TestFeedWalk = FeedWalk.TestCase
TestFeedWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
