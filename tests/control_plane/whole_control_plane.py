"""Engine and frontend joined by a socket, clients on another, a worker whose steps are answered by hand; no test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from client_service import MODEL, TEXT
from engine_driver import Worker
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.control_plane.frontend.calls import Calls
from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.service import InferenceService
from blockplane.control_plane.frontend.vllm_engine import VllmEngineService
from blockplane.protos.config import load_config
from blockplane.protos.listening import listening_server
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
        self.address = config.address
        self.engine = Engine(config)
        self.worker = Worker(self.engine, MODEL)
        is_serving = asyncio.Event()

        async def on_model(model: ModelInfo | None) -> None:
            calls.serve_model(model and (model, TEXT))
            is_serving.set()

        self.link = EngineLink(config, on_model)
        calls = Calls(self.link, config)
        self.servers = [listening_server(address) for address in (config.engine_address, config.address)]
        add_EngineServicer_to_server(EngineServer(self.engine), self.servers[0])
        add_InferenceServicer_to_server(InferenceService(calls), self.servers[1])
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineService(calls, config), self.servers[1])
        for server in self.servers:
            await server.start()
        self.running = asyncio.create_task(self.link.run())
        await asyncio.wait_for(is_serving.wait(), SECONDS)
        self.channel = grpc.aio.insecure_channel(config.address)
        self.vllm = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for server in reversed(self.servers):
            await server.stop(0)

    async def call(self, num_prompt_tokens: int, **fields: Any) -> grpc.aio.UnaryStreamCall[Any, Any]:
        """A call of our own protocol, whose request the engine has. It goes on past the end of a text."""
        prompt, params = pb.TokenIds(ids=range(1, num_prompt_tokens + 1)), pb.SamplingParams(ignore_eos=True)
        request = pb.GenerateRequest(token_ids=prompt, sampling_params=params, **fields)
        return await self._begun(InferenceStub(self.channel).Generate(request))

    async def call_vllm(
        self, num_prompt_tokens: int, timeout: float | None = None, **fields: Any
    ) -> grpc.aio.UnaryStreamCall[Any, Any]:
        """The same of the public vLLM engine protocol."""
        prompt = vllm.TokenizedInput(input_ids=range(1, num_prompt_tokens + 1))
        params = vllm.SamplingParams(ignore_eos=True)
        request = vllm.GenerateRequest(tokenized=prompt, sampling_params=params, stream=True, **fields)
        return await self._begun(self.vllm.Generate(request, timeout=timeout))

    async def _begun(self, call: grpc.aio.UnaryStreamCall[Any, Any]) -> grpc.aio.UnaryStreamCall[Any, Any]:
        num_before = len(self.engine._streams)
        # A call begins in the event loop, not before.
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
