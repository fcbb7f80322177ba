"""GetSteps over a real socket: a step's stations in their order on one clock, whatever clock its worker has."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from engine_driver import Clock, Frontend, Worker, in_loop
from engine_socket import SocketFrontend, SocketWorker, channel_to

from blockplane.client.engine_values import GroupSteps, steps_from_proto
from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.step_log import LoggedStep
from blockplane.control_plane.engine.told_steps import steps_to_proto
from blockplane.protos.config import load_config
from blockplane.protos.step_times import StepTimes
from blockplane.v1 import admin_pb2 as pb
from blockplane.v1.admin_pb2_grpc import AdminStub
from blockplane.v1.engine_pb2_grpc import EngineStub

OURS = ("scheduled", "planned", "answered", "settled", "delivered")
INNER = ("received", "began", "prepared", "computed", "sampled", "sent")
STATIONS = (*OURS[:2], *INNER, *OURS[2:])
OTHER_BOOT = 7_000_000_000_000
"""Nanoseconds by which the worker's clock is ahead."""
SECOND = 1_000_000_000


async def ready_worker(channel: grpc.aio.Channel, **fields: Any) -> SocketWorker:
    worker = SocketWorker(EngineStub(channel))
    await worker.attach(**fields)
    await worker.be_ready()
    return worker


async def answer_timed(worker: SocketWorker, num_steps: int) -> None:
    """Answer so many plans, each with times of the worker's clock; a step takes some milliseconds."""
    for _ in range(num_steps):
        plan = await worker.plan()
        received = time.monotonic_ns() + OTHER_BOOT
        await asyncio.sleep(0.002)
        sent = time.monotonic_ns() + OTHER_BOOT
        marks = np.linspace(received, sent, 6).astype(int).tolist()
        times = StepTimes.of(*marks)
        assert times is not None
        await worker.answer(plan, times=times.to_bytes())


async def get_steps(channel: grpc.aio.Channel, num_steps: int = 0) -> list[GroupSteps]:
    call = AdminStub(channel).GetSteps(pb.GetStepsRequest(num_steps=num_steps))
    return [steps_from_proto(message) async for message in call]


