"""What programs read of a failed call, over real sockets, by the public library that other clients read it with."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_service import PROMPT, VOCAB_SIZE, Play, Service, ends_well, failure_of, next_message, play_in
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.protos import errors
from blockplane.protos.delivery import Ending
from blockplane.protos.error_details import DOMAIN, error_of_call
from blockplane.protos.errors import (
    AbortedError,
    BlockplaneError,
    CapacityError,
    DuplicateError,
    InvalidRequestError,
    ModelOutputError,
    UnavailableError,
    WorkerKilledError,
)
from blockplane.v1 import inference_pb2 as pb


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


def details_of(failure: grpc.aio.AioRpcError) -> dict[str, Any]:
    """By name, the messages that came along; their status and sentence are the call's."""
    status = rpc_status.from_call(failure)
    assert status is not None
    assert (status.code, status.message) == (failure.code().value[0], failure.details())
    found = {}
    for detail in status.details:
        name = detail.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert detail.Unpack(found[name])
    return found


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling_params": {"top_p": 2.0}}, "sampling_params.top_p"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop_token_ids": [VOCAB_SIZE]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"logit_bias": {5: 1000.0}}}, "sampling_params.logit_bias"),
        (
            {"sampling_params": {"bad_word_token_ids": [pb.TokenIds(ids=[VOCAB_SIZE])]}},
            "sampling_params.bad_word_token_ids",
        ),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"sampling_params": {"choice": pb.Choice()}}, "sampling_params.choice"),
        ({"num_samples": 65}, "num_samples"),
        ({"priority": 1001}, "priority"),
        ({"token_ids": pb.TokenIds()}, "token_ids"),
        ({"token_ids": pb.TokenIds(ids=[VOCAB_SIZE])}, "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_names_the_path_of_its_field(play: Play, fields: dict[str, Any], field: str) -> None:
    async def scenario(service: Service) -> None:
        failure = await failure_of(service.stub.Generate(pb.GenerateRequest(**{"token_ids": PROMPT, **fields})))
        details = details_of(failure)
        assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == ("INVALID_REQUEST", DOMAIN)
        (violation,) = details["BadRequest"].field_violations
        assert (violation.field, violation.description) == (field, failure.details())
        error = error_of_call(failure)
        assert isinstance(error, InvalidRequestError)
        assert error.field == field

    play(scenario)


def test_a_gateway_is_told_the_same(play: Play) -> None:
    async def scenario(service: Service) -> None:
        params = vllm.SamplingParams(n=65)
        request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1]), sampling_params=params)
        (violation,) = details_of(await failure_of(service.vllm.Generate(request)))["BadRequest"].field_violations
        assert violation.field == "sampling_params.n"

    play(scenario)


@pytest.mark.parametrize(
    ("error", "reason", "seconds"),
    [
        (CapacityError("it is full; retry.", 1.25), "CAPACITY", 1.25),
        (CapacityError("it never fits; ask for less."), "CAPACITY", None),
        (UnavailableError("it is away; retry.", 0.5), "UNAVAILABLE", 0.5),
        (WorkerKilledError("it ends workers; change it."), "WORKER_KILLED", None),
        (ModelOutputError("not finite; try another prompt."), "MODEL_OUTPUT", None),
        (InvalidRequestError("too long; shorten it.", "prompt"), "INVALID_REQUEST", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_engine_says_of_a_request_reaches_its_client_whole(
    play: Play, error: BlockplaneError, reason: str, seconds: float | None
) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        service.deliver({}, Ending(submission.stream_id, error))
        failure = await failure_of(call)
        details = details_of(failure)
        assert details["ErrorInfo"].reason == reason
        assert ("RetryInfo" in details) == (seconds is not None)
        if seconds is not None:
            assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1000 * seconds
        rebuilt = error_of_call(failure)
        assert type(rebuilt) is type(error), "though others have its status, too"
        assert getattr(rebuilt, "retry_after_seconds", None) == seconds

    play(scenario)


ERRORS = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, BlockplaneError)]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("protocol", ["ours", "theirs"])
def test_every_error_that_there_is_ends_a_call_of_either_protocol_with_its_one_status(
    play: Play, error: type[BlockplaneError], protocol: str
) -> None:
    """Case 39. To gateways an abort is an end as good as any other."""
    sentence = "that is how it is; do this."

    async def scenario(service: Service) -> None:
        call, submission = await (service.submit() if protocol == "ours" else service.submit_vllm())
        service.deliver({}, Ending(submission.stream_id, error(sentence)))
        if protocol == "theirs" and error is AbortedError:
            assert (await next_message(call)).complete.finish_reason == "abort"
            assert await ends_well(call)
            return
        failure = await failure_of(call)
        assert (failure.code(), failure.details()) == (error.status, sentence)
        assert details_of(failure)["ErrorInfo"].reason == error.reason
        assert type(error_of_call(failure)) is error

    play(scenario)


def test_a_refusal_without_a_stream_is_as_rich(play: Play) -> None:
    async def scenario(service: Service) -> None:
        service.calls.serve_model(None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert details_of(caught.value)["ErrorInfo"].reason == "UNAVAILABLE"

    play(scenario)


def test_a_sentence_of_any_length_arrives(play: Play) -> None:
    """With all of it three times over, the call would end RESOURCE_EXHAUSTED for its metadata."""
    sentence = f"request id {'x' * 6000} is live; choose another."

    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        service.deliver({}, Ending(submission.stream_id, DuplicateError(sentence)))
        failure = await failure_of(call)
        assert (failure.code(), failure.details()) == (grpc.StatusCode.ALREADY_EXISTS, sentence)

    play(scenario)


SPOILT = Status(
    details=[AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")]
).SerializeToString()


class Failure(grpc.RpcError):
    """A failed call of a server that is not ours, or not well."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "it is full."

    def trailing_metadata(self) -> Any:
        return self._metadata


@pytest.mark.parametrize(
    ("metadata", "seconds"),
    [
        ((), None),
        ((("grpc-status-details-bin", b"\xff\xff"), ("grpc-retry-pushback-ms", "1500")), 1.5),
        ((("grpc-status-details-bin", "text"),), None),
        ((("grpc-status-details-bin", SPOILT),), None),
        ((("grpc-retry-pushback-ms", "-1"),), None),
    ],
    ids=["nothing", "bytes that are no message", "a text", "a spoilt detail", "never"],
)
def test_a_server_that_tells_less_is_understood_as_far_as_it_goes(metadata: Any, seconds: float | None) -> None:
    error = error_of_call(Failure(*metadata))
    assert (type(error), str(error)) == (CapacityError, "it is full.")
    assert isinstance(error, CapacityError)
    assert error.retry_after_seconds == seconds


def test_a_reason_of_another_domain_is_not_taken_for_ours() -> None:
    status = Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="WORKER_KILLED", domain="elsewhere"))

    class Internal(Failure):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.INTERNAL

    assert type(error_of_call(Internal(("grpc-status-details-bin", status.SerializeToString())))) is BlockplaneError
