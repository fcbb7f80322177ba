"""An engine and its workers over real sockets: who sends what when, and what a worker takes along that breaks."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from engine_driver import Worker
from engine_socket import SocketFrontend, SocketWorker, served_engine

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.step_clock import FIRST_STEP_SECONDS
from blockplane.protos import wire
from blockplane.protos.config import load_config
from blockplane.protos.errors import UnavailableError
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

Scenario = Callable[[Engine, EngineStub], Awaitable[None]]


def over_sockets(scenario: Scenario, **settings: str) -> None:
    async def run() -> None:
        engine = Engine(load_config(settings, {}))
        async with served_engine(engine) as stub:
            await scenario(engine, stub)

    asyncio.run(asyncio.wait_for(run(), 30))


async def ready_worker(stub: EngineStub, **hello_fields: object) -> SocketWorker:
    worker = SocketWorker(stub)
    await worker.attach(**hello_fields)
    await worker.be_ready()
    return worker


# -- running ahead -----------------------------------------------------------------------------------------------------


def test_two_plans_come_before_an_answer_and_the_third_with_the_first() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker, frontend = await ready_worker(stub), SocketFrontend(stub)
        await frontend.submit(1)
        plans = [await worker.plan(), await worker.plan()]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(third := asyncio.ensure_future(worker.plan())), 0.1)
        await worker.answer(plans[0], token_id=7)
        assert (await third).step == 3
        await worker.answer(plans[1], token_id=8)
        await worker.answer(third.result(), token_id=9)
        await frontend.until(lambda: frontend.tokens.get(1) == [7, 8, 9])

    over_sockets(scenario)


def test_a_plan_is_on_its_way_before_what_the_last_answer_gave_is_delivered() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        events = []
        plan_to_proto, flush = wire.plan_to_proto, engine.flush

        def note_flush(*steps: Any) -> None:
            events.append("delivery")
            flush(*steps)

        engine.flush = note_flush  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "plan_to_proto", lambda plan: (events.append(plan.step), plan_to_proto(plan))[1])
            worker, frontend = await ready_worker(stub), SocketFrontend(stub)
            await frontend.submit(1, max_tokens=4)
            plans = [await worker.plan(), await worker.plan()]
            events.clear()
            await worker.answer(plans[0])
            plans.append(await worker.plan())
            await frontend.until(lambda: bool(frontend.tokens))
        assert events[:2] == [3, "delivery"]

    over_sockets(scenario)


def test_a_frontend_that_does_not_read_delays_no_step() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker = await ready_worker(stub, memory=1 << 20)
        deaf, frontend = SocketFrontend(stub), SocketFrontend(stub)
        await deaf.submit(1, max_tokens=40)
        deaf._reader.cancel()
        await frontend.submit(2, max_tokens=40)
        serving = asyncio.create_task(worker.serve())
        await frontend.until(lambda: frontend.outcomes == {2: "length"})
        serving.cancel()

    over_sockets(scenario)


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_result_that_comes_twice_or_with_another_epoch_is_dropped() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker, frontend = await ready_worker(stub), SocketFrontend(stub)
        await frontend.submit(1, max_tokens=2)
        first = await worker.plan()
        await worker.answer(first, token_id=3, epoch=worker.configure.epoch - 1)
        await worker.answer(first, token_id=7)
        await worker.answer(first, token_id=4)
        await worker.answer(await worker.plan(), token_id=8)
        await frontend.until(lambda: frontend.outcomes == {1: "length"})
        assert frontend.tokens == {1: [7, 8]}
        statistics = await stub.GetStatistics(pb.GetStatisticsRequest())
        assert (statistics.num_dropped_results, statistics.num_groups, statistics.groups[0].num_admitted) == (2, 1, 1)

    over_sockets(scenario)


def test_a_step_that_is_left_out_ends_the_stream_and_the_request_goes_on_elsewhere() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker, frontend = await ready_worker(stub), SocketFrontend(stub)
        await frontend.submit(1, max_tokens=2)
        await worker.plan()
        await worker.answer(await worker.plan())
        assert await worker.end() == grpc.StatusCode.INTERNAL
        assert "result of step 2 while that of step 1 is expected" in await worker.call.details()
        other = await ready_worker(stub)
        serving = asyncio.create_task(other.serve())
        await frontend.until(lambda: frontend.outcomes == {1: "length"})
        serving.cancel()

    over_sockets(scenario)


def test_a_worker_that_says_what_is_wrong_with_it_is_lost_with_its_words() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker = await ready_worker(stub)
        await worker.call.write(pb.AttachWorkerRequest(fault=pb.Fault(message="row 9 is unknown.")))
        assert await worker.end() == grpc.StatusCode.UNAVAILABLE
        assert "row 9 is unknown" in await worker.call.details()

    over_sockets(scenario)


def test_a_worker_whose_stream_is_cut_off_is_lost_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker = await ready_worker(stub)
        worker.call.cancel()
        async with asyncio.timeout(10):
            while engine.groups():
                await asyncio.sleep(0.01)

    with caplog.at_level("INFO"):
        over_sockets(scenario)
    assert [record.message for record in caplog.records if "is lost" in record.message] == [
        "worker 0 is lost: its connection broke, or this engine ended it."
    ]


def test_a_worker_of_the_version_before_is_served_without_epochs_and_signs_of_life() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker, frontend = await ready_worker(stub, version=wire.OLDEST_PROTOCOL_VERSION), SocketFrontend(stub)
        await asyncio.sleep(1.2)
        await frontend.submit(1, max_tokens=1)
        await worker.answer(await worker.plan(), epoch=0)
        await frontend.until(lambda: frontend.outcomes == {1: "length"})

    over_sockets(scenario, worker_timeout_seconds="1")


# -- signs of life -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_silent_worker_is_lost_and_one_that_beats_is_not(is_ready: bool) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        workers = SocketWorker(stub), SocketWorker(stub)
        for worker in workers:
            await worker.attach()
            if is_ready:
                await worker.be_ready()
        assert workers[0].configure.heartbeat_milliseconds == 333
        for _ in range(5):
            await asyncio.sleep(0.3)
            await workers[0].beat()
        assert await workers[1].end() == grpc.StatusCode.UNAVAILABLE
        assert "no sign of life for 1." in await workers[1].call.details()
        assert len(engine.statistics().groups) == int(is_ready)
        assert not workers[0].call.done()

    over_sockets(scenario, worker_timeout_seconds="1")


def test_a_worker_that_beats_and_does_not_answer_is_lost_by_its_step_and_gets_twice_as_long_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        loop, frontend = asyncio.get_running_loop(), SocketFrontend(stub)
        waits = []
        for boot in range(2):
            worker = await ready_worker(stub, boot_id=5)
            if boot == 0:
                await frontend.submit(1)
                # One answer, so that the limit is the floor and not a first step's.
                await worker.answer(await worker.plan())
            await worker.plan()
            since = loop.time()
            while engine.statistics().groups:
                await worker.beat()
                await asyncio.sleep(0.1)
            assert await worker.end() == grpc.StatusCode.UNAVAILABLE
            assert "did not answer step" in await worker.call.details()
            waits.append(loop.time() - since)
        assert 0.9 < waits[0] < 1.7
        assert 1.9 < waits[1] < 2.9

    assert FIRST_STEP_SECONDS > 10
    over_sockets(scenario, worker_timeout_seconds="1", step_timeout_seconds="1")


def test_an_engine_that_slept_itself_takes_nobody_for_dead() -> None:
    clock = [0.0]
    engine = Engine(load_config({}, {}), clock=lambda: clock[0])

    async def scenario() -> None:
        worker = Worker(engine).group
        seconds = worker.check_alive()
        clock[0] += 100
        assert worker.check_alive() > 0, "nobody could be heard meanwhile"
        for _ in range(3):
            clock[0] += seconds
            worker.check_alive()
        clock[0] += 2 * seconds
        with pytest.raises(UnavailableError, match="no sign of life"):
            worker.check_alive()

    asyncio.run(scenario())


# -- loss --------------------------------------------------------------------------------------------------------------


def test_streams_go_on_exactly_when_one_of_two_workers_is_lost() -> None:
    """Every token is the number of tokens before it, which no worker would give that had lost one or has one twice."""

    async def scenario(engine: Engine, stub: EngineStub) -> None:
        frontend = SocketFrontend(stub)
        workers = [await ready_worker(stub) for _ in range(2)]
        serving = [asyncio.create_task(count_up(worker)) for worker in workers]
        for stream_id in range(8):
            await frontend.submit(stream_id, length=2 + stream_id, max_tokens=40)
        await frontend.until(lambda: len(frontend.tokens) == 8 and min(map(len, frontend.tokens.values())) > 3)
        serving[0].cancel()
        workers[0].call.cancel()
        await frontend.until(lambda: len(frontend.outcomes) == 8)
        assert set(frontend.outcomes.values()) == {"length"}
        assert frontend.tokens == {stream_id: list(range(2 + stream_id, 42 + stream_id)) for stream_id in range(8)}
        serving[1].cancel()

    over_sockets(scenario)


async def count_up(worker: SocketWorker) -> None:
    """Answer every row with how many tokens it has."""
    lengths: dict[int, int] = {}
    decodes: list[int] = []
    while True:
        plan = wire.plan_from_proto((await worker.read()).plan)
        lengths.update((admission.row, len(admission.token_ids)) for admission in plan.admissions)
        if plan.decode_rows is not None:
            decodes = plan.decode_rows.tolist()
        rows = [*decodes, *plan.prefill_rows.tolist()]
        tokens = np.array([lengths[row] for row in rows], np.int32)
        for row in rows:
            lengths[row] += 1
        result = wire.StepResult(plan.step, tokens, epoch=worker.configure.epoch)
        await worker.call.write(pb.AttachWorkerRequest(result=wire.result_to_proto(result)))


def test_a_worker_that_comes_back_serves_from_the_blocks_that_it_has_cached() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker, frontend = await ready_worker(stub, boot_id=5), SocketFrontend(stub)
        await frontend.submit(1, length=40, max_tokens=1)
        await worker.answer(await worker.plan())
        await frontend.until(lambda: 1 in frontend.outcomes)
        worker.call.cancel()
        back = await ready_worker(stub, boot_id=5, last_epoch=worker.configure.epoch)
        assert (back.configure.keeps_kv, back.configure.last_step) == (True, 1)
        assert back.configure.epoch != worker.configure.epoch
        await frontend.submit(2, length=40, max_tokens=1)
        plan = await back.plan()
        assert (plan.step, plan.admissions[0].num_computed_tokens) == (2, 32)

    over_sockets(scenario)


def test_a_request_that_kills_any_worker_ends_alone() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        frontend = SocketFrontend(stub)
        fleet = [asyncio.create_task(fragile(stub, boot)) for boot in (100, 200)]
        for stream_id in range(6):
            await frontend.submit(stream_id, length=2 + stream_id, max_tokens=20)
        await frontend.submit(66, length=50, max_tokens=20)
        await frontend.until(lambda: len(frontend.outcomes) == 7)
        assert "alone in the step 3 times" in str(frontend.outcomes.pop(66))
        assert set(frontend.outcomes.values()) == {"length"}
        for worker in fleet:
            worker.cancel()

    over_sockets(scenario)


async def fragile(stub: EngineStub, boot: int) -> None:
    """A worker that dies of prompts of 50 tokens, and is started again each time."""
    while True:
        boot += 1
        worker = await ready_worker(stub, boot_id=boot)
        while True:
            plan = await worker.plan()
            if any(len(admission.token_ids) == 50 for admission in plan.admissions):
                worker.call.cancel()
                break
            await worker.answer(plan)


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_leaves_answers_what_is_in_flight_and_its_stream_ends_well() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        frontend = SocketFrontend(stub)
        one = await ready_worker(stub)
        await frontend.submit(1, max_tokens=6)
        plans = [await one.plan(), await one.plan()]
        two = await ready_worker(stub)
        serving = asyncio.create_task(two.serve())
        await one.call.write(pb.AttachWorkerRequest(leaving=pb.Leaving()))
        await asyncio.sleep(0.05)
        for plan in plans:
            await one.answer(plan, token_id=8)
        assert await one.end() == grpc.StatusCode.OK
        await frontend.until(lambda: frontend.outcomes == {1: "length"})
        assert frontend.tokens == {1: [8, 8, 7, 7, 7, 7]}
        serving.cancel()
        assert engine.statistics().num_lost_workers == 0

    over_sockets(scenario)


def test_an_idle_worker_that_leaves_is_let_go_at_once() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker = await ready_worker(stub)
        await worker.call.write(pb.AttachWorkerRequest(leaving=pb.Leaving()))
        assert await worker.end() == grpc.StatusCode.OK

    over_sockets(scenario)
