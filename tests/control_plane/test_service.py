"""The client service over real sockets, before an engine that does as the test says: what is refused, sent and told."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_service import (
    MODEL,
    PROMPT,
    SMALL,
    TEXT,
    VOCAB_SIZE,
    Play,
    Service,
    failure_of,
    ids_of,
    next_response,
    play_in,
    stopping_at,
)
from scripted_engine import SECONDS
from small_tokenizers import END

from blockplane.client.client import Client
from blockplane.protos.delivery import Ending, FrontendBatch
from blockplane.protos.errors import AbortedError, CapacityError, DeadlineError
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


# -- stop texts --------------------------------------------------------------------------------------------------------


def test_a_stop_text_ends_the_stream_and_the_engines_request(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=stopping_at("b,c"))
        service.deliver_text(submission.stream_id, "ab")
        response = await next_response(call)
        assert (list(response.token_ids), response.text) == (ids_of("ab"), "a")
        service.deliver_text(submission.stream_id, ",cde")
        assert await next_response(call) == pb.GenerateResponse(
            request_id=submission.request_id, token_ids=ids_of(",c")
        )
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(submission.stream_id,))
        service.deliver_text(submission.stream_id, "f")
        service.deliver_text(submission.stream_id, "g", Ending(submission.stream_id, AbortedError("left."), 2))
        assert await next_response(call) == pb.GenerateResponse(
            request_id=submission.request_id,
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=4, num_cached_tokens=2),
        )
        assert await asyncio.wait_for(call.read(), SECONDS) is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    play(scenario)


def test_nothing_of_a_stop_text_that_comes_letter_by_letter_is_sent(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=stopping_at("DEFGHIJ"))
        stream_id, texts = submission.stream_id, []
        for letter in "ABCDEFGHI":
            service.deliver_text(stream_id, letter)
            texts.append((await next_response(call)).text)
        assert texts == ["A", "B", "C", *[""] * 6]
        service.deliver_text(stream_id, "J")
        assert (await next_response(call)).text == ""
        service.deliver_text(stream_id, "", Ending(stream_id, AbortedError("left.")))
        last = await next_response(call)
        assert (last.text, last.finish_reason) == ("", pb.FINISH_REASON_STOP)
        assert last.usage.num_output_tokens == 10

    play(scenario)


def test_a_near_miss_is_sent_whole(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=stopping_at("DEFGHIJ"))
        service.deliver_text(submission.stream_id, "ABCDEFGHI")
        assert (await next_response(call)).text == "ABC"
        service.deliver_text(submission.stream_id, "X")
        assert (await next_response(call)).text == "DEFGHIX"

    play(scenario)


def test_text_that_is_held_when_the_request_ends_by_itself_is_sent(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=stopping_at("DEFGHIJ"))
        service.deliver_text(submission.stream_id, "ABCDEF", Ending(submission.stream_id, "length"))
        response = await next_response(call)
        assert (response.text, response.finish_reason) == ("ABCDEF", pb.FINISH_REASON_LENGTH)

    play(scenario)


def test_a_stop_text_counts_before_a_limit_that_the_same_token_reaches(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=stopping_at("c"))
        service.deliver_text(submission.stream_id, "abc", Ending(submission.stream_id, "length", 1))
        response = await next_response(call)
        assert (response.text, response.finish_reason) == ("ab", pb.FINISH_REASON_STOP)
        assert (response.usage.num_output_tokens, response.usage.num_cached_tokens) == (3, 1)
        _, following = await service.submit()
        assert following.stream_id != submission.stream_id, "and nothing was aborted in between"

    play(scenario)


# -- what the engine is asked ------------------------------------------------------------------------------------------


def test_the_calls_deadline_is_the_requests(play: Play) -> None:
    async def scenario(service: Service) -> None:
        _, submission = await service.submit(timeout=100)
        assert submission.timeout_seconds is not None
        # gRPC sends a deadline with few digits and rounds it up: one of 100 s may arrive as one of 101.
        assert 90 < submission.timeout_seconds <= 101

    play(scenario)


@pytest.mark.parametrize("timeout", [None, 50_000_000.0], ids=["none", "beyond a year"])
def test_a_call_without_a_deadline_has_none_at_the_engine(play: Play, timeout: float | None) -> None:
    async def scenario(service: Service) -> None:
        _, submission = await service.submit(timeout=timeout)
        assert submission.timeout_seconds is None

    play(scenario)


def test_an_overdue_request_ends_with_the_engines_sentence(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(timeout=100)
        service.deliver({}, Ending(submission.stream_id, DeadlineError("it was late; allow more.")))
        error = await failure_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "it was late; allow more.")

    play(scenario)


def test_a_deadline_that_passes_aborts_the_engines_request(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(timeout=0.2)
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(submission.stream_id,))
        assert (await failure_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED

    play(scenario)


@pytest.mark.parametrize("priority", [-1000, 0, 1000])
def test_priority_salt_and_opting_out_of_the_prefix_cache_reach_the_engine(play: Play, priority: int) -> None:
    async def scenario(service: Service) -> None:
        _, submission = await service.submit(
            request_id="mine", priority=priority, cache_salt="s", skip_prefix_cache=True
        )
        assert (submission.request_id, submission.priority, submission.num_samples) == ("mine", priority, 1)
        assert (submission.cache_salt, submission.skip_prefix_cache) == ("s", True)
        _, plain = await service.submit()
        assert (plain.cache_salt, plain.skip_prefix_cache, plain.priority) == ("", False, 0)

    play(scenario)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "the request has no prompt"),
        ({"text": ""}, "the prompt's text holds no token"),
        ({"token_ids": pb.TokenIds()}, "the prompt's token_ids holds no token"),
        ({"token_ids": pb.TokenIds(ids=[-1])}, "prompt holds -1;"),
        ({"token_ids": pb.TokenIds(ids=[VOCAB_SIZE])}, f"prompt holds {VOCAB_SIZE};"),
        ({"token_ids": pb.TokenIds(ids=[2**63 - 1])}, "prompt holds 9223372036854775807;"),
        *(
            ({field: value_of(token_id)}, f"{field} holds {token_id};")
            for field, value_of in (
                ("stop_token_ids", lambda token_id: [token_id]),
                ("logit_bias", lambda token_id: {5: 1, token_id: 1}),
                ("allowed_token_ids", lambda token_id: pb.TokenIds(ids=[5, token_id])),
                ("bad_word_token_ids", lambda token_id: [pb.TokenIds(ids=[5, token_id])]),
            )
            for token_id in (-1, VOCAB_SIZE, 2**63 - 1)
        ),
        ({"stop": [""]}, "stop holds an empty text;"),
        ({"stop": ["x"] * 17}, "stop holds 17 texts;"),
        ({"stop": ["x" * 257]}, "stop holds a text of 257 characters;"),
        ({"token_ids": PROMPT, "priority": 1001}, "priority is 1001;"),
        ({"token_ids": PROMPT, "priority": -(2**31)}, "priority is -2147483648;"),
        ({"token_ids": PROMPT, "num_samples": 65}, "num_samples is 65;"),
        ({"token_ids": PROMPT, "num_samples": 2**32 - 1}, "num_samples is 4294967295;"),
    ],
)
def test_a_senseless_request_is_refused_by_its_field_and_disturbs_nobody(
    play: Play, fields: dict[str, Any], sentence: str
) -> None:
    async def scenario(service: Service) -> None:
        mate, submission = await service.submit()
        if fields.keys() & pb.SamplingParams.DESCRIPTOR.fields_by_name.keys():
            request = pb.GenerateRequest(token_ids=PROMPT, sampling_params=pb.SamplingParams(**fields))
        else:
            request = pb.GenerateRequest(**fields)
        error = await failure_of(service.stub.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.details() or "").startswith(sentence)
        service.deliver_text(submission.stream_id, "ok", Ending(submission.stream_id, "length"))
        assert (await next_response(mate)).text == "ok"
        _, following = await service.submit()
        assert following.stream_id == submission.stream_id + 1, "the engine never heard of it"

    play(scenario)


def test_a_refusal_for_want_of_room_tells_when_to_call_again(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        service.deliver({}, Ending(submission.stream_id, CapacityError("it is full; retry.", 1.2501)))
        error = await failure_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1251"

    play(scenario)


def test_a_refusal_that_waiting_does_not_help_tells_no_time(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        service.deliver({}, Ending(submission.stream_id, CapacityError("it never fits; ask for less.")))
        assert "grpc-retry-pushback-ms" not in dict((await failure_of(call)).trailing_metadata())

    play(scenario)


def test_our_client_is_told_when_to_call_again(play: Play) -> None:
    async def scenario(service: Service) -> None:
        def call() -> CapacityError:
            with Client(service.client_address) as client, pytest.raises(CapacityError) as refused:
                list(client.generate([1, 2], stop="x", priority=7))
            return refused.value

        calling = asyncio.create_task(asyncio.to_thread(call))
        (submission,) = (await service.engine.next_batch()).submissions
        assert submission.priority == 7
        service.deliver({}, Ending(submission.stream_id, CapacityError("it is full; retry.", 1.5)))
        assert (await asyncio.wait_for(calling, SECONDS)).retry_after_seconds == 1.5

    play(scenario)


def test_a_grpc_channel_that_may_retry_does_so_when_it_was_told_to(play: Play) -> None:
    """The backoff of the channel's own policy would be a minute."""
    policy = {
        "maxAttempts": 2,
        "initialBackoff": "60s",
        "maxBackoff": "60s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})

    async def scenario(service: Service) -> None:
        options = [("grpc.service_config", config)]
        async with grpc.aio.insecure_channel(service.client_address, options=options) as channel:
            call = InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=PROMPT))
            (first,) = (await service.engine.next_batch()).submissions
            service.deliver({}, Ending(first.stream_id, CapacityError("it is full; retry.", 0.2)))
            refused_at = time.monotonic()
            (second,) = (await service.engine.next_batch()).submissions
            assert time.monotonic() - refused_at >= 0.19
            service.deliver_text(second.stream_id, "ok", Ending(second.stream_id, "length"))
            assert (await next_response(call)).text == "ok"

    play(scenario)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_clients_are_told_the_template_of_chats_and_how_it_spells_the_ends_of_a_text(play: Play) -> None:
    async def scenario(service: Service) -> None:
        bare = await service.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert not any(bare.HasField(name) for name in ("bos_token_id", "chat_template", "bos_token", "eos_token"))
        model = replace(MODEL, eos_token_ids=(5, SMALL.end), bos_token_id=SMALL.end, chat_template="{{ bos_token }}")
        service.calls.serve_model((model, TEXT))
        told = await service.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (told.chat_template, told.bos_token, told.eos_token) == ("{{ bos_token }}", END, TEXT.name_of(5))

    play(scenario)
