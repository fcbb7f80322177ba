"""A walk over the scheduler: whatever is done in whatever order, what must hold holds. Draws nothing by itself."""

import random
from collections import Counter, deque

import numpy as np
from driving import scheduler_of
from naive_worker import Digest, NaiveWorker

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.protos.errors import CapacityError, InvalidRequestError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Configure, StepResult
from blockplane.protos.sampling import SamplingParams

EOS = 0
NUM_TOKEN_IDS = 32
LAYOUTS = (
    (KVCacheGroup(),),
    (KVCacheGroup(), KVCacheGroup(sliding_window=6), KVCacheGroup(sliding_window=6)),
    (KVCacheGroup(sliding_window=8),),
    (KVCacheGroup(), KVCacheGroup(sliding_window=1), KVCacheGroup(attention_chunk_size=6)),
    (KVCacheGroup(), KVCacheGroup(), KVCacheGroup(attention_chunk_size=8)),
)

COUNTS = (
    "num_admitted",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_discarded_tokens",
)


def next_token(token_ids: list[int]) -> int:
    """A model that sees all its tokens: wrong tokens in a row give wrong tokens out. Every 32nd text ends."""
    return sum((index + 1) * token for index, token in enumerate(token_ids)) * 2654435761 % 2**32 >> 27


