"""A frontend and a worker at an engine without gRPC, each step by hand; knows no test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Delivery, FrontendBatch, Submission
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.wire import PROTOCOL_VERSION

LAYERS = (LayerKVSpec("layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32"),)
BYTES_PER_BLOCK = 2 * 16 * 8 * 4
PARAMS = {"max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "structured"}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """Answers an engine's plans: every row that works samples one token. Prompts here are one segment each."""

    def __init__(
        self, engine: Engine, info: ModelInfo | None = None, num_blocks: int = 50, *, ready: bool = True, **fields: Any
    ) -> None:
        """`fields` are the hello's."""
        self.engine = engine
        self.num_decodes = 0
        self._num_sampled: dict[int, int] = {}
        self.group = engine.attach_worker(hello(info or model(), num_blocks, **fields))
        if ready:
            engine.worker_ready(self.group)

    def lose(self) -> None:
        self.engine.detach_worker(self.group)

    def plan(self) -> StepPlan | None:
        plan = self.engine.next_plan(self.group)
        if plan is not None:
            if plan.decode_rows is not None:
                self.num_decodes = len(plan.decode_rows)
            self._num_sampled[plan.step] = self.num_decodes + len(plan.prefill_rows)
        return plan

    def answer(self, plan: StepPlan, token_id: int = 7) -> None:
        self.engine.take_result(self.group, self.result(plan, token_id))
        self.engine.flush()

    def result(self, plan: StepPlan, token_id: int = 7) -> StepResult:
        token_ids = np.full(self._num_sampled[plan.step], token_id, np.int32)
        return StepResult(plan.step, token_ids, epoch=self.group.configure.epoch)

    def step(self, token_id: int = 7) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.answer(plan, token_id)
        return plan


class Frontend:
    """One frontend's side of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.owner = engine.attach_frontend()

    def submit(self, stream_id: int, request_id: str, length: int = 3, **settings: Any) -> None:
        """A prompt of that length; `settings` are the submission's or its sampling parameters'."""
        prompt = np.arange(1, length + 1, dtype=np.int32)
        params = {"max_tokens": 5} | {name: settings.pop(name) for name in PARAMS & settings.keys()}
        self.send(submissions=(Submission(stream_id, request_id, prompt, SamplingParams(**params), **settings),))

    def send(self, **fields: Any) -> None:
        self.engine.take_batch(self.owner, FrontendBatch(**fields))

    async def take(self) -> Delivery:
        return await asyncio.wait_for(self.outbox.take(), 1)

    @property
    def outbox(self) -> Outbox:
        return self.engine.outbox(self.owner)


def model(name: str = "m", max_model_len: int = 64) -> ModelInfo:
    return ModelInfo(name, 100, max_model_len, (99,), None, b"", GenerationDefaults())


def hello(info: ModelInfo, num_blocks: int = 50, **fields: Any) -> Hello:
    """A worker with room for so many blocks."""
    return Hello(PROTOCOL_VERSION, info, LAYERS, num_blocks * BYTES_PER_BLOCK, BucketRules(), **fields)


def assert_nothing_is_left(engine: Engine) -> None:
    """No request lives, and every group that is attached has all its blocks."""
    pools = [group.scheduler.blocks.pool for group in engine._groups]
    assert [pool.num_free for pool in pools] == [pool.num_usable for pool in pools]
    assert (engine._requests, engine._streams, engine.statistics().num_held) == ({}, {}, 0)


async def attached(engine: Engine) -> Frontend:
    """A frontend that has heard what is served."""
    frontend = Frontend(engine)
    await frontend.take()
    return frontend


def tokens_of(delivery: Delivery) -> dict[int, list[int]]:
    ends = np.cumsum(np.ones_like(delivery.stream_ids) if delivery.num_tokens is None else delivery.num_tokens)
    parts = np.split(delivery.token_ids, ends[:-1]) if len(ends) else []
    return {int(stream): part.tolist() for stream, part in zip(delivery.stream_ids, parts, strict=True)}


def outcomes_of(delivery: Delivery) -> dict[int, object]:
    return {ending.stream_id: ending.outcome for ending in delivery.endings}


def in_loop(test: Callable[[Engine], Awaitable[None]]) -> Callable[[], None]:
    """An engine lives in an event loop, whose events it sets; each test gets both anew."""

    def run() -> None:
        async def main() -> None:
            await test(Engine(load_config({}, {})))

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
