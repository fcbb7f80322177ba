"""Streams that a frontend parks, at an engine driven by hand: they get nothing new, and end as any other."""

import asyncio

from engine_driver import Clock, Worker, attached, in_loop, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.errors import AbortedError, DeadlineError


@in_loop
async def test_a_parked_stream_gets_what_was_under_way_and_no_more_until_it_is_unparked(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "slow")
    frontend.submit(2, "other")
    worker.step()
    plan = worker.plan()
    assert plan is not None
    frontend.send(parked_stream_ids=(1, 1, 77))
    worker.answer(plan)
    worker.step()
    assert tokens_of(await frontend.take()) == {1: [7, 7], 2: [7, 7, 7]}
    frontend.send(unparked_stream_ids=(1, 2, 77))
    while worker.step():
        pass
    delivery = await frontend.take()
    assert tokens_of(delivery) == {1: [7, 7, 7], 2: [7, 7]}
    assert outcomes_of(delivery) == {1: "length", 2: "length"}


@in_loop
async def test_a_frontend_parks_its_own_streams_alone(engine: Engine) -> None:
    worker, frontend, other = Worker(engine), await attached(engine), await attached(engine)
    frontend.submit(1, "a")
    other.send(parked_stream_ids=(1,))
    worker.step()
    assert tokens_of(await frontend.take()) == {1: [7]}


@in_loop
async def test_a_parked_stream_is_ended_by_an_abort_and_by_its_deadline(engine: Engine) -> None:
    clock = Clock()
    engine = Engine(load_config({}, {}), clock)
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "aborted")
    frontend.submit(2, "overdue", timeout_seconds=0.05)
    worker.step()
    await frontend.take()
    frontend.send(parked_stream_ids=(1, 2))
    assert engine.statistics().total.num_parked == 2
    frontend.send(aborted_stream_ids=(1,))
    assert isinstance(outcomes_of(await frontend.take())[1], AbortedError)
    clock.now = 1.0
    await asyncio.sleep(0.1)
    assert isinstance(outcomes_of(await frontend.take())[2], DeadlineError)
    assert engine.statistics().total.num_parked == 0


@in_loop
async def test_it_may_be_parked_and_unparked_while_no_worker_is_there(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=2)
    frontend.submit(2, "b", max_tokens=2)
    worker.step()
    await frontend.take()
    worker.lose()
    frontend.send(parked_stream_ids=(1, 2))
    frontend.send(unparked_stream_ids=(2,))
    worker = Worker(engine)
    worker.step()
    assert tokens_of(await frontend.take()) == {2: [7]}
    assert worker.step() is None
    frontend.send(unparked_stream_ids=(1,))
    worker.step()
    assert tokens_of(await frontend.take()) == {1: [7]}
