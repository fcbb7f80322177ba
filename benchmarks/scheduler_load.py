"""Puts our scheduler under a load, with the wire and the outbox around it, and times its steps and admissions.

Knows neither what is compared nor with what. All times are CPU microseconds of one thread, the garbage collector at
work as in the engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from blockplane.control_plane.engine.group_counts import STEP_SECONDS
from blockplane.control_plane.engine.kv_events import KVEventFeed
from blockplane.control_plane.engine.kv_groups import lay_out
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.step_log import StepLog
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos import delivery_wire, wire
from blockplane.protos.delivery import Ending
from blockplane.protos.histogram import Histogram
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.model import LayerKVSpec
from blockplane.protos.plan import Configure, Int32Array
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.step_times import StepTimes
from blockplane.v1 import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class Load:
    """What a scheduler is put under before it is measured; vLLM's gets the same, as JSON.

    Attributes:
        windows: by layer.
        prompt_lengths: tokens of the requests that decode.
        num_blocks: the null block included.
        num_fillers: prompts of `filler_length` that come and go, so that every free block holds cached content.
    """

    windows: tuple[int | None, ...]
    prompt_lengths: tuple[int, ...]
    num_blocks: int
    num_fillers: int
    num_warm_up_steps: int
    filler_length: int = 8192
    max_model_len: int = 16_384
    max_num_batched_tokens: int = 16_384
    block_size: int = 16
    vocab_size: int = 50_000

    @property
    def max_num_seqs(self) -> int:
        """One more than those that decode, for the prompts that come and go."""
        return len(self.prompt_lengths) + 1


class ControlPlane:
    """Our scheduler under a load, with the wire and the outbox around it; times it as `Peer` times vLLM's."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.random = np.random.default_rng(0)
        configure = Configure(
            load.block_size,
            load.num_blocks,
            load.max_model_len,
            (load.max_num_batched_tokens,),
            (load.max_num_seqs,),
            kv_groups(load.windows),
        )
        self.feed = KVEventFeed(load.block_size, ())
        waiting = WaitingQueue(1 << 20, 1 << 40, priority_seconds=10.0)
        self.scheduler = Scheduler(
            configure, waiting, vocab_size=load.vocab_size, eos_token_ids=(load.vocab_size - 1,), watcher=self.feed
        )
        self.steps = StepLog(configure, time.monotonic, Histogram(STEP_SECONDS))
        self.outbox = Outbox()
        self.num_requests = 0
        for _ in range(load.num_fillers):
            self.admission(self.prompt(load.filler_length))
        self.scheduler.add([self.request(self.prompt(length), load.max_model_len) for length in load.prompt_lengths])
        while len(self.scheduler.waiting):
            self.plan()
            self.answer(self.result())
            self.deliver()
        if load.num_warm_up_steps:
            self.decode(load.num_warm_up_steps)

    def prompt(self, num_tokens: int) -> Int32Array:
        return self.random.integers(self.load.vocab_size - 1, size=num_tokens, dtype=np.int32)

    def request(self, token_ids: Int32Array, max_tokens: int) -> Request:
        self.num_requests += 1
        params = SamplingParams(max_tokens)
        return Request(
            f"request-{self.num_requests}", token_ids, len(token_ids), params, seed=0, stream_id=self.num_requests
        )

    def plan(self) -> bytes:
        began = time.monotonic()
        plan = self.scheduler.schedule()
        assert plan is not None
        self.feed.planned(plan.step)
        self.steps.scheduled(plan, began, has_idled=False)
        message = wire.plan_to_proto(plan)
        self.steps.sent(message.ByteSize())
        return message.SerializeToString()

    def result(self) -> bytes:
        """A random token for each row that the oldest unanswered plan samples."""
        oldest = self.scheduler._in_flight[0]
        token_ids = self.prompt(len(oldest.sampled.requests))
        times = StepTimes(1 << 50, 10, 300, 20_000, 21_000, 21_100).to_bytes()
        return pb.StepResult(step=oldest.step, token_ids=token_ids.tobytes(), times=times).SerializeToString()

    def answer(self, result_bytes: bytes) -> None:
        result, answered = wire.result_from_proto(pb.StepResult.FromString(result_bytes)), time.monotonic()
        outputs = self.scheduler.update(result)
        self.feed.answered(result.step)
        self.outbox.put_tokens(outputs.stream_ids, outputs.token_ids, one_each=outputs.one_each)
        for end in outputs.finished:
            self.outbox.put_ending(Ending(end.request.stream_id, end.outcome))
        self.steps.settled(result, answered)

    def deliver(self) -> bytes:
        self.steps.delivered()
        return delivery_wire.delivery_to_proto(self.outbox.empty()).SerializeToString()

    def step(self, result_bytes: bytes) -> None:
        """What the engine does for a result; the plan goes before the delivery."""
        self.answer(result_bytes)
        self.plan()
        self.deliver()

    def decode(self, num_steps: int) -> list[float]:
        # Two plans are in flight, as in a server.
        while len(self.scheduler._in_flight) < 2:
            self.plan()
        return [microseconds(partial(self.step, self.result())) for _ in range(num_steps)]

    def admit(self, num_tokens: int) -> dict[str, float]:
        """A prompt that is new, the same once it is cached, and of the latter its hashing and its lookup alone."""
        prompt = self.prompt(num_tokens)
        cold, cached = self.admission(prompt), self.admission(prompt)
        request, blocks = self.request(prompt, 1), self.scheduler.blocks
        hashing = microseconds(lambda: blocks.enter(request))
        lookup = microseconds(lambda: blocks.find_prefix(request))
        assert blocks.find_prefix(request).num_blocks == (num_tokens - 1) // self.load.block_size
        return {"cold": cold, "cached": cached, "hashing": hashing, "lookup": lookup}

    def admission(self, prompt: Int32Array) -> float:
        """From a prompt to the bytes of the plan that admits it; then it is answered, and ends."""

        def admit() -> None:
            self.scheduler.add([self.request(prompt, max_tokens=1)])
            self.plan()

        spent = microseconds(admit)
        self.answer(self.result())
        self.deliver()
        assert not self.scheduler.rows.num_running, "the prompt was not computed in one step"
        return spent


def kv_groups(windows: tuple[int | None, ...]) -> tuple[KVCacheGroup, ...]:
    """The groups that the engine makes of layers of these sliding windows; None = full attention."""
    layers = [LayerKVSpec(f"layers.{index}", 1, 256, "bfloat16", window) for index, window in enumerate(windows)]
    return lay_out(layers).groups


def microseconds(function: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - started) / 1000
