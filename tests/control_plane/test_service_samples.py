"""Several samples of one prompt over real sockets: each has its own text, stops and end, and the call ends with all."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import grpc
import pytest
from client_service import (
    Play,
    Service,
    ends_well,
    failure_of,
    ids_of,
    next_response,
    play_in,
    stopping_at,
)

from blockplane.protos.delivery import Ending, FrontendBatch
from blockplane.protos.errors import AbortedError, CapacityError, ModelOutputError
from blockplane.v1 import inference_pb2 as pb


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


def told(response: pb.GenerateResponse) -> tuple[int, str, int]:
    return response.sample_index, response.text, response.finish_reason


def test_samples_have_streams_in_a_row_and_their_tokens_come_as_they_do(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=3)
        first = submission.stream_id
        assert submission.num_samples == 3
        for index, text in ((1, "x"), (0, "a"), (1, "yz"), (2, "é")):
            service.deliver_text(first + index, text)
            assert told(await next_response(call)) == (index, text, 0)
        _, following = await service.submit()
        assert following.stream_id == first + 3

    play(scenario)


def test_each_sample_ends_for_itself_with_its_own_usage_and_the_call_with_the_last(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=2)
        first = submission.stream_id
        service.deliver_text(first + 1, "xyz", Ending(first + 1, "stop", 2))
        assert await next_response(call) == pb.GenerateResponse(
            request_id=submission.request_id,
            sample_index=1,
            token_ids=ids_of("xyz"),
            text="xyz",
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=3, num_cached_tokens=2),
        )
        service.deliver_text(first, "a", Ending(first, "length"))
        response = await next_response(call)
        assert told(response) == (0, "a", pb.FINISH_REASON_LENGTH)
        assert response.usage == pb.Usage(num_prompt_tokens=3, num_output_tokens=1)
        assert await ends_well(call)

    play(scenario)


def test_samples_that_are_wanted_whole_come_at_their_ends_in_one_message_each(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=2, whole_output=True)
        first = submission.stream_id
        service.deliver_text(first, "a")
        service.deliver({first: ids_of("é")[:1]})
        service.deliver({first: ids_of("é")[1:]})
        service.deliver_text(first + 1, "x", Ending(first + 1, "stop", 2))
        assert await next_response(call) == pb.GenerateResponse(
            request_id=submission.request_id,
            sample_index=1,
            token_ids=ids_of("x"),
            text="x",
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=1, num_cached_tokens=2),
        )
        service.deliver_text(first, "b", Ending(first, "length"))
        response = await next_response(call)
        assert (told(response), list(response.token_ids)) == ((0, "aéb", pb.FINISH_REASON_LENGTH), ids_of("aéb"))
        assert response.usage.num_output_tokens == 4
        assert await ends_well(call)

    play(scenario)


def test_what_a_whole_sample_had_is_told_when_another_fails(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=2, whole_output=True)
        first = submission.stream_id
        service.deliver_text(first, "a", Ending(first, ModelOutputError("it was not finite; look.")))
        service.deliver_text(first + 1, "x", Ending(first + 1, "stop"))
        responses = [await next_response(call) for _ in range(2)]
        assert {response.sample_index: response.text for response in responses} == {0: "a", 1: "x"}
        assert (await failure_of(call)).code() is grpc.StatusCode.INTERNAL

    play(scenario)


def test_a_character_that_one_sample_leaves_open_is_not_closed_by_another(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=2)
        first, (lead, tail) = submission.stream_id, ids_of("é")
        service.deliver({first: [lead], first + 1: [tail]})
        assert told(await next_response(call)) == (0, "", 0)
        assert told(await next_response(call)) == (1, "\ufffd", 0)
        service.deliver({first: [tail]})
        assert told(await next_response(call)) == (0, "é", 0)

    play(scenario)


def test_one_sample_stops_at_a_stop_text_while_the_others_go_on(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=2, sampling_params=stopping_at("END"))
        first = submission.stream_id
        service.deliver_text(first, "aE")
        assert told(await next_response(call)) == (0, "a", 0)
        service.deliver_text(first + 1, "bNDEND..")
        assert told(await next_response(call)) == (1, "bND", 0)
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(first + 1,))
        service.deliver_text(first, "ND.")
        assert told(await next_response(call)) == (0, "", 0)
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(first,))
        service.deliver({}, Ending(first + 1, AbortedError("left.")))
        last = await next_response(call)
        assert told(last) == (1, "", pb.FINISH_REASON_STOP)
        assert last.usage.num_output_tokens == 6
        service.deliver({}, Ending(first, AbortedError("left.")))
        assert told(await next_response(call)) == (0, "", pb.FINISH_REASON_STOP)
        assert await ends_well(call)

    play(scenario)


def test_a_sample_that_has_stopped_is_aborted_once_whatever_still_comes(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=stopping_at("b"))
        other, submission_of_other = await service.submit()
        service.deliver_text(submission.stream_id, "ab")
        assert told(await next_response(call)) == (0, "a", 0)
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(submission.stream_id,))
        service.deliver_text(submission.stream_id, "c")
        service.deliver_text(submission_of_other.stream_id, "x")
        assert told(await next_response(other)) == (0, "x", 0)
        await service.stub.Abort(pb.AbortRequest(request_ids=["z"]))
        assert await service.engine.next_batch() == FrontendBatch(aborted_request_ids=("z",))

    play(scenario)


def test_a_sample_that_fails_ends_the_call_once_the_others_have_ended(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=3)
        first = submission.stream_id
        service.deliver_text(first + 1, "x", Ending(first + 1, ModelOutputError("it was not finite; look.")))
        assert told(await next_response(call)) == (1, "x", 0)
        service.deliver_text(first, "ab", Ending(first, "length"))
        assert told(await next_response(call)) == (0, "ab", pb.FINISH_REASON_LENGTH)
        service.deliver({}, Ending(first + 2, CapacityError("another thing.", 7)))
        error = await failure_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "it was not finite; look."), "the first"

    play(scenario)


def test_a_refusal_of_all_samples_is_the_calls_status(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=4)
        refusal = CapacityError("it is full; retry.", 1.5)
        service.deliver({}, *(Ending(submission.stream_id + index, refusal) for index in range(4)))
        error = await failure_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1500"

    play(scenario)


def test_an_abort_ends_all_samples(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=4, request_id="mine")
        first = submission.stream_id
        service.deliver({first + index: ids_of("abc") for index in range(4)})
        assert sorted([told(await next_response(call)) for _ in range(4)]) == [(i, "abc", 0) for i in range(4)]
        await service.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        assert await service.engine.next_batch() == FrontendBatch(aborted_request_ids=("mine",))
        service.deliver({}, *(Ending(first + index, AbortedError("it was aborted.")) for index in range(4)))
        error = await failure_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.CANCELLED, "it was aborted.")

    play(scenario)


def test_a_client_that_leaves_ends_the_samples_that_still_run_and_only_them(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=3)
        first = submission.stream_id
        service.deliver_text(first + 1, "x", Ending(first + 1, "stop"))
        await next_response(call)
        call.cancel()
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(first, first + 2))

    play(scenario)
