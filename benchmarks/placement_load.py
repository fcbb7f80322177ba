"""Prompts that begin alike, offered to an engine of several groups in virtual time. Knows no policy and no bounds.

Engine, placement and schedulers are the real ones; workers answer without computing, and a step of theirs takes
`STEP_SECONDS` and `SECONDS_PER_TOKEN` for each token that it computes. The clock is a number: nothing sleeps.
"""

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count

import numpy as np
from wire_peers import Script

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.hello import Hello
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import Config, load_config
from blockplane.protos.delivery import Delivery, FrontendBatch, Submission
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.wire import PROTOCOL_VERSION

STEP_SECONDS, SECONDS_PER_TOKEN = 0.02, 2e-5
BLOCK_SIZE, VOCAB_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 16, 50_000, 2048, 64, 2048
LAYER = LayerKVSpec("layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32")
BYTES_PER_BLOCK = 2 * BLOCK_SIZE * 8 * 4


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come at random.

    Attributes:
        rate: of them a second.
        zipf: how the prefixes are spread: the n-th most frequent in proportion to n ** -zipf; 0 = all alike.
    """

    num_requests: int = 2000
    rate: float = 240.0
    zipf: float = 0.0
    num_prefixes: int = 16
    prefix_length: int = 1024
    own_length: int = 64
    num_outputs: int = 32

    def requests(self) -> Iterator[tuple[float, Submission]]:
        """When each comes, and what it asks; always the same."""
        random = np.random.default_rng(0)
        prefixes = random.integers(VOCAB_SIZE - 1, size=(self.num_prefixes, self.prefix_length), dtype=np.int32)
        shares = np.arange(1, self.num_prefixes + 1) ** -self.zipf
        chosen = random.choice(self.num_prefixes, self.num_requests, p=shares / shares.sum())
        times = accumulate(random.exponential(1 / self.rate, self.num_requests).tolist())
        params = SamplingParams(self.num_outputs, ignore_eos=True, seed=0)
        for number, (came, index) in enumerate(zip(times, chosen.tolist(), strict=True)):
            own = random.integers(VOCAB_SIZE - 1, size=self.own_length, dtype=np.int32)
            yield came, Submission(number, str(number), np.concatenate((prefixes[index], own)), params)


@dataclass
class Outcome:
    """What became of a workload, in seconds of its clock.

    Attributes:
        steps: of each group, when each step ended and how many tokens it computed.
        num_cached, num_prompt: of the prompts' tokens, those that were cached, and all.
    """

    steps: list[list[tuple[float, int]]]
    first_tokens: list[float] = field(default_factory=list)
    num_tokens: int = 0
    last_came: float = 0.0
    seconds: float = 0.0
    num_cached: int = 0
    num_prompt: int = 0

    @property
    def cached_rate(self) -> float:
        return self.num_cached / self.num_prompt

    @property
    def imbalance(self) -> float:
        """What the busiest group computed, over the mean."""
        computed = [sum(num_tokens for _, num_tokens in steps) for steps in self.steps]
        return max(computed) / float(np.mean(computed))

    def window_imbalances(self, seconds: float) -> list[float]:
        """The same of each whole part of so many seconds in which requests came; the first, which finds nothing cached,
        left out.
        """
        edges = np.arange(seconds, self.last_came + 1e-9, seconds)
        windows = []
        for steps in self.steps:
            ended, computed = np.array(steps or [(0.0, 0)]).T
            windows.append(np.histogram(ended, edges, weights=computed)[0])
        return (np.max(windows, axis=0) / np.mean(windows, axis=0)).tolist()


class SteppingGroup:
    """A worker group whose steps are answered when their time has passed, one after the other."""

    def __init__(self, engine: Engine, num_blocks: int) -> None:
        info = ModelInfo("m", VOCAB_SIZE, MAX_MODEL_LEN, (VOCAB_SIZE - 1,), None, b"", GenerationDefaults())
        hello = Hello(PROTOCOL_VERSION, info, (LAYER,), num_blocks * BYTES_PER_BLOCK, BucketRules())
        self._engine, self.group = engine, engine.attach_worker(hello)
        self._script = Script(self.group.configure)
        self._free_at = 0.0
        self.steps: list[tuple[float, int]] = []
        engine.worker_ready(self.group)

    def results(self, now: float) -> Iterator[tuple[float, StepResult]]:
        """The answers to all that is to be computed now, and when each is ready."""
        while (plan := self._engine.next_plan(self.group)) is not None:
            result = self._script.answer(plan)
            num_tokens = self._script.num_decodes + int(plan.prefill_num_tokens.sum())
            self._free_at = max(now, self._free_at) + STEP_SECONDS + SECONDS_PER_TOKEN * num_tokens
            self.steps.append((self._free_at, num_tokens))
            yield self._free_at, result


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def serve(workload: Workload, num_groups: int, num_blocks: int, max_num_seqs: int = MAX_NUM_SEQS) -> Outcome:
    """Offer a workload to as many groups, each with so many blocks and rows."""
    return asyncio.run(_serve(workload, num_groups, num_blocks, max_num_seqs))


async def _serve(workload: Workload, num_groups: int, num_blocks: int, max_num_seqs: int) -> Outcome:
    clock, numbers = Clock(), count()
    engine = Engine(_config(max_num_seqs), clock)
    groups = [SteppingGroup(engine, num_blocks) for _ in range(num_groups)]
    owner = engine.attach_frontend()
    outbox, outcome = engine.outbox(owner), Outcome([group.steps for group in groups])
    outbox.empty()
    came_at: dict[int, float] = {}
    requests = workload.requests()
    events: list[tuple[float, int, SteppingGroup | None, Submission | StepResult]] = []

    def await_request() -> None:
        if (following := next(requests, None)) is not None:
            heapq.heappush(events, (following[0], next(numbers), None, following[1]))

    await_request()
    while events:
        clock.now, _, group, what = heapq.heappop(events)
        if group is None:
            assert isinstance(what, Submission)
            came_at[what.stream_id] = outcome.last_came = clock.now
            engine.take_batch(owner, FrontendBatch((what,)))
            await_request()
        else:
            assert isinstance(what, StepResult)
            engine.take_result(group.group, what)
            engine.flush()
        for each in groups if group is None else (group,):
            for ready_at, result in each.results(clock.now):
                heapq.heappush(events, (ready_at, next(numbers), each, result))
        _take(outbox.empty(), came_at, clock.now, outcome)
    total = engine.statistics().total
    outcome.seconds = clock.now
    outcome.num_cached, outcome.num_prompt = total.num_cached_tokens, total.num_prompt_tokens
    assert total.num_admitted == workload.num_requests, "some request was refused"
    return outcome


def _take(delivery: Delivery, came_at: dict[int, float], now: float, outcome: Outcome) -> None:
    outcome.num_tokens += len(delivery.token_ids)
    for stream_id in delivery.stream_ids.tolist():
        if (came := came_at.pop(stream_id, None)) is not None:
            outcome.first_tokens.append(now - came)


def _config(max_num_seqs: int) -> Config:
    settings = {
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "num_seqs_buckets": str(max_num_seqs),
        "num_batched_tokens_buckets": str(MAX_NUM_BATCHED_TOKENS),
        "max_waiting_requests": 1 << 20,
        "max_waiting_tokens": 1 << 40,
    }
    return load_config(settings, {})
