"""Groups that an operator wants empty, driven by hand: nothing new, what lives moves or ends, and they serve again."""

import asyncio

import pytest
from engine_driver import Frontend, Worker, assert_nothing_is_left, attached, in_loop, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.errors import AbortedError, NotFoundError, UnavailableError


def admitted(worker: Worker) -> list[list[int]]:
    """Plan a step and answer it; returns the tokens of the requests that it admits."""
    plan = worker.step()
    return [] if plan is None else [admission.token_ids.tolist() for admission in plan.admissions]


async def begun(engine: Engine, number: int) -> asyncio.Task[None]:
    draining = asyncio.create_task(engine.drains.drain(number))
    await asyncio.sleep(0)
    return draining


async def ended(call: asyncio.Task[None]) -> None:
    await asyncio.wait_for(call, 5)


async def is_serving(frontend: Frontend) -> bool:
    serving = (await frontend.take()).serving
    assert serving is not None, "what is served has changed"
    return serving.model is not None


@in_loop
async def test_what_waits_moves_at_once_and_what_runs_once_its_step_is_answered(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=4)
    one.step(token_id=7)
    plan = one.plan()
    assert plan is not None
    frontend.submit(2, "b", length=4, max_tokens=1)
    two = Worker(engine)
    draining = await begun(engine, 0)
    assert admitted(two) == [[1, 2, 3, 4]]
    assert one.plan() is None
    assert not draining.done()
    one.answer(plan, token_id=8)
    assert admitted(two) == [[1, 2, 3, 7, 8]]
    await ended(draining)
    frontend.submit(3, "c")
    assert one.plan() is None, "it gets nothing new"
    assert not engine.may_go(one.group), "it stays attached"
    assert [group.condition for group in engine.groups()] == ["draining", "ready"]


@in_loop
async def test_a_group_serves_again_once_it_is_told_to(engine: Engine) -> None:
    one, two, frontend = Worker(engine), Worker(engine), await attached(engine)
    await ended(await begun(engine, 0))
    engine.drains.undrain(0)
    assert one.group.condition == "ready"
    frontend.submit(1, "a", max_tokens=1)
    frontend.submit(2, "b", max_tokens=1)
    assert (len(admitted(one)), len(admitted(two))) == (1, 1)
    assert_nothing_is_left(engine)


@in_loop
async def test_the_last_group_accepts_nothing_finishes_what_it_has_and_serves_again(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=2)
    worker.step()
    draining = await begun(engine, 0)
    assert not await is_serving(frontend)
    frontend.submit(2, "b")
    assert isinstance(outcomes_of(await frontend.take())[2], UnavailableError)
    worker.step()
    assert outcomes_of(await frontend.take()) == {1: "length"}
    await ended(draining)
    engine.drains.undrain(0)
    assert await is_serving(frontend)


@in_loop
async def test_a_call_that_ends_before_leaves_the_group_draining(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=2)
    worker.step()
    draining = await begun(engine, 0)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    worker.step()
    assert worker.group.condition == "draining"
    await ended(await begun(engine, 0))


@in_loop
async def test_a_drained_worker_that_attaches_anew_is_drained_still_and_one_that_restarts_is_not(
    engine: Engine,
) -> None:
    worker, other = Worker(engine, boot_id=5), Worker(engine, boot_id=6)
    await ended(await begun(engine, worker.group.number))
    worker.lose()
    back = Worker(engine, boot_id=5, ready=False)
    assert back.group.condition == "building"
    frontend = await attached(engine)
    frontend.submit(1, "a", max_tokens=1)
    engine.worker_ready(back.group)
    assert (back.group.condition, back.plan()) == ("draining", None)
    assert len(admitted(other)) == 1
    engine.drains.undrain(back.group.number)
    assert back.group.condition == "ready"
    back.lose()
    for boot_id in (5, 7):
        assert Worker(engine, boot_id=boot_id).group.condition == "ready"


@in_loop
async def test_a_worker_that_names_no_boot_is_drained_as_long_as_it_is_attached(engine: Engine) -> None:
    worker = Worker(engine, boot_id=0)
    await ended(await begun(engine, 0))
    assert Worker(engine, boot_id=0).group.condition == "ready"
    assert worker.group.condition == "draining"


@in_loop
async def test_requests_of_a_lost_worker_go_on_at_a_drained_one_once_it_serves_again(engine: Engine) -> None:
    one, two, frontend = Worker(engine), Worker(engine), await attached(engine)
    await ended(await begun(engine, 0))
    frontend.submit(1, "a", max_tokens=1)
    two.lose()
    assert one.plan() is None
    engine.drains.undrain(0)
    assert admitted(one) == [[1, 2, 3]]


@in_loop
async def test_a_group_that_is_lost_while_it_is_drained_has_nothing_left(engine: Engine) -> None:
    worker, frontend = Worker(engine, boot_id=5), await attached(engine)
    frontend.submit(1, "a")
    worker.step()
    draining = await begun(engine, 0)
    worker.lose()
    await ended(draining)


@in_loop
async def test_who_waits_for_a_group_to_be_empty_hears_that_it_serves_again(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a")
    worker.step()
    draining = await begun(engine, 0)
    engine.drains.undrain(0)
    with pytest.raises(AbortedError, match="worker 0 was told to serve again"):
        await ended(draining)
    assert worker.plan() is not None


@in_loop
async def test_unknown_groups_are_named_and_to_undrain_what_is_not_drained_is_fine(engine: Engine) -> None:
    Worker(engine)
    engine.drains.undrain(0)
    with pytest.raises(NotFoundError, match="no worker 3 is attached; those that are: 0"):
        await engine.drains.drain(3)
    with pytest.raises(NotFoundError, match="no worker 3"):
        engine.drains.undrain(3)


@in_loop
async def test_a_drained_group_that_leaves_is_let_go_and_forgotten(engine: Engine) -> None:
    worker = Worker(engine, boot_id=5)
    await ended(await begun(engine, 0))
    engine.worker_leaves(worker.group)
    assert worker.group.condition == "leaving"
    assert engine.may_go(worker.group)
    worker.lose()
    assert Worker(engine, boot_id=5).group.condition == "ready"


@in_loop
async def test_a_parked_request_moves_too_and_stays_parked(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=2)
    one.step(token_id=7)
    frontend.send(parked_stream_ids=(1,))
    two = Worker(engine)
    await ended(await begun(engine, 0))
    assert two.plan() is None
    frontend.send(unparked_stream_ids=(1,))
    assert admitted(two) == [[1, 2, 3, 7]]
    assert tokens_of(await frontend.take()) == {1: [7, 7]}
