"""Refusals at the door, alone and over real sockets: a full queue is asked about once a moment, whoever calls."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import grpc
import pytest
from client_service import PROMPT, VLLM_PROMPT, Play, Service, failure_of, play_in
from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.control_plane.frontend import door as door_module
from blockplane.control_plane.frontend.door import SHUT_SECONDS, Door
from blockplane.protos.delivery import Ending
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import BlockplaneError, CapacityError, QueueFullError
from blockplane.v1 import inference_pb2 as pb

FULL = QueueFullError("2 requests wait and 2 may; retry in 1.5 s.", 1.5)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(door_module, "SHUT_SECONDS", 60.0)
    return partial(play_in, tmp_path)


def test_a_door_that_was_shut_opens_by_itself_a_moment_after_it_was_shut_last() -> None:
    now = [0.0]
    door = Door(lambda: now[0])
    door.check()
    door.shut(QueueFullError("an older one.", 9.0))
    door.shut(FULL)
    for _ in range(3):
        now[0] += SHUT_SECONDS / 4
        with pytest.raises(QueueFullError, match="2 requests wait") as told:
            door.check()
        assert told.value.retry_after_seconds == 1.5
    now[0] += SHUT_SECONDS / 4
    door.check()


def test_it_is_shut_for_less_than_a_client_is_told_to_wait() -> None:
    assert SHUT_SECONDS < 0.1


async def refuse(service: Service, error: BlockplaneError) -> None:
    """Have the engine refuse a call."""
    call, submission = await service.submit()
    service.deliver({}, Ending(submission.stream_id, error))
    await failure_of(call)


def test_once_the_queue_is_full_calls_of_either_protocol_are_told_what_the_engine_said_and_it_hears_of_none(
    play: Play,
) -> None:
    async def scenario(service: Service) -> None:
        await refuse(service, FULL)
        # Not even what nobody could serve is read.
        ours = service.stub.Generate(pb.GenerateRequest(text="x" * 100_000, priority=9999))
        theirs = service.vllm.Generate(vllm.GenerateRequest(tokenized=VLLM_PROMPT))
        for call in (ours, theirs):
            error = error_of_call(await failure_of(call))
            assert (type(error), str(error)) == (QueueFullError, str(FULL))
            assert isinstance(error, QueueFullError)
            assert error.retry_after_seconds == 1.5
        assert service.engine.batches.empty()
        assert (await service.stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size, "other calls need no room"

    play(scenario)


@pytest.mark.parametrize("error", [CapacityError("too long; shorten it."), CapacityError("a bit full; retry.", 2.0)])
def test_what_does_not_fit_itself_keeps_nobody_else_out(play: Play, error: BlockplaneError) -> None:
    async def scenario(service: Service) -> None:
        await refuse(service, error)
        await service.submit()

    play(scenario)


def test_refusals_at_the_door_do_not_keep_it_shut(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "SHUT_SECONDS", 0.3)

    async def scenario(service: Service) -> None:
        await refuse(service, FULL)
        async with asyncio.timeout(10):
            while service.engine.batches.empty():
                call = service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT))
                asking = asyncio.ensure_future(call.read())
                await asyncio.wait([asking], timeout=0.05)
                if asking.done() and asking.exception() is not None:
                    assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(scenario)
