"""The public vLLM engine protocol over real sockets, before an engine that does as the test says: requests and ends."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_service import (
    MODEL,
    VLLM_PROMPT,
    VOCAB_SIZE,
    Play,
    Service,
    ends_well,
    failure_of,
    ids_of,
    next_message,
    play_in,
)
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from blockplane.protos.delivery import Ending, FrontendBatch
from blockplane.protos.errors import AbortedError, CapacityError, DeadlineError, ModelOutputError, UnavailableError
from blockplane.protos.finish import FinishReason


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


def complete(finish_reason: str, num_tokens: int, **fields: Any) -> vllm.GenerateResponse:
    """An end behind the harness's prompt of 3 tokens."""
    usage = {"prompt_tokens": 3, "completion_tokens": num_tokens, "finish_reason": finish_reason}
    return vllm.GenerateResponse(complete=vllm.GenerateComplete(**usage, **fields))


def chunk(token_ids: list[int], **fields: Any) -> vllm.GenerateResponse:
    counts = {"prompt_tokens": 3, "completion_tokens": len(token_ids)}
    return vllm.GenerateResponse(chunk=vllm.GenerateStreamChunk(token_ids=token_ids, **counts, **fields))


def prompt_of(*token_ids: int) -> vllm.TokenizedInput:
    return vllm.TokenizedInput(input_ids=token_ids)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_stream_has_its_new_tokens_in_chunks_and_then_one_end_with_the_usage(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm()
        assert submission.request_id == "mine"
        assert submission.prompt_token_ids.tolist() == [1, 2, 3], "taken as they are"
        service.deliver_text(submission.stream_id, "ab")
        assert await next_message(call) == chunk(ids_of("ab"))
        service.deliver_text(submission.stream_id, "c", Ending(submission.stream_id, "length", 2))
        assert await next_message(call) == chunk(ids_of("c"))
        assert await next_message(call) == complete("length", 3, cached_tokens=2)
        assert await ends_well(call)

    play(scenario)


def test_a_call_that_does_not_stream_has_one_message_with_all_the_tokens(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(stream=False)
        for text in ("a", "b", "c"):
            service.deliver_text(submission.stream_id, text)
        service.deliver_text(submission.stream_id, "", Ending(submission.stream_id, "stop", 1))
        assert await next_message(call) == complete("stop", 3, output_ids=ids_of("abc"), cached_tokens=1)
        assert await ends_well(call)

    play(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_each_of_several_samples_ends_once_under_its_index(play: Play, stream: bool) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(stream=stream, n=2)
        first = submission.stream_id
        assert submission.num_samples == 2
        service.deliver_text(first + 1, "xy", Ending(first + 1, "stop"))
        if stream:
            assert await next_message(call) == chunk(ids_of("xy"), index=1)
        output_ids = {} if stream else {"output_ids": ids_of("xy")}
        assert await next_message(call) == complete("stop", 2, index=1, **output_ids)
        service.deliver_text(first, "a", Ending(first, "length"))
        if stream:
            assert await next_message(call) == chunk(ids_of("a"))
        output_ids = {} if stream else {"output_ids": ids_of("a")}
        assert await next_message(call) == complete("length", 1, **output_ids)
        assert await ends_well(call)

    play(scenario)


@pytest.mark.parametrize(("reason", "told"), [("stop", "stop"), ("length", "length"), ("cache_full", "length")])
def test_every_way_to_end_has_the_protocols_word(play: Play, reason: FinishReason, told: str) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm()
        service.deliver_text(submission.stream_id, "", Ending(submission.stream_id, reason))
        assert await next_message(call) == complete(told, 0)
        assert await ends_well(call)

    play(scenario)


def test_the_stop_id_that_ended_a_sample_is_named_and_an_end_of_text_is_not(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(stop_token_ids=ids_of("x"))
        service.deliver_text(submission.stream_id, "ax")
        await next_message(call)
        service.deliver_text(submission.stream_id, "", Ending(submission.stream_id, "stop"))
        assert await next_message(call) == complete("stop", 2, matched_token_id=ids_of("x")[0])
        call, submission = await service.submit_vllm(stop_token_ids=ids_of("x"), stream=False)
        service.deliver_text(submission.stream_id, "ae", Ending(submission.stream_id, "stop"))
        assert not (await next_message(call)).complete.HasField("matched_token_id")
        call, submission = await service.submit_vllm(stop_token_ids=ids_of("x"), stream=False)
        service.deliver_text(submission.stream_id, "ax", Ending(submission.stream_id, "length"))
        assert not (await next_message(call)).complete.HasField("matched_token_id")

    play(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_text_ends_the_sample_is_named_and_frees_the_engine(play: Play, stream: bool) -> None:
    """Case 32: it comes over three tokens; what its beginning missed before ended nothing."""

    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(stream=stream, stop=["b,c", "zz"])
        token_ids = ids_of("ab,xb,cde")
        for token_id in token_ids:
            service.deliver({submission.stream_id: [token_id]})
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(submission.stream_id,))
        service.deliver_text(submission.stream_id, "f", Ending(submission.stream_id, AbortedError("left.")))
        told = list[int]()
        while not (message := await next_message(call)).HasField("complete"):
            told += message.chunk.token_ids
        assert [*told, *message.complete.output_ids] == token_ids[:7]
        assert (message.complete.finish_reason, message.complete.matched_stop_str) == ("stop", "b,c")
        assert message.complete.completion_tokens == 7
        assert await ends_well(call)

    play(scenario)


def test_tokens_that_no_text_is_asked_of_go_through_untouched(play: Play) -> None:
    """Case 33 is the reader's: a character's tokens come as they do, whether it is finished or not."""

    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm()
        for token_id in ids_of("😀"):
            service.deliver({submission.stream_id: [token_id]})
            assert await next_message(call) == chunk([token_id])

    play(scenario)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_is_an_end_of_each_sample_with_what_it_had(play: Play, stream: bool) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(stream=stream, n=2)
        first = submission.stream_id
        service.deliver_text(first, "ab")
        if stream:
            await next_message(call)
        await service.vllm.Abort(vllm.AbortRequest(request_ids=["mine", "never heard of"]))
        assert await service.engine.next_batch() == FrontendBatch(aborted_request_ids=("mine", "never heard of"))
        aborted = AbortedError("request mine was aborted by its id.")
        service.deliver({}, Ending(first, aborted), Ending(first + 1, aborted))
        had = {} if stream else {"output_ids": ids_of("ab")}
        assert await next_message(call) == complete("abort", 2, **had)
        assert await next_message(call) == complete("abort", 0, index=1)
        assert await ends_well(call)

    play(scenario)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelOutputError("it was not finite; look."), grpc.StatusCode.INTERNAL),
        (UnavailableError("the worker is lost; retry."), grpc.StatusCode.UNAVAILABLE),
        (DeadlineError("it was late; allow more."), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_a_sample_that_fails_has_no_end_and_the_call_has_its_status(
    play: Play, error: Exception, status: grpc.StatusCode
) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(n=2)
        first = submission.stream_id
        service.deliver_text(first, "ab", Ending(first, error))
        assert await next_message(call) == chunk(ids_of("ab"))
        service.deliver_text(first + 1, "", Ending(first + 1, "stop"))
        assert await next_message(call) == complete("stop", 0, index=1)
        failure = await failure_of(call)
        assert (failure.code(), failure.details()) == (status, str(error))

    play(scenario)


def test_a_refusal_of_the_engines_comes_before_any_metadata_and_says_when_to_call_again(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm()
        asking = asyncio.ensure_future(call.initial_metadata())
        await asyncio.sleep(0.1)
        assert not asking.done(), "nothing is sent before the first token"
        service.deliver({}, Ending(submission.stream_id, CapacityError("it is full; retry.", 1.25)))
        failure = await failure_of(call)
        assert (failure.code(), failure.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")
        assert dict(failure.trailing_metadata())["grpc-retry-pushback-ms"] == "1250"
        asking.cancel()

    play(scenario)


def test_a_deadline_that_passes_aborts_the_engines_request(play: Play) -> None:
    """Case 37's other half, that the engine never prefills what is overdue, is the engine's."""

    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(timeout=0.2)
        assert submission.timeout_seconds is not None
        assert await service.engine.next_batch() == FrontendBatch(aborted_stream_ids=(submission.stream_id,))
        assert (await failure_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED

    play(scenario)


@pytest.mark.parametrize(
    ("fields", "sampling", "status", "sentence"),
    [
        ({"tokenized": None}, {}, "INVALID_ARGUMENT", "the request has no input;"),
        ({"tokenized": vllm.TokenizedInput()}, {}, "INVALID_ARGUMENT", "tokenized holds no input_ids;"),
        ({"text": ""}, {}, "INVALID_ARGUMENT", "the prompt's text holds no token;"),
        (
            {"tokenized": vllm.TokenizedInput(input_ids=[VOCAB_SIZE])},
            {},
            "INVALID_ARGUMENT",
            f"prompt holds {VOCAB_SIZE};",
        ),
        ({"tokenized": vllm.TokenizedInput(input_ids=[2**32 - 1])}, {}, "INVALID_ARGUMENT", "prompt holds 4294967295;"),
        ({}, {"stop_token_ids": [VOCAB_SIZE]}, "INVALID_ARGUMENT", f"stop_token_ids holds {VOCAB_SIZE};"),
        ({}, {"logit_bias": {-1: 1.0}}, "INVALID_ARGUMENT", "logit_bias holds -1;"),
        ({}, {"logit_bias": {VOCAB_SIZE: 1.0}}, "INVALID_ARGUMENT", f"logit_bias holds {VOCAB_SIZE};"),
        ({}, {"n": 65}, "INVALID_ARGUMENT", "n is 65;"),
        ({}, {"temperature": -1.0}, "INVALID_ARGUMENT", "temperature is -1"),
        ({}, {"top_p": 1.5}, "INVALID_ARGUMENT", "top_p is 1.5;"),
        ({}, {"max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens is 0;"),
        ({}, {"logprobs": -1}, "INVALID_ARGUMENT", "logprobs is -1;"),
        ({}, {"prompt_logprobs": 21}, "INVALID_ARGUMENT", "prompt_logprobs is 21;"),
        ({}, {"truncate_prompt_tokens": 0}, "INVALID_ARGUMENT", "truncate_prompt_tokens is 0;"),
        ({}, {"truncate_prompt_tokens": -2}, "INVALID_ARGUMENT", "truncate_prompt_tokens is -2;"),
        ({}, {"stop": [""]}, "INVALID_ARGUMENT", "stop holds an empty text;"),
        ({}, {"structural_tag": "{}"}, "UNIMPLEMENTED", "structural_tag: Blockplane does not serve"),
        ({"kv_transfer_params": vllm.KvTransferParams()}, {}, "UNIMPLEMENTED", "kv_transfer_params: "),
        ({"kv_transfer_params_json": ""}, {}, "UNIMPLEMENTED", "kv_transfer_params_json: "),
        ({"mm_inputs": vllm.MultimodalInputs()}, {}, "UNIMPLEMENTED", "mm_inputs: "),
        ({"extra_mm_inputs": [vllm.MultimodalInputs()]}, {}, "UNIMPLEMENTED", "extra_mm_inputs: "),
        ({"media_refs": vllm.MediaRefs()}, {"structural_tag": "x"}, "UNIMPLEMENTED", "media_refs, structural_tag: "),
        ({"data_parallel_rank": 1}, {}, "UNIMPLEMENTED", "data_parallel_rank is 1;"),
    ],
)
def test_what_is_senseless_or_not_served_is_refused_by_its_field_and_disturbs_nobody(
    play: Play, fields: dict[str, Any], sampling: dict[str, Any], status: str, sentence: str
) -> None:
    async def scenario(service: Service) -> None:
        mate, submission = await service.submit_vllm()
        fields_ = ({} if "text" in fields else {"tokenized": VLLM_PROMPT}) | fields
        request = vllm.GenerateRequest(stream=True, sampling_params=vllm.SamplingParams(**sampling), **fields_)
        failure = await failure_of(service.vllm.Generate(request))
        assert failure.code().name == status
        assert (failure.details() or "").startswith(sentence)
        service.deliver_text(submission.stream_id, "ok", Ending(submission.stream_id, "length"))
        assert await next_message(mate) == chunk(ids_of("ok"))
        _, following = await service.submit()
        assert following.stream_id == submission.stream_id + 1, "the engine never heard of it"

    play(scenario)


@pytest.mark.parametrize("method", ["Embed", "StartProfile", "StopProfile"])
def test_a_method_that_is_not_served_says_so(play: Play, method: str) -> None:
    requests = {"Embed": vllm.EmbedRequest, "StartProfile": common.StartProfileRequest}

    async def scenario(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(service.vllm, method)(requests.get(method, common.StopProfileRequest)())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == f"{method} is not served by Blockplane; do without it."

    play(scenario)


# -- what there is -----------------------------------------------------------------------------------------------------


def test_the_model_is_told_as_gateways_want_to_know_it(play: Play) -> None:
    async def scenario(service: Service) -> None:
        info = await service.vllm.GetModelInfo(vllm.GetModelInfoRequest())
        assert info == vllm.GetModelInfoResponse(
            model_path="small",
            served_model_name="small",
            tokenizer_path="/dev/null",
            is_generation=True,
            max_context_length=MODEL.max_model_len,
            max_req_input_len=MODEL.max_model_len - 1,
            vocab_size=VOCAB_SIZE,
            default_sampling_params_json='{"temperature": 1.0}',
        )

    play(scenario)


def test_the_server_is_told_with_the_streams_that_are_open(play: Play) -> None:
    async def scenario(service: Service) -> None:
        await service.submit_vllm(n=3)
        info = await service.vllm.GetServerInfo(vllm.GetServerInfoRequest())
        assert (info.server_type, info.active_requests, info.data_parallel_size) == ("blockplane", 3, 1)
        assert (info.block_size, info.max_num_seqs) == (32, 8)
        assert 0 < info.uptime_seconds < SECONDS

    play_settings = partial(play, block_size=32, num_seqs_buckets=(4, 8))
    play_settings(scenario)


def test_health_follows_what_can_be_served_and_is_refused_until_there_was_a_model(play: Play) -> None:
    async def scenario(service: Service) -> None:
        request, served = vllm.HealthCheckRequest(), service.calls.require_served()
        assert await service.vllm.HealthCheck(request) == vllm.HealthCheckResponse(healthy=True)
        service.calls.serve_model(None)
        unhealthy = await service.vllm.HealthCheck(request)
        assert (unhealthy.healthy, unhealthy.message.split(";")[0]) == (False, "no worker is ready")
        for method, message in (("GetModelInfo", vllm.GetModelInfoRequest()), ("HealthCheck", request)):
            service.calls.has_served = False
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(service.vllm, method)(message)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        service.calls.serve_model(served)
        assert (await service.vllm.HealthCheck(request)).healthy

    play(scenario)


def test_without_an_engine_what_only_it_knows_is_unavailable(play: Play) -> None:
    async def scenario(service: Service) -> None:
        service.engine.to_send.put_nowait(None)
        assert await service.next_model() is None
        for method, message in (
            ("GetLoads", vllm.GetLoadsRequest()),
            ("FlushCache", common.FlushCacheRequest()),
            ("SubscribeKvEvents", common.SubscribeKvEventsRequest()),
        ):
            call = getattr(service.vllm, method)(message)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if method == "SubscribeKvEvents" else call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, method
            assert (caught.value.details() or "").startswith("the frontend is not attached")

    play(scenario)
