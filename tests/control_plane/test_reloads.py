"""Weights read anew under requests, driven by hand: who goes on where, what is still found, and what may attach."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_driver import Worker, assert_nothing_is_left, attached, hello, in_loop, model, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.errors import (
    ConfigurationError,
    DuplicateError,
    ModelError,
    ProtocolError,
    UnavailableError,
)
from blockplane.protos.kv_events import AllBlocksCleared
from blockplane.protos.plan import StepPlan

OLD, NEW, OTHER = b"old", b"new", b"other"
Reload = asyncio.Task[list[int]]


def reloading_worker(engine: Engine, boot_id: int, weights: bytes = OLD, **fields: Any) -> Worker:
    return Worker(engine, boot_id=boot_id, model_fingerprint=weights, reloads_weights=True, **fields)


def begun(engine: Engine, model: str = "") -> Reload:
    return asyncio.create_task(engine.reloads.reload(model))


async def told(worker: Worker) -> str:
    """What the worker is told to read."""
    return await until(worker.group.take_reload)


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(5):
        while (value := condition()) is None or value is False:
            await asyncio.sleep(0.01)
    return value


async def reads(engine: Engine, worker: Worker, weights: bytes = NEW, failure: str = "") -> str:
    """Let a worker have what it is told to read; returns that."""
    model = await told(worker)
    engine.reloads.answered(worker.group, weights, failure)
    return model


async def outcome(reload: Reload) -> list[int]:
    return await asyncio.wait_for(reload, 5)


def weights_of(engine: Engine) -> list[bytes]:
    return [group.hello.model_fingerprint for group in engine.groups()]


@in_loop
async def test_groups_read_one_after_another_and_serve_again(engine: Engine) -> None:
    one, two = reloading_worker(engine, 1), reloading_worker(engine, 2)
    reload = begun(engine, "/new")
    assert await told(one) == "/new"
    assert [group.condition for group in engine.groups()] == ["reloading", "ready"]
    engine.reloads.answered(one.group, NEW, "")
    assert await reads(engine, two) == "/new"
    assert await outcome(reload) == [0, 1]
    assert [group.condition for group in engine.groups()] == ["ready", "ready"]
    assert weights_of(engine) == [NEW, NEW]
    assert [group.hello.weight_epoch for group in engine.groups()] == [1, 1]


@in_loop
async def test_a_request_moves_to_the_weights_that_it_began_with_and_then_ends_where_it_is(engine: Engine) -> None:
    one, frontend = reloading_worker(engine, 1), await attached(engine)
    frontend.submit(1, "a", max_tokens=4)
    one.step(token_id=7)
    two = reloading_worker(engine, 2)
    reload = begun(engine)
    await reads(engine, one)
    moved = two.step(token_id=7)
    assert moved is not None
    assert moved.admissions[0].token_ids.tolist() == [1, 2, 3, 7]
    await until(lambda: two.group.condition == "reloading")
    assert one.plan() is None, "it has other weights"
    frontend.submit(2, "b", max_tokens=1)
    assert one.step() is not None, "what is new goes where it can"
    for _ in range(2):
        assert two.step() is not None
    await reads(engine, two)
    assert await outcome(reload) == [0, 1]
    assert tokens_of(await frontend.take())[1] == [7, 7, 7, 7]
    assert_nothing_is_left(engine)


@in_loop
async def test_what_waits_and_has_not_begun_moves_to_other_weights_at_once(engine: Engine) -> None:
    one, two = reloading_worker(engine, 1), reloading_worker(engine, 2)
    frontend, reload = await attached(engine), begun(engine)
    await told(one)
    for stream_id in range(2):
        frontend.submit(stream_id, f"{stream_id}", length=3 + stream_id)
        if not stream_id:
            two.step()
    engine.reloads.answered(one.group, NEW, "")
    await until(lambda: two.group.condition == "reloading")
    plan = one.plan()
    assert plan is not None
    assert [len(admission.token_ids) for admission in plan.admissions] == [4]
    assert two.step() is not None
    reload.cancel()


def test_what_does_not_end_in_time_goes_on_with_other_weights() -> None:
    async def scenario() -> None:
        engine = Engine(load_config({"drain_seconds": 0}, {}))
        worker, frontend = reloading_worker(engine, 1), await attached(engine)
        frontend.submit(1, "a", max_tokens=4)
        worker.step(token_id=7)
        plan = worker.plan()
        assert plan is not None
        reload = begun(engine)
        await until(lambda: not worker.group.may_finish)
        assert worker.plan() is None
        worker.answer(plan, token_id=8)
        await told(worker)
        assert engine.statistics().num_held == 1
        engine.reloads.answered(worker.group, NEW, "")
        again = worker.step(token_id=9)
        assert again is not None
        assert again.admissions[0].token_ids.tolist() == [1, 2, 3, 7, 8]
        assert again.admissions[0].num_computed_tokens == 0
        worker.step(token_id=9)
        delivery = await frontend.take()
        assert tokens_of(delivery) == {1: [7, 8, 9, 9]}
        assert outcomes_of(delivery) == {1: "length"}
        assert await outcome(reload) == [0]
        assert_nothing_is_left(engine)
        frontend.submit(2, "b", max_tokens=2)
        worker.step()
        draining = asyncio.create_task(engine.drains.drain(0))
        await asyncio.sleep(0)
        assert worker.step() is not None, "what has begun may end there again"
        await draining

    asyncio.run(scenario())


def test_whoever_is_held_by_a_reload_waits_for_it_and_not_for_a_worker_that_may_never_come() -> None:
    async def scenario() -> None:
        engine = Engine(load_config({"drain_seconds": 0, "max_queue_seconds": 0}, {}))
        worker, frontend = reloading_worker(engine, 1), await attached(engine)
        frontend.submit(1, "a", max_tokens=2)
        worker.step()
        reload = begun(engine)
        await told(worker)
        await asyncio.sleep(0.05)
        assert engine.statistics().num_held == 1
        engine.reloads.answered(worker.group, NEW, "")
        assert worker.step() is not None
        await outcome(reload)

    asyncio.run(scenario())


def test_whoever_a_reload_leaves_without_a_group_waits_no_longer_than_for_any() -> None:
    async def scenario() -> None:
        engine = Engine(load_config({"drain_seconds": 0, "max_queue_seconds": 0}, {}))
        worker, frontend = reloading_worker(engine, 1), await attached(engine)
        frontend.submit(1, "a")
        worker.step()
        draining, reload = asyncio.create_task(engine.drains.drain(0)), begun(engine)
        await reads(engine, worker)
        await outcome(reload)
        await draining
        assert worker.group.condition == "draining"
        assert isinstance(outcomes_of(await frontend.take())[1], UnavailableError)

    asyncio.run(scenario())


@in_loop
async def test_a_worker_that_leaves_is_left_alone(engine: Engine) -> None:
    one, two, three = (reloading_worker(engine, boot_id) for boot_id in (1, 2, 3))
    engine.worker_leaves(one.group)
    reload = begun(engine)
    await told(two)
    engine.worker_leaves(three.group)
    engine.reloads.answered(two.group, NEW, "")
    assert await outcome(reload) == [1]
    assert (one.group.take_reload(), three.group.take_reload()) == (None, None)


@in_loop
async def test_nothing_cached_of_the_old_weights_is_found_and_watchers_hear_of_it(engine: Engine) -> None:
    worker, frontend = reloading_worker(engine, 1), await attached(engine)

    async def num_cached(stream_id: int) -> int:
        frontend.submit(stream_id, f"{stream_id}", length=40, max_tokens=1)
        plan = worker.step()
        assert plan is not None
        return plan.admissions[0].num_computed_tokens

    assert [await num_cached(stream_id) for stream_id in range(2)] == [0, 32]
    watcher = engine.watch()
    assert len((await watcher.take()).events) == 2
    reload = begun(engine)
    await reads(engine, worker)
    await outcome(reload)
    assert (await asyncio.wait_for(watcher.take(), 1)).events == (AllBlocksCleared(),)
    assert [await num_cached(stream_id) for stream_id in range(2, 4)] == [0, 32]


@in_loop
async def test_a_worker_that_keeps_its_weights_serves_on_and_the_rest_is_not_touched(engine: Engine) -> None:
    one, two = reloading_worker(engine, 1), reloading_worker(engine, 2)
    reload = begun(engine, "/nowhere")
    await reads(engine, one, OLD, "No model at /nowhere.")
    with pytest.raises(ModelError, match="worker 0 has kept its weights: No model at /nowhere"):
        await outcome(reload)
    assert [group.condition for group in engine.groups()] == ["ready", "ready"]
    assert weights_of(engine) == [OLD, OLD]
    assert two.group.take_reload() is None
    again = begun(engine)
    await reads(engine, one)
    await reads(engine, two)
    assert await outcome(again) == [0, 1]


@in_loop
async def test_weights_that_differ_between_workers_are_told(engine: Engine) -> None:
    one, two = reloading_worker(engine, 1), reloading_worker(engine, 2)
    reload = begun(engine)
    await reads(engine, one)
    await reads(engine, two, OTHER)
    with pytest.raises(ModelError, match="workers 0 and 1 have read different weights"):
        await outcome(reload)


@in_loop
async def test_a_worker_that_cannot_is_named_before_anything_happens(engine: Engine) -> None:
    one = reloading_worker(engine, 1)
    two = Worker(engine, boot_id=2, model_fingerprint=OLD)
    two.group.ranks[0].peer = "ipv4:10.0.0.2:80"
    with pytest.raises(ConfigurationError, match=r"worker 1 at ipv4:10\.0\.0\.2:80 cannot read its weights anew"):
        await engine.reloads.reload("")
    assert one.group.condition == "ready"


@in_loop
async def test_there_is_one_reload_at_a_time_and_none_without_workers(engine: Engine) -> None:
    with pytest.raises(UnavailableError, match="no worker is attached"):
        await engine.reloads.reload("")
    worker = reloading_worker(engine, 1)
    reload = begun(engine)
    await told(worker)
    with pytest.raises(DuplicateError, match="under way"):
        await engine.reloads.reload("")
    reload.cancel()
    await asyncio.gather(reload, return_exceptions=True)
    again = begun(engine)
    await asyncio.sleep(0.1)
    assert worker.group.take_reload() is None, "the one before is not answered yet"
    engine.reloads.answered(worker.group, NEW, "")
    await reads(engine, worker, OTHER)
    assert await outcome(again) == [0]


@in_loop
async def test_a_reload_that_is_cancelled_while_a_group_empties_lets_it_serve_on(engine: Engine) -> None:
    worker, frontend = reloading_worker(engine, 1), await attached(engine)
    frontend.submit(1, "a")
    worker.step()
    reload = begun(engine)
    await until(lambda: worker.group.condition == "reloading")
    reload.cancel()
    await asyncio.gather(reload, return_exceptions=True)
    assert worker.group.condition == "ready"
    assert worker.group.take_reload() is None
    assert worker.step() is not None


@in_loop
async def test_a_drained_group_is_read_anew_too_and_stays_drained(engine: Engine) -> None:
    worker = reloading_worker(engine, 1)
    await engine.drains.drain(0)
    reload = begun(engine)
    await reads(engine, worker)
    assert await outcome(reload) == [0]
    assert worker.group.condition == "draining"


@in_loop
async def test_a_worker_that_is_lost_while_it_reads_keeps_no_cache(engine: Engine) -> None:
    worker, frontend = reloading_worker(engine, 1), await attached(engine)
    frontend.submit(1, "a", length=40, max_tokens=1)
    worker.step()
    epoch = worker.group.configure.epoch
    reload = begun(engine)
    await told(worker)
    worker.lose()
    with pytest.raises(UnavailableError, match="worker 0 was lost while it read weights"):
        await outcome(reload)
    back = reloading_worker(engine, 1, OLD, last_epoch=epoch)
    assert not back.group.configure.keeps_kv, "who knows what it read"


@pytest.mark.parametrize("changes", [{"weight_epoch": 1}, {"weights": NEW}])
def test_a_kept_cache_does_not_survive_other_weights(changes: dict[str, Any]) -> None:
    @in_loop
    async def scenario(engine: Engine) -> None:
        for others, keeps_kv in (({}, True), (changes, False)):
            worker = reloading_worker(engine, 1)
            worker.lose()
            back = reloading_worker(engine, 1, last_epoch=worker.group.configure.epoch, **others)
            assert back.group.configure.keeps_kv == keeps_kv
            back.lose()

    scenario()


@in_loop
async def test_a_cache_of_the_new_weights_is_kept_when_a_stream_breaks(engine: Engine) -> None:
    worker = reloading_worker(engine, 1)
    reload = begun(engine)
    await reads(engine, worker)
    await outcome(reload)
    worker.lose()
    back = reloading_worker(engine, 1, NEW, weight_epoch=1, last_epoch=worker.group.configure.epoch)
    assert back.group.configure.keeps_kv


def is_taken(engine: Engine, boot_id: int, weights: bytes) -> bool:
    try:
        group = engine.attach_worker(hello(model(), boot_id=boot_id, model_fingerprint=weights, reloads_weights=True))
    except ConfigurationError:
        return False
    engine.detach_worker(group)
    return True


@in_loop
async def test_old_and_new_weights_are_taken_until_a_reload_has_gone_well_and_no_others(engine: Engine) -> None:
    one, two = reloading_worker(engine, 1), reloading_worker(engine, 2)
    assert [is_taken(engine, 9, weights) for weights in (OLD, NEW)] == [True, False]
    reload = begun(engine)
    await reads(engine, one)
    assert [is_taken(engine, 9, weights) for weights in (OLD, NEW, OTHER)] == [True, True, False]
    await reads(engine, two, OLD, "the disk is gone.")
    with pytest.raises(ModelError):
        await outcome(reload)
    two.lose()
    assert [is_taken(engine, 9, weights) for weights in (OLD, NEW, OTHER)] == [True, True, False]
    again = begun(engine)
    await reads(engine, one)
    await outcome(again)
    reloading_worker(engine, 8, NEW)
    assert [is_taken(engine, 9, weights) for weights in (OLD, NEW, OTHER)] == [False, True, False]
    assert not is_taken(engine, 1, OTHER), "it has said what it has"


@in_loop
async def test_a_worker_whose_answer_was_lost_comes_back_with_weights_that_nobody_else_has(engine: Engine) -> None:
    one, two = reloading_worker(engine, 1), reloading_worker(engine, 2)
    reload = begun(engine)
    await told(one)
    one.lose()
    with pytest.raises(UnavailableError):
        await outcome(reload)
    back = reloading_worker(engine, 1, NEW, weight_epoch=1)
    again = begun(engine)
    for worker in (two, back):
        await reads(engine, worker)
    assert await outcome(again) == [0, 1]


@in_loop
async def test_a_worker_that_comes_with_old_weights_meanwhile_gets_the_new_ones(engine: Engine) -> None:
    one = reloading_worker(engine, 1)
    reload = begun(engine)
    await told(one)
    late = reloading_worker(engine, 2, ready=False)
    engine.reloads.answered(one.group, NEW, "")
    await asyncio.sleep(0.1)
    assert late.group.take_reload() is None, "it has built nothing yet"
    engine.worker_ready(late.group)
    await reads(engine, late)
    assert await outcome(reload) == [0, 1]


async def serves_alone(engine: Engine, worker: Worker) -> None:
    for group in engine.groups():
        engine.drains.undrain(group.number)
    for group in engine.groups():
        if group is not worker.group:
            await engine.drains.drain(group.number)


@in_loop
async def test_where_weights_differ_only_what_has_begun_looks_for_its_own(engine: Engine) -> None:
    one, two, three = (reloading_worker(engine, boot_id) for boot_id in (1, 2, 3))
    frontend, reload = await attached(engine), begun(engine)
    await reads(engine, one)
    await reads(engine, two, OLD, "it has none.")
    with pytest.raises(ModelError):
        await outcome(reload)
    await serves_alone(engine, three)
    frontend.submit(1, "has begun", length=4)
    three.step()
    frontend.submit(2, "has not", length=5)
    engine.drains.undrain(1)
    frontend.submit(3, "a load", length=30, max_tokens=1)
    engine.drains.undrain(0)
    three.lose()
    assert lengths(one.step()) == [5], "the least loaded"
    engine.drains.undrain(1)
    draining = asyncio.create_task(engine.drains.drain(1))
    await asyncio.sleep(0)
    assert lengths(one.step()) == [30], "what waits and has not begun moves"
    assert lengths(two.step()) == [5], "what waits and has begun ends where its weights are"
    draining.cancel()


def lengths(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [len(admission.token_ids) for admission in plan.admissions]


@in_loop
async def test_an_answer_that_nobody_asked_for_breaks_the_protocol(engine: Engine) -> None:
    worker = reloading_worker(engine, 1)
    with pytest.raises(ProtocolError, match="nobody asked"):
        engine.reloads.answered(worker.group, NEW, "")
