"""A frontend that is told to stop, over real sockets: open streams end, or are ended, and no new ones begin."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import grpc
import pytest
from client_service import PROMPT, Play, Service, failure_of, ids_of, next_response, play_in
from scripted_engine import SECONDS

from blockplane.protos.delivery import Ending
from blockplane.v1 import inference_pb2 as pb


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


def test_new_calls_are_refused_with_a_time_to_call_again_and_open_ones_end_by_themselves(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        draining = asyncio.create_task(service.calls.drain())
        await asyncio.sleep(0)
        error = await failure_of(service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (error.details() or "").startswith("this frontend is stopping;")
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        assert not draining.done()
        service.deliver_text(submission.stream_id, "ok", Ending(submission.stream_id, "length"))
        response = await next_response(call)
        assert (list(response.token_ids), response.finish_reason) == (ids_of("ok"), pb.FINISH_REASON_LENGTH)
        await asyncio.wait_for(draining, SECONDS)
        assert await call.code() is grpc.StatusCode.OK

    play(scenario)


@pytest.mark.parametrize("cut_short", [False, True], ids=["after its time", "by a second signal"])
def test_what_does_not_end_is_ended_unavailable_here_and_left_to_the_engine(play: Play, cut_short: bool) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        service.deliver_text(submission.stream_id, "ok")
        assert (await next_response(call)).text == "ok"
        draining = asyncio.create_task(service.calls.drain())
        await asyncio.sleep(0)
        if cut_short:
            draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (error.details() or "").startswith("the frontend stopped before the request's end;")
        await asyncio.sleep(0.05)
        assert service.engine.batches.empty(), "a journaled request may go on without us"

    play(scenario, drain_seconds=30 if cut_short else 0)


def test_an_idle_frontend_has_nothing_to_wait_for(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        service.deliver({}, Ending(submission.stream_id, "length"))
        await next_response(call)
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(service.calls.drain(), 1)

    play(scenario)
