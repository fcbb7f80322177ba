"""The services of clients on one socket before an engine that does as the test says; knows no test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted_engine import SECONDS, Linked
from small_tokenizers import byte_level
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from blockplane.control_plane.frontend.calls import Calls
from blockplane.control_plane.frontend.service import InferenceService
from blockplane.control_plane.frontend.text import Text
from blockplane.control_plane.frontend.vllm_engine import VllmEngineService
from blockplane.protos.delivery import Ending, Submission
from blockplane.protos.listening import listening_server
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server

SMALL = byte_level()
MODEL = SMALL.model()
TEXT = Text(MODEL)
VOCAB_SIZE = MODEL.vocab_size
PROMPT = pb.TokenIds(ids=[1, 2, 3])
VLLM_PROMPT = vllm.TokenizedInput(input_ids=[1, 2, 3], original_text="whatever it was")

GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
VllmCall = grpc.aio.UnaryStreamCall[vllm.GenerateRequest, vllm.GenerateResponse]


class Service(Linked):
    """The services on one socket, linked to the scripted engine, and a stub that calls each."""

    async def start(self, folder: Path) -> None:
        await self.listen()
        self.client_address = f"unix:{folder}/frontend.sock"
        self.calls = Calls(self.link, self.config)
        self.calls.serve_model((MODEL, TEXT))
        self.frontend = listening_server(self.client_address, config=self.config)
        add_InferenceServicer_to_server(InferenceService(self.calls), self.frontend)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineService(self.calls, self.config), self.frontend)
        await self.frontend.start()
        self.channel = grpc.aio.insecure_channel(self.client_address)
        self.stub = InferenceStub(self.channel)
        self.vllm = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)
        await self.attach()

    async def stop(self) -> None:
        await self.channel.close()
        await self.frontend.stop(0)
        await super().stop()

    async def submit(self, timeout: float | None = None, **fields: Any) -> tuple[GenerateCall, Submission]:
        """A call that has reached the engine, and as what."""
        call = self.stub.Generate(pb.GenerateRequest(token_ids=PROMPT, **fields), timeout=timeout)
        (submission,) = (await self.engine.next_batch()).submissions
        return call, submission

    async def submit_vllm(
        self, timeout: float | None = None, *, stream: bool = True, **sampling: Any
    ) -> tuple[VllmCall, Submission]:
        """The same of the public vLLM engine protocol; `sampling` are its parameters."""
        request = vllm.GenerateRequest(
            request_id="mine", tokenized=VLLM_PROMPT, stream=stream, sampling_params=vllm.SamplingParams(**sampling)
        )
        call = self.vllm.Generate(request, timeout=timeout)
        (submission,) = (await self.engine.next_batch()).submissions
        return call, submission

    def deliver_text(self, stream_id: int, text: str, *endings: Ending) -> None:
        """The text as one token a byte."""
        self.deliver({stream_id: ids_of(text)}, *endings)


Scenario = Callable[[Service], Awaitable[None]]
Play = Callable[..., None]


def play_in(folder: Path, scenario: Scenario, **settings: Any) -> None:
    """`settings` are the frontend's."""

    async def main() -> None:
        service = Service(folder, **settings)
        await service.start(folder)
        try:
            await scenario(service)
        finally:
            await service.stop()

    asyncio.run(main())


def ids_of(text: str) -> list[int]:
    return SMALL.ids(*(bytes([byte]) for byte in text.encode()))


def stopping_at(*stop_texts: str) -> pb.SamplingParams:
    return pb.SamplingParams(stop=stop_texts)


async def next_response(call: GenerateCall) -> pb.GenerateResponse:
    response = await asyncio.wait_for(call.read(), SECONDS)
    assert isinstance(response, pb.GenerateResponse), "the call has not ended"
    return response


async def next_message(call: VllmCall) -> vllm.GenerateResponse:
    message = await asyncio.wait_for(call.read(), SECONDS)
    assert isinstance(message, vllm.GenerateResponse), "the call has not ended"
    return message


async def ends_well(call: GenerateCall | VllmCall) -> bool:
    return await asyncio.wait_for(call.read(), SECONDS) is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK


async def failure_of(call: GenerateCall | VllmCall) -> grpc.aio.AioRpcError:
    async def read_all() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read_all(), SECONDS)
    return caught.value
