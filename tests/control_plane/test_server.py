"""The engine's gRPC edge over a real socket, with peers that break the protocol."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from engine_socket import built, hello, served_engine

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos import wire
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import load_config
from blockplane.v1 import engine_pb2 as pb


async def talk(
    method: str, *messages: object, engine: Engine | None = None
) -> tuple[list[object], grpc.aio.AioRpcError]:
    """Send messages one after another's answer; returns the answers and the error that ended the stream."""
    answers = []

    async def requests() -> AsyncIterator[object]:
        for message in messages:
            yield message
        await asyncio.Event().wait()

    async with served_engine(engine) as stub:
        try:
            async for answer in getattr(stub, method)(requests()):
                answers.append(answer)
        except grpc.aio.AioRpcError as error:
            return answers, error
    raise AssertionError("the stream ended without an error")


def run(method: str, *messages: object, engine: Engine | None = None) -> tuple[list[object], grpc.aio.AioRpcError]:
    return asyncio.run(asyncio.wait_for(talk(method, *messages, engine=engine), 20))


def test_a_worker_of_another_protocol_is_refused_and_both_versions_named() -> None:
    answers, error = run("AttachWorker", hello(version=77))
    assert answers == []
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "protocol 77" in error.details()
    assert str(wire.PROTOCOL_VERSION) in error.details()


def test_a_frontend_of_another_protocol_is_refused() -> None:
    _, error = run("AttachFrontend", pb.AttachFrontendRequest(protocol_version=77))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "frontend speaks protocol 77" in error.details()


def test_a_worker_with_too_little_memory_is_refused_with_the_numbers() -> None:
    _, error = run("AttachWorker", hello(memory=2048))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "2048" in error.details()


def test_what_the_worker_s_backend_asks_of_buckets_is_heeded() -> None:
    _, error = run("AttachWorker", hello(rules=BucketRules(prefill_multiple_of=100)))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "multiples of 100" in error.details()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 5),
        ("num_seqs_buckets", [3]),
        ("num_batched_tokens_buckets", [3]),
        ("decode_context_length_buckets", [512]),
        ("kv_segment_size", 2048),
        ("num_draft_tokens", 3),
    ],
)
def test_a_worker_that_built_something_else_is_refused_and_both_sides_named(field: str, value: object) -> None:
    ready = built()
    ready.ClearField(field)
    ready.MergeFrom(pb.WorkerReady(**{field: value}))
    answers, error = run("AttachWorker", hello(), pb.AttachWorkerRequest(ready=ready))
    assert len(answers) == 1, "the configuration"
    assert error.code() == grpc.StatusCode.INTERNAL
    told = getattr(built(), field)
    assert f"told the worker to build {field} {told}, and it built {value};" in error.details()


def test_a_worker_compiled_for_8_rows_is_refused_by_an_engine_configured_for_16() -> None:
    engine = Engine(load_config({"num_seqs_buckets": "16", "max_num_seqs": 16}, {}))
    ready = built()
    ready.ClearField("num_seqs_buckets")
    ready.num_seqs_buckets.append(8)
    _, error = run("AttachWorker", hello(), pb.AttachWorkerRequest(ready=ready), engine=engine)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "num_seqs_buckets [16], and it built [8]" in error.details()


@pytest.mark.parametrize("message", [pb.AttachWorkerRequest(), pb.AttachWorkerRequest(result=pb.StepResult(step=1))])
def test_a_message_out_of_turn_is_refused(message: pb.AttachWorkerRequest) -> None:
    _, error = run("AttachWorker", message)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "expected a hello" in error.details()


def test_a_truncated_column_ends_the_stream_with_a_typed_error() -> None:
    batch = pb.AttachFrontendRequest(protocol_version=wire.PROTOCOL_VERSION, aborted_stream_ids=b"\x01\x02\x03")
    _, error = run("AttachFrontend", batch)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "int32" in error.details()
