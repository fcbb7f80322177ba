"""A frontend and a worker at an engine without gRPC, each step by hand; knows no test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Delivery, FrontendBatch, Submission
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams

LAYERS = [LayerKVSpec("layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32")]
BYTES_PER_BLOCK = 2 * 16 * 8 * 4
RULES = BucketRules()
PARAMS = {"max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos"}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """Answers an engine's plans: every row that works samples one token. Prompts here are one segment each."""

    def __init__(self, engine: Engine, info: ModelInfo | None = None, num_blocks: int = 50) -> None:
        info = info or model()
        self.engine = engine
        self.num_decodes = 0
        engine.configure_worker(info, LAYERS, num_blocks * BYTES_PER_BLOCK, RULES)
        engine.worker_ready(info)

    def plan(self) -> StepPlan | None:
        plan = self.engine.next_plan()
        if plan is not None and plan.decode_rows is not None:
            self.num_decodes = len(plan.decode_rows)
        return plan

    def answer(self, plan: StepPlan, token_id: int = 7) -> None:
        num_sampled = self.num_decodes + len(plan.prefill_rows)
        self.engine.take_result(StepResult(plan.step, np.full(num_sampled, token_id, np.int32)))
        self.engine.flush()

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