def over_a_channel(scenario: Callable[[grpc.aio.Channel], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        engine = Engine(load_config(settings, {}))
        try:
            async with channel_to(engine) as channel, asyncio.timeout(30):
                await scenario(channel)
        finally:
            engine.close()

    asyncio.run(run())


def assert_in_order(steps: GroupSteps, *names: str) -> None:
    times = np.stack([getattr(steps, name) for name in names])
    assert (np.diff(times, axis=0) >= 0).all()


@pytest.mark.parametrize("has_journal", [False, True])
def test_every_step_goes_through_all_its_stations_in_order_on_one_clock(has_journal: bool, tmp_path: Any) -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        before = time.time_ns()
        worker, frontend = await ready_worker(channel), SocketFrontend(EngineStub(channel))
        await frontend.submit(1, max_tokens=6)
        await answer_timed(worker, 6)
        await frontend.until(lambda: 1 in frontend.outcomes)
        (steps,) = await get_steps(channel)
        after = time.time_ns()
        assert steps.steps.tolist() == [1, 2, 3, 4, 5, 6]
        assert_in_order(steps, *STATIONS)
        assert (np.diff(steps.answered) > 0).all()
        assert before - SECOND < steps.scheduled[0] < steps.delivered[-1] < after + SECOND
        assert (steps.sent - steps.received >= 2_000_000 - 1000).all(), "what the worker took is not cut away"
        assert steps.num_prefill_tokens.tolist() == [3, 0, 0, 0, 0, 0]
        assert steps.num_decode_tokens.tolist() == [0, 1, 1, 1, 1, 1]
        assert (steps.num_bucket_tokens >= steps.num_prefill_tokens + steps.num_decode_tokens).all()
        assert (steps.num_plan_bytes > 0).all()

    over_a_channel(scenario, **({"journal": str(tmp_path / "journal")} if has_journal else {}))


def test_no_more_steps_come_than_are_asked_for_and_those_are_the_last() -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        worker, frontend = await ready_worker(channel), SocketFrontend(EngineStub(channel))
        await frontend.submit(1, max_tokens=5)
        await answer_timed(worker, 5)
        await frontend.until(lambda: 1 in frontend.outcomes)
        assert [steps.steps.tolist() for steps in await get_steps(channel, 2)] == [[4, 5]]

    over_a_channel(scenario)


def test_a_worker_that_tells_no_times_leaves_only_the_engine_s_own() -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        worker, frontend = await ready_worker(channel), SocketFrontend(EngineStub(channel))
        await frontend.submit(1, max_tokens=4)
        for _ in range(4):
            await worker.answer(await worker.plan())
        await frontend.until(lambda: 1 in frontend.outcomes)
        (steps,) = await get_steps(channel)
        assert_in_order(steps, *OURS)
        assert all(not getattr(steps, name).any() for name in INNER)

    over_a_channel(scenario)


def test_a_step_of_a_lost_worker_is_not_told_and_its_group_s_log_goes_on_when_it_is_back() -> None:
    async def scenario(channel: grpc.aio.Channel) -> None:
        worker, frontend = await ready_worker(channel, boot_id=5), SocketFrontend(EngineStub(channel))
        await frontend.submit(1, max_tokens=6)
        await answer_timed(worker, 2)
        await worker.plan()
        worker.call.cancel()
        again = await ready_worker(channel, boot_id=5, last_epoch=worker.configure.epoch, last_step=2)
        assert again.configure.keeps_kv
        await answer_timed(again, 4)
        await frontend.until(lambda: 1 in frontend.outcomes)
        (steps,) = await get_steps(channel)
        first = again.configure.last_step + 1
        assert steps.steps.tolist() == [1, 2, *range(first, first + 4)]
        assert first > 3, "a step was lost"
        assert_in_order(steps, *STATIONS)

    over_a_channel(scenario)


@pytest.mark.parametrize(
    "times",
    [
        StepTimes(2**64 - 1, *[2**32 - 1] * 5),
        StepTimes(0, 0, 0, 0, 0, 0),
        StepTimes(1, 9, 8, 7, 6, 5),
        StepTimes(2**63, 0, 0, 0, 0, 2**32 - 1),
    ],
)
def test_whatever_a_worker_tells_lies_between_its_plan_and_its_answer_and_in_order(times: StepTimes) -> None:
    usual = StepTimes(OTHER_BOOT, 1, 2, 3, 4, 5)
    steps = [
        LoggedStep(number, 0, 1, 1, 4, number, number + 0.1, number + 0.5, number + 0.6, number + 0.7, each)
        for number, each in enumerate([usual, times, usual, None], start=1)
    ]
    told = steps_from_proto(steps_to_proto(3, steps, Clock()))
    assert_in_order(GroupSteps(3, *[getattr(told, name)[:3] for name in GroupSteps.__slots__[1:]]), *STATIONS)
    assert all(getattr(told, name)[3] == 0 for name in INNER)
    assert told.group == 3


@in_loop
async def test_steps_are_counted_per_group_and_together_and_outlive_their_group(engine: Engine) -> None:
    worker, frontend = Worker(engine), Frontend(engine)
    frontend.submit(1, "a", length=5, max_tokens=3)
    while worker.step() is not None:
        pass
    group = engine.statistics().groups[worker.group.number]
    assert (group.num_steps, group.num_computed_tokens) == (3, 5 + 2)
    assert group.num_bucket_tokens >= group.num_computed_tokens
    assert group.step_seconds > 0
    worker.lose()
    total = engine.statistics().total
    assert (total.num_steps, total.num_computed_tokens) == (3, 7)
    assert total.step_seconds == group.step_seconds


def test_a_group_idles_where_it_has_requests_and_nothing_in_flight_and_at_no_other_time() -> None:
    async def scenario() -> None:
        clock = Clock()
        engine = Engine(load_config({}, {}), clock)
        worker, frontend = Worker(engine), Frontend(engine)

        def step(seconds: float) -> None:
            plan = worker.plan()
            assert plan is not None
            worker.group.steps.sent(4)
            clock.now += seconds
            worker.answer(plan)

        def idle_seconds() -> float:
            return engine.statistics().total.idle_seconds

        clock.now = 100.0
        frontend.submit(1, "first", max_tokens=3)
        step(0.5)
        assert idle_seconds() == 0, "nothing ran before"
        clock.now += 3.0
        step(0.5)
        assert idle_seconds() == pytest.approx(3.0)
        step(0.5)
        clock.now += 1000.0
        frontend.submit(2, "second", max_tokens=9)
        step(0.5)
        assert idle_seconds() == pytest.approx(3.0), "the first had ended"
        frontend.send(aborted_stream_ids=(2,))
        clock.now += 1000.0
        frontend.submit(3, "third", max_tokens=9)
        step(0.5)
        assert idle_seconds() == pytest.approx(3.0), "the second was aborted"
        assert engine.statistics().total.step_seconds == pytest.approx(2.5)

    asyncio.run(scenario())
