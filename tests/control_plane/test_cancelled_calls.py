"""Case 34: clients that leave, over real sockets from the call to the engine, whose steps are answered by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from whole_control_plane import CHUNK, ControlPlane, control_plane

Call: TypeAlias = grpc.aio.UnaryStreamCall[Any, Any]


class Client:
    """Cancels its calls of our own protocol."""

    async def call(self, planes: ControlPlane, num_prompt_tokens: int) -> Call:
        return await planes.call(num_prompt_tokens)

    async def leave(self, planes: ControlPlane, call: Call, num_left: int = 0) -> None:
        """Until the engine has heard of it."""
        call.cancel()
        await planes.until(lambda: len(planes.engine._streams) == num_left)


class VllmClient(Client):
    """The same of the public vLLM engine protocol."""

    async def call(self, planes: ControlPlane, num_prompt_tokens: int) -> Call:
        return await planes.call_vllm(num_prompt_tokens)


class Gateway(Client):
    """Aborts by id, as gateways do whose own clients have left, and reads on to the stream's end."""

    def __init__(self) -> None:
        self._ids: dict[Call, str] = {}

    async def call(self, planes: ControlPlane, num_prompt_tokens: int) -> Call:
        request_id = f"request {len(self._ids)}"
        call = await planes.call_vllm(num_prompt_tokens, request_id=request_id)
        self._ids[call] = request_id
        return call

    async def leave(self, planes: ControlPlane, call: Call, num_left: int = 0) -> None:
        await planes.vllm.Abort(vllm.AbortRequest(request_ids=[self._ids[call]]))
        await planes.until(lambda: len(planes.engine._streams) == num_left)
        last = None
        while (message := await asyncio.wait_for(call.read(), SECONDS)) is not grpc.aio.EOF:
            last = message
        assert last.complete.finish_reason == "abort"
        assert await call.code() is grpc.StatusCode.OK


async def in_the_queue(planes: ControlPlane, client: Client) -> None:
    first = await client.call(planes, 3)
    planes.answer(planes.plan())
    second = await client.call(planes, 3)
    plan = planes.plan()
    assert not plan.admissions, "there is one row"
    await client.leave(planes, second, num_left=1)
    planes.answer(plan)
    plan = planes.plan()
    await client.leave(planes, first)
    planes.answer(plan)


async def in_chunk_2_of_3(planes: ControlPlane, client: Client) -> None:
    call = await client.call(planes, 3 * CHUNK)
    planes.answer(planes.plan(), 0)
    plan = planes.plan()
    assert plan.prefill_num_tokens.tolist() == [CHUNK]
    await client.leave(planes, call)
    planes.answer(plan, 0)


async def in_decode_with_two_steps_in_flight(planes: ControlPlane, client: Client) -> None:
    call = await client.call(planes, 3)
    planes.answer(planes.plan())
    plans = [planes.plan(), planes.plan()]
    await client.leave(planes, call)
    for plan in plans:
        planes.answer(plan)


async def with_output_that_nobody_has_read(planes: ControlPlane, client: Client) -> None:
    call = await client.call(planes, 3)
    planes.answer(planes.plan())
    await asyncio.wait_for(call.read(), SECONDS)
    for _ in range(5):
        planes.answer(planes.plan())
    await client.leave(planes, call)


@pytest.mark.parametrize(
    "leave", [in_the_queue, in_chunk_2_of_3, in_decode_with_two_steps_in_flight, with_output_that_nobody_has_read]
)
@pytest.mark.parametrize("kind", [Client, VllmClient, Gateway])
def test_a_client_that_leaves_takes_its_request_along_wherever_that_stands(
    tmp_path: Path, leave: Callable[[ControlPlane, Client], Awaitable[None]], kind: type[Client]
) -> None:
    """No new plan names it, and all its blocks are back."""

    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            await leave(planes, kind())
            planes.assert_nothing_is_left()

    asyncio.run(main())


def test_an_abort_after_the_end_twice_or_of_an_unknown_id_is_fine(tmp_path: Path) -> None:
    """Case 35 of the public vLLM engine protocol, from another connection."""

    async def main() -> None:
        async with control_plane(tmp_path) as planes, grpc.aio.insecure_channel(planes.address) as channel:
            call, other = await planes.call_vllm(3, request_id="mine"), vllm_engine_pb2_grpc.VllmEngineStub(channel)
            planes.answer(planes.plan())
            await other.Abort(vllm.AbortRequest(request_ids=["mine", "mine", "never heard of"]))
            async with asyncio.timeout(SECONDS):
                *_, last = [message async for message in call]
            assert (last.complete.finish_reason, last.complete.completion_tokens) == ("abort", 1)
            await other.Abort(vllm.AbortRequest(request_ids=["mine"]))
            planes.assert_nothing_is_left()
            await planes.call_vllm(3, request_id="mine")

    asyncio.run(main())


def test_a_deadline_that_passes_in_the_queue_is_told_and_the_request_is_never_prefilled(tmp_path: Path) -> None:
    """Case 37 of the public vLLM engine protocol: there is one row, and another has it."""

    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            await planes.call_vllm(3)
            planes.answer(planes.plan())
            call = await planes.call_vllm(3, timeout=0.05)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), SECONDS)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await planes.until(lambda: len(planes.engine._streams) == 1)
            assert planes.plan().admissions == ()

    asyncio.run(main())
