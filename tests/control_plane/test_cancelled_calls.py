"""Case 34: clients that leave, over real sockets from the call to the engine, whose steps are answered by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from client_service import MODEL, TEXT, GenerateCall, next_response
from engine_driver import Worker
from scripted_engine import SECONDS

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.service import InferenceService
from blockplane.control_plane.serving import listening_server
from blockplane.protos.config import load_config
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.engine_pb2_grpc import add_EngineServicer_to_server
from blockplane.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server

CHUNK = 16


class ControlPlane:
    """Engine and frontend, joined by a socket, with room for one row at a time."""

    async def start(self, folder: Path) -> None:
        config = load_config(
            {
                "address": f"unix:{folder}/frontend.sock",
                "engine_address": f"unix:{folder}/engine.sock",
                "num_batched_tokens_buckets": str(CHUNK),
                "num_seqs_buckets": "1",
                "max_model_len": "256",
            },
            {},
        )
        self.engine = Engine(config)
        self.worker = Worker(self.engine, MODEL)
        is_serving = asyncio.Event()

        async def on_model(model: ModelInfo | None) -> None:
            service.serve_model(model and (model, TEXT))
            is_serving.set()

        self.link = EngineLink(config, on_model)
        service = InferenceService(self.link, config)
        self.servers = [listening_server(address) for address in (config.engine_address, config.address)]
        add_EngineServicer_to_server(EngineServer(self.engine), self.servers[0])
        add_InferenceServicer_to_server(service, self.servers[1])
        for server in self.servers:
            await server.start()
        self.running = asyncio.create_task(self.link.run())
        await asyncio.wait_for(is_serving.wait(), SECONDS)
        self.channel = grpc.aio.insecure_channel(config.address)

    async def stop(self) -> None:
        await self.channel.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for server in reversed(self.servers):
            await server.stop(0)

    async def call(self, num_prompt_tokens: int) -> GenerateCall:
        """A call whose request the engine has."""
        num_before = len(self.engine._streams)
        prompt = pb.TokenIds(ids=range(1, num_prompt_tokens + 1))
        call = InferenceStub(self.channel).Generate(
            pb.GenerateRequest(token_ids=prompt, sampling_params=pb.SamplingParams(ignore_eos=True))
        )
        await self.until(lambda: len(self.engine._streams) == num_before + 1)
        return call

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.01)

    def plan(self) -> StepPlan:
        plan = self.worker.plan()
        assert plan is not None
        return plan

    def answer(self, plan: StepPlan, num_sampled: int = 1) -> None:
        group, token_ids = self.worker.group, np.full(num_sampled, 7, np.int32)
        self.engine.take_result(group, StepResult(plan.step, token_ids, epoch=group.configure.epoch))
        self.engine.flush()

    async def leave(self, call: GenerateCall, num_left: int = 0) -> None:
        """The client goes; the engine hears of it."""
        call.cancel()
        await self.until(lambda: len(self.engine._streams) == num_left)

    def assert_nothing_is_left(self) -> None:
        plan = self.worker.plan()
        if plan is not None:
            assert (plan.admissions, plan.prefill_rows.size, plan.block_rows.size) == ((), 0, 0)
            assert plan.decode_rows is not None
            assert not plan.decode_rows.size
            self.answer(plan, 0)
            assert self.worker.plan() is None
        pool = self.worker.group.scheduler.blocks.pool
        assert pool.num_free == pool.num_usable
        assert (self.engine._requests, self.engine._streams, self.link._streams) == ({}, {}, {})
        statistics = self.worker.group.scheduler.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.num_parked) == (0, 0, 0)


@asynccontextmanager
async def control_plane(folder: Path) -> AsyncIterator[ControlPlane]:
    planes = ControlPlane()
    await planes.start(folder)
    try:
        yield planes
    finally:
        await planes.stop()


async def in_the_queue(planes: ControlPlane) -> None:
    first = await planes.call(3)
    planes.answer(planes.plan())
    second = await planes.call(3)
    plan = planes.plan()
    assert not plan.admissions, "there is one row"
    await planes.leave(second, num_left=1)
    planes.answer(plan)
    plan = planes.plan()
    await planes.leave(first)
    planes.answer(plan)


async def in_chunk_2_of_3(planes: ControlPlane) -> None:
    call = await planes.call(3 * CHUNK)
    planes.answer(planes.plan(), 0)
    plan = planes.plan()
    assert plan.prefill_num_tokens.tolist() == [CHUNK]
    await planes.leave(call)
    planes.answer(plan, 0)


async def in_decode_with_two_steps_in_flight(planes: ControlPlane) -> None:
    call = await planes.call(3)
    planes.answer(planes.plan())
    plans = [planes.plan(), planes.plan()]
    await planes.leave(call)
    for plan in plans:
        planes.answer(plan)


async def with_output_that_nobody_has_read(planes: ControlPlane) -> None:
    call = await planes.call(3)
    planes.answer(planes.plan())
    assert list((await next_response(call)).token_ids) == [7]
    for _ in range(5):
        planes.answer(planes.plan())
    await planes.leave(call)


@pytest.mark.parametrize(
    "leave", [in_the_queue, in_chunk_2_of_3, in_decode_with_two_steps_in_flight, with_output_that_nobody_has_read]
)
def test_a_client_that_leaves_takes_its_request_along_wherever_that_stands(
    tmp_path: Path, leave: Callable[[ControlPlane], Awaitable[None]]
) -> None:
    """No new plan names it, and all its blocks are back."""

    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            await leave(planes)
            planes.assert_nothing_is_left()

    asyncio.run(main())