def random_configure(rng: random.Random) -> Configure:
    """A cache that is too small, few rows, and whatever else the scheduler is told."""
    block_size, groups = rng.choice((1, 2, 4)), rng.choice(LAYOUTS)
    multiple = rng.choice((1, 1, 8))
    budget = rng.choice((8, 16, 24)) if multiple > 1 else rng.choice((4, 6, 16))
    is_segmented = rng.random() < 0.9
    return Configure(
        block_size,
        1 + len(groups) * rng.randint(2, 48 // block_size),
        48 if is_segmented else budget,
        (budget,),
        (rng.randint(1, 5),),
        groups,
        kv_segment_size=512 if is_segmented else 0,
        prefill_multiple_of=multiple,
        num_draft_tokens=rng.choice((0, 0, 1, 3)),
    )


class Walk:
    """One scheduler after another over the same requests; each with a worker that runs ahead of the answers."""

    def __init__(self, configure: Configure, rng: random.Random) -> None:
        self.configure, self.rng = configure, rng
        self.failure_rate = rng.choice((0.0, 0.0, 0.02))
        self.live: dict[int, Request] = {}
        self.prompts: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        """What was given out for each request, by its stream."""
        self.ends: Counter[int] = Counter()
        self.weights = 0
        self.clock = 0.0
        self.num_operations = 0
        self._attach([])

    def _attach(self, held: list[Request]) -> None:
        self.scheduler: Scheduler = scheduler_of(
            self.configure, eos_token_ids=(EOS,), prefix_caching=self.rng.random() < 0.9
        )
        self.worker = NaiveWorker(
            self.configure,
            next_token,
            num_accepted=lambda granted: self.rng.randint(1, granted),
            fails=lambda: self.rng.random() < self.failure_rate,
            world_of=lambda row: self._world(self.scheduler.rows.request(row)),
        )
        self._results: deque[StepResult] = deque()
        self._counts = [0] * len(COUNTS)
        self._slots_before: deque[dict[int, Digest]] = deque(maxlen=2)
        """The worker's KV as it was before each of the last plans."""
        for request in held:
            self.scheduler.resume(request)

    def _world(self, request: Request) -> object:
        """What, beside its tokens, the KV of a request depends on that gets a row now."""
        alone = request.stream_id if request.skip_prefix_cache else -1
        return request.cache_salt, alone, self.weights

    # -- what may be done ----------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """A prompt that shares its first few tokens with others of the same start, and more or less of the rest."""
        rng, stream_id = self.rng, len(self.prompts)
        # Short ones run side by side and grow into each other; long ones are cut, and meet the limits.
        longest = self.configure.max_model_len - 1
        length, split, start = rng.randint(1, rng.choice((10, longest))), rng.randint(0, 44), rng.randint(0, 2)
        prompt = [(start * 11 + index + (length if index >= split else 0)) % NUM_TOKEN_IDS for index in range(length)]
        params = SamplingParams(
            rng.choice((rng.randint(1, 8), 40)),
            stop_token_ids=(rng.choice(((), (5,), (5, 9)))),
            ignore_eos=rng.random() < 0.1,
        )
        requests = [
            Request(
                str(stream_id),
                np.array(prompt, np.int32),
                length,
                params,
                seed=0,
                stream_id=stream_id + index,
                priority=rng.choice((0, 0, 0, -1, 2)),
                cache_salt=rng.choice(("", "", "", "a")),
                skip_prefix_cache=rng.random() < 0.1,
            )
            for index in range(rng.choice((1, 1, 1, 3)))
        ]
        try:
            self.scheduler.add(requests, self.clock)
        except (CapacityError, InvalidRequestError):
            blocks = self.scheduler.blocks
            assert length >= self.configure.max_model_len or length > blocks.capacity
            return
        for request in requests:
            self.live[request.stream_id] = request
            self.prompts[request.stream_id] = prompt
            self.texts[request.stream_id] = []

    def abort(self) -> None:
        if self.live:
            stream_id = self.rng.choice(sorted(self.live))
            self.scheduler.end(self.live.pop(stream_id))
            self.ends[stream_id] += 1

    def park(self) -> None:
        """Wherever it stands: a request that waits, computes its prompt, decodes, or is parked already."""
        if self.live:
            self.scheduler.park(self.live[self.rng.choice(sorted(self.live))])

    def unpark(self) -> None:
        if parked := [stream_id for stream_id in sorted(self.live) if self.live[stream_id].is_parked]:
            self.scheduler.unpark(self.live[self.rng.choice(parked)])

    def lose_the_group(self) -> None:
        """Its worker comes back with the KV of the steps that it executed, or another takes its place with none."""
        held, unanswered = self.scheduler.lose()
        assert self.scheduler.blocks.pool.num_free == self.scheduler.blocks.pool.num_usable
        assert {request.stream_id for request in held} == set(self.live)
        assert len(unanswered) == len(set(unanswered) & set(held))
        if self.rng.random() < 0.5:
            self._attach(held)
            return
        self.worker.lose_rows(self.scheduler.last_step)
        states = [*self._slots_before, self.worker.slots]
        self.worker.slots = self.rng.choice(states[len(states) - 1 - len(self._results) :])
        self._results.clear()
        for request in held:
            self.scheduler.resume(request)

    def reset_the_cache(self) -> None:
        self.scheduler.blocks.cache.reset()

    def renew_weights(self) -> None:
        """Whoever gets a row from now on computes with other weights."""
        self.weights += 1
        self.scheduler.renew_weights()

    def plan(self) -> None:
        """Have the next step planned, if it may be, and executed; its answer is on its way."""
        self.clock += self.rng.random()
        num_unanswered = len(self._results)
        plan = self.scheduler.schedule(self.clock)
        if plan is None:
            is_live = any(not request.is_parked for request in self.live.values())
            assert num_unanswered or not is_live, "never stuck: while anything lives, every step computes something"
            return
        assert num_unanswered < 2
        assert all(request.row is None for request in self.live.values() if request.is_parked)
        self._slots_before.append(self.worker.slots.copy())
        self._results.append(self.worker.execute(plan, all_answered=not num_unanswered))
        self._check_blocks()

    def answer(self) -> None:
        """Deliver the oldest answer that is on its way."""
        if self._results:
            self._take(self.scheduler.update(self._results.popleft()))
            self._check_blocks()

    def settle(self) -> None:
        """Left alone, everything that lives comes to its end and the cache is whole again."""
        for request in self.live.values():
            self.scheduler.unpark(request)
        for _ in range(4000):
            if not self.live and not self._results:
                break
            self.plan()
            self.answer()
        assert not self.live
        assert self.scheduler.blocks.pool.num_free == self.scheduler.blocks.pool.num_usable
        assert self.scheduler.blocks.tables.sum() == 0
        assert len(self.scheduler.waiting) == self.scheduler.waiting.num_tokens == 0
        assert self.ends == Counter(self.prompts.keys()), "every accepted request ends exactly once"

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _take(self, outputs: StepOutputs) -> None:
        for stream_id, token_id in zip(outputs.stream_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            assert stream_id in self.live, "nothing is given out for a request that has ended"
            text = self.prompts[stream_id] + self.texts[stream_id]
            assert token_id == next_token(text), "texts are those of an undisturbed run"
            self.texts[stream_id].append(token_id)
        for end in outputs.finished:
            stream_id = end.request.stream_id
            assert self._expected_end(end.request) == (end.outcome if isinstance(end.outcome, str) else "failed")
            self.ends[stream_id] += 1
            assert self.live.pop(stream_id) is end.request
            assert end.request.ended
        for request in self.live.values():
            if not request.ended:
                assert self._expected_end(request) == "failed", "a request ends as soon as it must"

    def _expected_end(self, request: Request) -> str:
        """The reason for which a request has ended, by its text; "failed" = its text is no reason to end."""
        text, params = self.texts[request.stream_id], request.params
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        if text and text[-1] in stops:
            return "stop"
        num_tokens = len(text) + request.num_prompt_tokens
        if len(text) == params.max_tokens or num_tokens == self.configure.max_model_len:
            return "length"
        return "cache_full" if num_tokens > self.scheduler.blocks.capacity else "failed"

    def _check_blocks(self) -> None:
        """Blocks are conserved, and held as often as tables name them; a row holds no more than it was granted."""
        if self.rng.random() < 0.7:
            # What is kept aside stays so, most of the time.
            return
        self.scheduler.catch_up()
        blocks, rows = self.scheduler.blocks, self.scheduler.rows
        holders: Counter[int] = Counter()
        for row, request in enumerate(rows.requests):
            num_blocks = int(blocks.num_blocks[row])
            assert not blocks.tables[row, num_blocks:].any()
            if request is None:
                assert num_blocks == 0
                continue
            # Drafts that were not accepted leave blocks behind, for the tokens that come.
            most = max(int(rows.num_granted[row]) + self.configure.num_draft_tokens, 0)
            assert int(rows.num_granted[row]) <= num_blocks * blocks.block_size
            assert (num_blocks - 1) * blocks.block_size < most + self.configure.num_draft_tokens + 1
            held = blocks.tables[row, :num_blocks]
            holders.update(held[held > 0].tolist())
            self._check_windows(row, held)
        assert all(blocks.pool.num_holders(block_id) == count for block_id, count in holders.items())
        free = blocks.pool.free_list()
        assert len(free) == blocks.pool.num_free == len(set(free))
        assert set(free).isdisjoint(holders)
        assert len(free) + len(holders) == blocks.pool.num_usable
        self._check_statistics(len(free))
        assert sum(request is not None for request in rows.requests) == rows.num_running
        assert len(self.scheduler._running.prefilling) <= 1, "no more than one row stands inside its prompt"

    def _check_statistics(self, num_free: int) -> None:
        """Case 43: usage is what is not free, and no count goes down."""
        statistics = self.scheduler.statistics()
        assert statistics.kv_cache_usage == 1 - num_free / self.scheduler.blocks.pool.num_usable
        counts = [getattr(statistics, name) for name in COUNTS]
        assert all(before <= now for before, now in zip(self._counts, counts, strict=True))
        self._counts = counts

    def _check_windows(self, row: int, held: np.ndarray) -> None:
        """A window group holds what its confirmed tokens still see and what is granted, and not much before."""
        for kind in self.scheduler.blocks.kinds:
            if kind.sees_all:
                assert (held[:, kind.groups] > 0).all()
                continue
            is_held = (held[:, kind.groups] > 0).all(axis=1)
            assert (is_held == (held[:, kind.groups] > 0).any(axis=1)).all(), "groups of a kind hold the same blocks"
            first = int(is_held.argmax()) if is_held.any() else len(is_held)
            assert is_held[first:].all(), "what a window holds is its end"


OPERATIONS = (
    *("submit",) * 6,
    *("plan",) * 12,
    *("answer",) * 12,
    "abort",
    "park",
    "unpark",
)
RARE_OPERATIONS = ("lose_the_group", "reset_the_cache", "renew_weights")


def random_operation(rng: random.Random) -> str:
    return rng.choice(RARE_OPERATIONS) if rng.random() < 0.01 else rng.choice(OPERATIONS)
