"""Prompts as long texts: read while the event loop goes on with others, as the very ids that a short way gives."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest
from client_service import TEXT, Play, Service, failure_of, play_in
from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.control_plane.frontend.calls import LONG_TEXT
from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.tracing import current_traceparent
from blockplane.v1 import inference_pb2 as pb

LONG = "".join(random.Random(0).choices("abcdefg hij\n\u00e9\U0001f9f1", k=400_000))
"""Takes a tenth of a second to read, or several."""


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


async def ticks_until(done: asyncio.Future[object]) -> int:
    """How often the event loop came round to somebody else."""
    num_ticks = 0
    while not done.done():
        await asyncio.sleep(0.001)
        num_ticks += 1
    return num_ticks


@pytest.mark.parametrize("protocol", ["ours", "theirs"])
def test_the_event_loop_goes_on_while_a_long_text_is_read(play: Play, protocol: str) -> None:
    async def scenario(service: Service) -> None:
        if protocol == "ours":
            call = asyncio.ensure_future(service.stub.Generate(pb.GenerateRequest(text=LONG)).read())
        else:
            call = asyncio.ensure_future(service.vllm.Generate(vllm.GenerateRequest(text=LONG)).read())
        understanding = asyncio.ensure_future(service.engine.next_batch())
        num_ticks = await ticks_until(understanding)
        (submission,) = understanding.result().submissions
        assert submission.prompt_token_ids.tolist() == TEXT.encode(LONG)
        assert num_ticks > 20
        call.cancel()

    play(scenario)


def test_a_short_text_is_understood_before_anybody_else_has_a_turn(play: Play) -> None:
    async def scenario(service: Service) -> None:
        called = asyncio.create_task(service.calls.understood(LONG_TEXT, lambda: "at once"))  # type: ignore[arg-type, return-value]
        await asyncio.sleep(0)
        assert called.done()
        assert await called == "at once"  # type: ignore[comparison-overlap]

    play(scenario)


def test_a_long_text_keeps_its_trace_and_what_is_wrong_with_its_request_is_told(play: Play) -> None:
    async def scenario(service: Service) -> None:
        current_traceparent.set("whose it is")
        length = LONG_TEXT + 1
        assert await service.calls.understood(length, current_traceparent.get) == "whose it is"  # type: ignore[arg-type]
        request = pb.GenerateRequest(text=LONG, sampling_params=pb.SamplingParams(bad_word_token_ids=[pb.TokenIds()]))
        assert "bad_word_token_ids" in (await failure_of(service.stub.Generate(request))).details()  # type: ignore[operator]
        assert service.link.num_streams == 0

    play(scenario)


def test_a_client_that_leaves_while_its_text_is_read_or_waits_for_that_leaves_nothing(play: Play) -> None:
    async def scenario(service: Service) -> None:
        calls = [service.stub.Generate(pb.GenerateRequest(text=LONG)) for _ in range(3)]
        reading = [asyncio.ensure_future(call.read()) for call in calls]
        async with asyncio.timeout(10):
            while service.calls._long_texts._work_queue.qsize() < 2:
                await asyncio.sleep(0.001)
        for call in calls:
            call.cancel()
        await asyncio.wait(reading)
        _, submission = await service.submit()
        assert submission.stream_id == 0, "the engine has heard of none"
        assert service.link.num_streams == 1

    play(scenario)


def test_what_is_wrong_with_the_prompt_itself_is_no_fault(play: Play) -> None:
    async def scenario(service: Service) -> None:
        def understand() -> None:
            raise InvalidRequestError("not like that.", "prompt")

        with pytest.raises(InvalidRequestError, match="not like that"):
            await service.calls.understood(LONG_TEXT + 1, understand)  # type: ignore[arg-type]

    play(scenario)
