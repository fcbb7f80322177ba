"""Who watches the prefix cache of an engine driven by hand: what they hear of plans, answers, resets and workers."""

import asyncio

import numpy as np
import pytest
from engine_driver import Frontend, Worker, attached, in_loop

from blockplane.client.kv_index import KVIndex
from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import UnavailableError
from blockplane.protos.kv_events import AllBlocksCleared, KVEventBatch
from blockplane.protos.sampling import SamplingParams


@in_loop
async def test_a_watcher_hears_of_a_prefix_once_it_is_computed_and_of_the_worker_s_loss(engine: Engine) -> None:
    early, index, prompt = engine.watch(), KVIndex(), np.arange(1, 41)
    worker = Worker(engine)
    assert index.apply(await early.take())
    Frontend(engine).submit(1, "a", length=40)
    plan = worker.plan()
    assert plan is not None
    late = engine.watch()
    assert (await late.take()).events == (AllBlocksCleared(),)
    worker.answer(plan)
    assert index.apply(await early.take())
    assert index.longest_prefix(prompt) == 32
    newcomer = KVIndex()
    assert newcomer.apply(await engine.watch().take())
    assert newcomer.longest_prefix(prompt) == 32
    worker.lose()
    assert index.apply(await early.take())
    assert index.longest_prefix(prompt) == 0
    Worker(engine)
    batch = await early.take()
    assert (batch.sequence, batch.events) == (1, (AllBlocksCleared(),))
    assert index.apply(batch)


@in_loop
async def test_of_two_plans_in_flight_each_is_told_with_its_own_answer(engine: Engine) -> None:
    worker, watcher = Worker(engine), engine.watch()
    frontend, index = await attached(engine), KVIndex()
    prompts = np.arange(1, 41, dtype=np.int32), np.arange(40, 0, -1, dtype=np.int32)
    plans = []
    for stream_id, prompt in enumerate(prompts):
        frontend.send(submissions=(Submission(stream_id, str(stream_id), prompt, SamplingParams(1)),))
        plans.append(worker.plan())
    known = []
    for plan in plans:
        assert plan is not None
        worker.answer(plan)
        assert index.apply(await watcher.take())
        while watcher._batches:
            assert index.apply(await watcher.take())
        known.append([index.longest_prefix(prompt) for prompt in prompts])
    assert known == [[32, 0], [32, 32]]


@in_loop
async def test_after_a_reset_nothing_is_found_and_the_watchers_know(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    watcher = engine.watch()
    for _ in range(2):
        frontend.submit(1, "a", length=40, max_tokens=1)
        worker.step()
        assert (await frontend.take()).endings[0].num_cached_tokens == 0
        engine.reset_prefix_cache()
    events = [(await asyncio.wait_for(watcher.take(), 1)).events for _ in range(5)]
    assert [isinstance(event[0], AllBlocksCleared) for event in events] == [True, False, True, False, True]


@in_loop
async def test_without_a_worker_there_is_no_cache_to_reset(engine: Engine) -> None:
    with pytest.raises(UnavailableError, match="no worker"):
        engine.reset_prefix_cache()


@in_loop
async def test_who_watches_no_more_is_told_no_more(engine: Engine) -> None:
    watcher = engine.watch()
    engine.unwatch(watcher)
    Worker(engine)
    told: list[KVEventBatch] = []
    with pytest.raises(TimeoutError):
        told.append(await asyncio.wait_for(watcher.take(), 0.05))
    assert told == []
