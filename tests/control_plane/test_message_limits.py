"""What gRPC lets pass, by its effect over real sockets: long prompts, endless messages, pings while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client_service import PROMPT, Play, Service, failure_of, ids_of, next_response, play_in
from engine_socket import SocketFrontend, SocketWorker, hello
from processes import free_port
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.control_plane.frontend.service import InferenceService
from blockplane.control_plane.frontend.vllm_engine import VllmEngineService
from blockplane.protos.channel import CLIENT_OPTIONS, MAX_REQUEST_BYTES, peer_options
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Ending
from blockplane.protos.listening import listening_server
from blockplane.v1 import engine_pb2
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub, add_EngineServicer_to_server
from blockplane.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server

NO_LIMIT = [("grpc.max_send_message_length", -1)]
A_PING_A_SECOND = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
]
SILENT_SECONDS = 10
LONG = [1, 255] * (64 << 10)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


@asynccontextmanager
async def as_for_clients(
    service: Service, client_options: list[tuple[str, int]]
) -> AsyncIterator[tuple[InferenceStub, Any]]:
    """The services on a port such as the frontend opens for clients; yields one's ways to them."""
    address = f"127.0.0.1:{free_port()}"
    server = listening_server(address, CLIENT_OPTIONS)
    add_InferenceServicer_to_server(InferenceService(service.calls), server)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineService(service.calls, service.config), server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=client_options) as channel:
            yield InferenceStub(channel), vllm_engine_pb2_grpc.VllmEngineStub(channel)
    finally:
        await server.stop(None)


@pytest.mark.parametrize("protocol", ["ours", "theirs"])
def test_a_prompt_of_128k_ids_passes(play: Play, protocol: str) -> None:
    async def scenario(service: Service) -> None:
        async with as_for_clients(service, []) as (ours, theirs):
            if protocol == "ours":
                call = ours.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=LONG)))
            else:
                call = theirs.Generate(vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=LONG)))
            asking = asyncio.ensure_future(call.read())
            (submission,) = (await service.engine.next_batch()).submissions
            assert np.array_equal(submission.prompt_token_ids, LONG)
            service.deliver_text(submission.stream_id, "ok", Ending(submission.stream_id, "length"))
            answer = await asyncio.wait_for(asking, SECONDS)
            assert (answer.token_ids if protocol == "ours" else answer.complete.output_ids) == ids_of("ok")

    play(scenario)


def test_an_admission_of_128k_ids_reaches_its_worker(tmp_path: Path) -> None:
    """The other half of the way: in a frontend's batch to the engine, and in a plan over the worker's stream."""
    address, options = f"unix:{tmp_path}/engine.sock", peer_options(5)
    attach = hello(memory=1 << 25)
    attach.hello.model.max_model_len, attach.hello.model.vocab_size = 2 * len(LONG), 2 * len(LONG)

    async def main() -> None:
        server = listening_server(address, options)
        add_EngineServicer_to_server(EngineServer(Engine(load_config({}, {}))), server)
        await server.start()
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = EngineStub(channel)
            worker = SocketWorker(stub)
            await worker.call.write(attach)
            worker.configure = (await worker.read()).configure
            names = engine_pb2.WorkerReady.DESCRIPTOR.fields_by_name
            ready = engine_pb2.WorkerReady(**{name: getattr(worker.configure, name) for name in names})
            await worker.call.write(engine_pb2.AttachWorkerRequest(ready=ready))
            frontend = SocketFrontend(stub)
            await frontend.submit(1, length=len(LONG), first=2)
            (admission,) = (await worker.plan()).admissions
            assert np.array_equal(admission.token_ids, np.arange(2, 2 + len(LONG)))
        await server.stop(None)

    asyncio.run(main())


def test_a_message_above_the_limit_is_resource_exhausted_and_leaves_nothing(play: Play) -> None:
    async def scenario(service: Service) -> None:
        async with as_for_clients(service, NO_LIMIT) as (stub, theirs):
            below = stub.Generate(pb.GenerateRequest(text="x" * (MAX_REQUEST_BYTES - 100), priority=9999))
            assert (await failure_of(below)).code() is grpc.StatusCode.INVALID_ARGUMENT, "it was read"
            above = stub.Generate(pb.GenerateRequest(text="x" * MAX_REQUEST_BYTES, priority=9999))
            assert (await failure_of(above)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            above = theirs.Generate(vllm.GenerateRequest(text="x" * MAX_REQUEST_BYTES))
            assert (await failure_of(above)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (service.link.num_streams, service.calls.quotas.num_requests) == (0, {})
            assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size, "the connection lives"

    play(scenario)


@pytest.mark.slow
def test_a_client_that_pings_every_second_outlives_a_call_that_says_nothing_for_ten(play: Play) -> None:
    async def scenario(service: Service) -> None:
        async with as_for_clients(service, A_PING_A_SECOND) as (stub, _):
            call = stub.Generate(pb.GenerateRequest(token_ids=PROMPT))
            (submission,) = (await service.engine.next_batch()).submissions
            await asyncio.sleep(SILENT_SECONDS)
            service.deliver_text(submission.stream_id, "ok", Ending(submission.stream_id, "length"))
            assert (await next_response(call)).text == "ok"

    play(scenario)
