"""Drives a scheduler by hand: makes one, makes requests, answers plans. Knows no engine."""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams

EOS = 99
VOCAB_SIZE = 50_000

FULL = KVCacheGroup()

_stream_ids = count()


def window(num_tokens: int) -> KVCacheGroup:
    return KVCacheGroup(sliding_window=num_tokens)


def chunk(num_tokens: int) -> KVCacheGroup:
    return KVCacheGroup(attention_chunk_size=num_tokens)


def scheduler_of(configure: Configure, *, max_waiting: int = 10_000, **settings: Any) -> Scheduler:
    """A scheduler of a configuration, with a queue of its own."""
    max_tokens = settings.pop("max_waiting_tokens", 1 << 40)
    waiting = WaitingQueue(max_waiting, max_tokens, settings.pop("priority_seconds", 10.0))
    return Scheduler(configure, waiting, **{"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,), **settings})


def make_scheduler(
    *,
    usable_blocks: int = 100,
    block_size: int = 4,
    max_model_len: int = 64,
    tokens: tuple[int, ...] = (16,),
    seqs: tuple[int, ...] = (8,),
    groups: tuple[KVCacheGroup, ...] = (FULL,),
    configure: dict[str, Any] | None = None,
    **settings: Any,
) -> Scheduler:
    return scheduler_of(
        Configure(block_size, usable_blocks + 1, max_model_len, tokens, seqs, groups, **(configure or {})), **settings
    )


def make_request(
    name: str,
    num_prompt_tokens: int,
    max_tokens: int = 8,
    first: int = 1,
    *,
    params: dict[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """A prompt that counts up from `first`: another first, another prefix. Each has a stream of its own."""
    token_ids = np.arange(first, first + num_prompt_tokens, dtype=np.int32)
    sampling = SamplingParams(max_tokens, **(params or {}))
    return Request(name, token_ids, num_prompt_tokens, sampling, seed=0, **{"stream_id": next(_stream_ids), **fields})


def two_that_do_not_fit(**new: Any) -> tuple[Scheduler, Request, Request]:
    """Two requests in four blocks: `old` grows from two to four, `new`, from one, gives way."""
    scheduler = make_scheduler(usable_blocks=4, block_size=4, tokens=(32,))
    requests = make_request("old", 8, max_tokens=8), make_request("new", 3, max_tokens=8, first=50, **new)
    scheduler.add(requests)
    return scheduler, *requests


def answer(
    scheduler: Scheduler, plan: StepPlan, token_id: int = 7, num_tokens: Sequence[int] | None = None
) -> StepResult:
    """Every sampled row gets `token_id`; each decode row as often as `num_tokens` says, once if it is not given."""
    (of_plan,) = (step for step in scheduler._in_flight if step.step == plan.step)
    num_rows = len(of_plan.sampled.requests)
    if num_tokens is None:
        return StepResult(plan.step, np.full(num_rows, token_id, np.int32))
    total = sum(num_tokens) + num_rows - len(of_plan.decodes.requests)
    return StepResult(plan.step, np.full(total, token_id, np.int32), np.array(num_tokens, np.int32))


def plan_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def run_step(scheduler: Scheduler, token_id: int = 7) -> tuple[StepPlan, StepOutputs]:
    """One step whose every sampled row gets `token_id`."""
    plan = plan_step(scheduler)
    return plan, scheduler.update(answer(scheduler, plan, token_id))


def finish(scheduler: Scheduler, *requests: Request, ahead: int = 1) -> list[StepPlan]:
    """Run until these have ended and all plans are answered; at most `ahead` are unanswered at a time."""
    plans: list[StepPlan] = []
    unanswered: deque[StepPlan] = deque()
    while unanswered or not all(request.ended for request in requests):
        ended = all(request.ended for request in requests)
        while not ended and len(unanswered) < ahead and (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
            plans.append(plan)
        assert unanswered, "stuck: something lives, and there is neither a plan nor an answer to wait for"
        scheduler.update(answer(scheduler, unanswered.popleft()))
    return plans


def run(scheduler: Scheduler, request: Request) -> list[StepPlan]:
    """Add a request and run it to its end."""
    scheduler.add([request])
    return finish(scheduler, request)


def is_whole(scheduler: Scheduler) -> bool:
    """Whether nobody holds a block, a row, or a place in the queue."""
    pool = scheduler.blocks.pool
    return (
        sorted(pool.free_list()) == list(range(1, pool.num_usable + 1))
        and not scheduler.blocks.tables.any()
        and not scheduler.rows.num_running
        and not len(scheduler.waiting)
    )


def tokens(outputs: StepOutputs, request: Request) -> list[int]:
    """What a step gave to a request."""
    is_own = (outputs.stream_ids == request.stream_id) & (outputs.owners == request.owner)
    own: list[int] = outputs.token_ids[is_own].tolist()
    return own


def outcomes(outputs: StepOutputs) -> dict[str, object]:
    return {end.request.request_id: end.outcome for end in outputs.finished}


class Watcher:
    """A cache's watcher that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def stored(self, key: bytes, parent: bytes | None, token_bytes: bytes) -> None:
        self.heard.append(("stored", key, parent, np.frombuffer(token_bytes, np.int32).tolist()))

    def removed(self, key: bytes) -> None:
        self.heard.append(("removed", key))

    def cleared(self) -> None:
        self.heard.append(("cleared",))
