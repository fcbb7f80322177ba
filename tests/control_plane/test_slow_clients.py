"""Clients that read slowly or never, over real sockets: they cost a bounded buffer, then their row, then their call."""

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
from blockplane.v1.inference_pb2_grpc import InferenceStub

LIMIT = 200
PIECE = 50
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path, stream_buffer_tokens=LIMIT)


def num_held(service: Service) -> list[int]:
    return [stream.num_held for stream in service.link._streams.values()]


async def fill(service: Service, stream_id: int, most: int) -> int:
    """Deliver pieces until the stream is parked. Returns how many tokens those were."""
    asking = asyncio.create_task(service.engine.next_batch())
    num_tokens = 0
    while not asking.done():
        assert num_tokens < most, "the stream was not parked"
        service.deliver_text(stream_id, "x" * PIECE)
        num_tokens += PIECE
        # As a step would take, so that what the client takes is not what it had no time for.
        await asyncio.sleep(0.002)
    assert (await asking).parked_stream_ids == (stream_id,)
    return num_tokens


def test_a_client_that_never_reads_holds_a_bounded_buffer_while_others_get_all_then_its_call_ends(play: Play) -> None:
    async def scenario(service: Service) -> None:
        async with grpc.aio.insecure_channel(service.client_address, options=SMALL_WINDOW) as channel:
            absent = InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=PROMPT))
            (submission,) = (await service.engine.next_batch()).submissions
            mate, of_mate = await service.submit()
            await fill(service, submission.stream_id, most=200_000)
            assert max(num_held(service)) <= LIMIT + 3 * PIECE
            for _ in range(20):
                service.deliver_text(of_mate.stream_id, "y")
                assert (await next_response(mate)).text == "y"
            assert max(num_held(service)) <= LIMIT + 3 * PIECE
            batch = await service.engine.next_batch()
            assert batch.aborted_stream_ids == (submission.stream_id,), "given up after parked_seconds"
            assert num_held(service) == [0], "nothing is kept for it"
            service.deliver_text(of_mate.stream_id, "z", Ending(of_mate.stream_id, "length"))
            assert (await next_response(mate)).text == "z"
            error = await failure_of(absent)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (error.details() or "").startswith(
                "nothing of the stream was read for 1 s while more than 200 tokens"
            )

    play(scenario, parked_seconds=1)


def test_a_slow_client_gets_every_token_and_its_request_goes_on_when_it_has_read(play: Play) -> None:
    async def scenario(service: Service) -> None:
        async with grpc.aio.insecure_channel(service.client_address, options=SMALL_WINDOW) as channel:
            slow = InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=PROMPT))
            (submission,) = (await service.engine.next_batch()).submissions
            num_sent = await fill(service, submission.stream_id, most=200_000)
            asking = asyncio.create_task(service.engine.next_batch())
            await asyncio.sleep(0.05)
            assert not asking.done()
            num_read, most = 0, 0
            while num_read < num_sent:
                response = await next_response(slow)
                num_read += len(response.token_ids)
                most = max(most, len(response.token_ids))
            assert most <= LIMIT // 4 + PIECE, "one message never holds a whole buffer"
            batch = await asyncio.wait_for(asking, SECONDS)
            assert batch.unparked_stream_ids == (submission.stream_id,)
            service.deliver_text(submission.stream_id, "z", Ending(submission.stream_id, "length"))
            assert (await next_response(slow)).token_ids == ids_of("z")
            assert await slow.read() is grpc.aio.EOF

    play(scenario)
