"""Workers that leave and an engine that stops, driven by hand: nothing new, and what lives moves or ends."""

import asyncio

from engine_driver import Worker, attached, in_loop, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.errors import (
    UnavailableError,
)


def admitted(worker: Worker) -> list[int]:
    """Plan a step; returns the first tokens of the prompts that it admits, which tell requests apart."""
    plan = worker.plan()
    return [] if plan is None else [int(admission.token_ids[0]) for admission in plan.admissions]


# -- a worker that leaves ----------------------------------------------------------------------------------------------


@in_loop
async def test_a_leaving_group_s_requests_move_once_its_steps_are_answered(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=4)
    one.step(token_id=7)
    plan = one.plan()
    assert plan is not None
    two = Worker(engine)
    engine.worker_leaves(one.group)
    assert (one.plan(), two.plan(), engine.may_go(one.group)) == (None, None, False)
    one.answer(plan, token_id=8)
    assert engine.may_go(one.group)
    moved = two.plan()
    assert moved is not None
    assert moved.admissions[0].token_ids.tolist() == [1, 2, 3, 7, 8]
    frontend.submit(2, "b")
    assert one.plan() is None, "it gets nothing new"
    one.lose()
    two.answer(moved, token_id=9)
    assert tokens_of(await frontend.take()) == {1: [7, 8, 9]}
    assert engine.statistics().num_lost_workers == 0
    assert engine.statistics().num_suspects == 0


@in_loop
async def test_a_leaving_group_that_is_the_last_finishes_what_it_has_and_nothing_new_is_accepted(
    engine: Engine,
) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=2)
    worker.step()
    engine.worker_leaves(worker.group)
    serving = (await frontend.take()).serving
    assert serving is not None
    assert serving.model is None
    frontend.submit(2, "b")
    assert isinstance(outcomes_of(await frontend.take())[2], UnavailableError)
    assert not engine.may_go(worker.group)
    worker.step()
    assert outcomes_of(await frontend.take()) == {1: "length"}
    assert engine.may_go(worker.group)


@in_loop
async def test_a_group_that_comes_relieves_one_that_leaves(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=9)
    one.step()
    engine.worker_leaves(one.group)
    one.step()
    two = Worker(engine)
    assert engine.may_go(one.group)
    assert admitted(two) == [1]


# -- an engine that stops ----------------------------------------------------------------------------------------------


@in_loop
async def test_an_engine_that_drains_accepts_nothing_and_waits_for_what_lives(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=2)
    worker.step()
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0.01)
    frontend.submit(2, "b")
    refusal = outcomes_of(await frontend.take())[2]
    assert isinstance(refusal, UnavailableError)
    assert "about to stop; retry" in str(refusal)
    await asyncio.sleep(0.1)
    assert not draining.done()
    worker.step()
    await asyncio.wait_for(draining, 1)
    assert outcomes_of(await frontend.take()) == {1: "length"}


@in_loop
async def test_an_engine_drains_so_long_and_no_longer(engine: Engine) -> None:
    engine = Engine(load_config({"drain_seconds": "0"}, {}))
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a")
    worker.step()
    await asyncio.wait_for(engine.drain(), 1)
