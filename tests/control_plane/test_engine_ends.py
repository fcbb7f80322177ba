"""How requests end before their time, at an engine driven by hand: aborts, deadlines, a worker that stays away."""

import asyncio

from engine_driver import (
    Clock,
    Frontend,
    Worker,
    assert_nothing_is_left,
    attached,
    in_loop,
    outcomes_of,
    tokens_of,
)

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.errors import AbortedError, DeadlineError, UnavailableError

# -- aborts ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_aborted_id_ends_its_stream_and_may_be_used_again(engine: Engine) -> None:
    worker = Worker(engine)
    frontend, other = await attached(engine), await attached(engine)
    frontend.submit(1, "a")
    other.send(aborted_request_ids=("a", "unknown", "a"))
    assert isinstance(outcomes_of(await frontend.take())[1], AbortedError)
    frontend.submit(2, "a")
    worker.step()
    assert tokens_of(await frontend.take()) == {2: [7]}


@in_loop
async def test_an_id_is_aborted_by_its_own_caller_alone(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", caller="alice", max_tokens=2)
    frontend.send(aborted_request_ids=("a",))
    frontend.send(aborted_request_ids=("x", "a"), aborting_callers=("alice", "bob"))
    worker.step()
    assert tokens_of(await frontend.take()) == {1: [7]}
    frontend.send(aborted_request_ids=("x", "a"), aborting_callers=("bob", "alice"))
    assert isinstance(outcomes_of(await frontend.take())[1], AbortedError)


@in_loop
async def test_a_stream_that_its_client_left_hears_its_end_once_and_is_computed_no_more(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", length=20, max_tokens=1)
    worker.step()
    await frontend.take()
    frontend.submit(2, "b", length=20)
    plan = worker.plan()
    assert plan is not None
    frontend.send(aborted_stream_ids=(2, 2, 77))
    worker.answer(plan)
    delivery = await frontend.take()
    assert [(ending.stream_id, ending.num_cached_tokens) for ending in delivery.endings] == [(2, 16)]
    assert isinstance(delivery.endings[0].outcome, AbortedError)
    assert tokens_of(delivery) == {}
    assert worker.step() is None
    assert_nothing_is_left(engine)


@in_loop
async def test_a_frontend_ends_its_own_streams_alone(engine: Engine) -> None:
    worker = Worker(engine)
    frontend, other = await attached(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=1)
    other.send(aborted_stream_ids=(1,))
    worker.step()
    assert outcomes_of(await frontend.take()) == {1: "length"}


@in_loop
async def test_a_frontend_that_is_gone_takes_its_requests_with_it(engine: Engine) -> None:
    worker = Worker(engine)
    gone, other = Frontend(engine), Frontend(engine)
    gone.submit(1, "a")
    other.submit(1, "b")
    plan = worker.plan()
    assert plan is not None
    engine.detach_frontend(gone.owner)
    worker.answer(plan)
    following = worker.step()
    assert following is not None
    assert following.released_rows.size == 1
    other.submit(2, "a")
    worker.step()
    assert tokens_of(await other.take()) == {1: [7, 7, 7], 2: [7]}


@in_loop
async def test_a_request_may_be_aborted_while_no_worker_is_there(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a")
    worker.lose()
    frontend.send(aborted_request_ids=("a",))
    assert isinstance(outcomes_of(await frontend.take())[1], AbortedError)
    assert Worker(engine).step() is None
    assert_nothing_is_left(engine)


# -- deadlines ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_deadline_that_passes_in_the_queue_ends_a_request_that_is_never_prefilled(engine: Engine) -> None:
    """Case 37: a deadline of 50 ms and a queue of 1 s."""
    clock = Clock()
    engine = Engine(load_config({"max_num_seqs": "1"}, {}), clock)
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "running", max_tokens=20)
    worker.step()
    frontend.submit(2, "waiting", length=5, timeout_seconds=0.05)
    await frontend.take()
    clock.now = 1.0
    await asyncio.sleep(0.1)
    assert isinstance(outcomes_of(await frontend.take())[2], DeadlineError)
    plans = []
    while (plan := worker.step()) is not None:
        plans.append(plan)
    assert len(plans) == 19
    assert not any(plan.admissions for plan in plans)
    assert_nothing_is_left(engine)


@in_loop
async def test_a_deadline_is_not_early_and_holds_in_decode_too(engine: Engine) -> None:
    clock = Clock()
    engine = Engine(load_config({}, {}), clock)
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", timeout_seconds=0.05, max_tokens=20)
    frontend.submit(2, "b", timeout_seconds=99, max_tokens=20)
    worker.step()
    clock.now = 0.04
    await asyncio.sleep(0.1)
    worker.step()
    assert tokens_of(await frontend.take()) == {1: [7, 7], 2: [7, 7]}
    clock.now = 0.05
    worker.group.work.clear()
    await asyncio.sleep(0.05)
    assert worker.group.work.is_set()
    worker.step()
    delivery = await frontend.take()
    assert {stream: type(outcome) for stream, outcome in outcomes_of(delivery).items()} == {1: DeadlineError}
    assert tokens_of(delivery) == {2: [7]}


@in_loop
async def test_a_deadline_holds_while_no_worker_is_there(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", timeout_seconds=0.05)
    worker.lose()
    await frontend.take()
    assert isinstance(outcomes_of(await frontend.take())[1], DeadlineError)
    assert Worker(engine).step() is None
    assert_nothing_is_left(engine)


@in_loop
async def test_a_request_that_ended_in_time_is_not_ended_again(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", timeout_seconds=0.05, max_tokens=1)
    worker.step()
    assert outcomes_of(await frontend.take()) == {1: "length"}
    frontend.submit(1, "a", max_tokens=2)
    await asyncio.sleep(0.1)
    worker.step()
    assert outcomes_of(await frontend.take()) == {}


# -- a worker that stays away ------------------------------------------------------------------------------------------


@in_loop
async def test_who_waits_for_a_worker_waits_so_long_and_no_longer_whatever_comes_and_fails(engine: Engine) -> None:
    engine = Engine(load_config({"max_queue_seconds": "1"}, {}))
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", max_tokens=20)
    worker.step()
    worker.lose()
    await frontend.take()
    await asyncio.sleep(0.6)
    fail_to_attach(engine)
    await asyncio.sleep(0.5)
    delivery = await frontend.take()
    assert isinstance(outcomes_of(delivery)[1], UnavailableError)
    assert Worker(engine).step() is None
    assert_nothing_is_left(engine)


@in_loop
async def test_the_next_loss_begins_the_time_anew(engine: Engine) -> None:
    engine = Engine(load_config({"max_queue_seconds": "1"}, {}))
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a")
    worker.lose()
    fail_to_attach(engine)
    worker = Worker(engine)
    await asyncio.sleep(0.6)
    worker.lose()
    await asyncio.sleep(0.5)
    assert outcomes_of(await frontend.take()) == {}
    await asyncio.sleep(0.6)
    assert isinstance(outcomes_of(await frontend.take())[1], UnavailableError)


def fail_to_attach(engine: Engine) -> None:
    """A worker that is configured and never ready."""
    Worker(engine, ready=False).lose()
