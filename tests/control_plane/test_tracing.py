"""A call's trace, over real sockets: with its request to the engine, and in the lines that it leaves in the log."""

from __future__ import annotations

import logging
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from client_service import PROMPT, VLLM_PROMPT, Play, Service, failure_of, play_in
from engine_driver import Worker, attached, in_loop
from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.frontend import calls
from blockplane.protos.trace_context import TraceMarks, trace_id_of
from blockplane.v1 import inference_pb2 as pb

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


@pytest.mark.parametrize("service_name", ["stub", "vllm"])
def test_a_request_takes_its_calls_trace_along_and_no_others_do(play: Play, service_name: str) -> None:
    request: Any = pb.GenerateRequest(token_ids=PROMPT)
    if service_name == "vllm":
        request = vllm.GenerateRequest(tokenized=VLLM_PROMPT)

    async def scenario(service: Service) -> None:
        generate = getattr(service, service_name).Generate
        for metadata, traceparent in [((("traceparent", TRACEPARENT),), TRACEPARENT), ((), "")]:
            call = generate(request, metadata=metadata)
            (submission,) = (await service.engine.next_batch()).submissions
            assert submission.traceparent == traceparent
            call.cancel()
            assert (await service.engine.next_batch()).aborted_stream_ids

    play(scenario)


def test_a_fault_within_a_call_is_logged_with_its_trace(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(calls.Calls, "require_served", fail)
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(TraceMarks())
    handler.setFormatter(logging.Formatter("%(message)s%(trace)s"))
    logger = logging.getLogger("blockplane.protos.faults")

    async def scenario(service: Service) -> None:
        for metadata in ((("traceparent", TRACEPARENT),), (("traceparent", "00-nonsense"),), ()):
            await failure_of(service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT), metadata=metadata))

    logger.addHandler(handler)
    try:
        play(scenario)
    finally:
        logger.removeHandler(handler)
    lines = [line for line in written.getvalue().splitlines() if line.startswith("fault")]
    assert [line.endswith(f"/Generate trace={TRACE_ID}") for line in lines] == [True, False, False]
    assert [line.endswith("/Generate") for line in lines] == [False, True, True]


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (TRACEPARENT, TRACE_ID),
        (f"01-{TRACE_ID}-00f067aa0ba902b7-01-what-else", TRACE_ID),
        (f"00-{TRACE_ID}-00f067aa0ba902b7-01-what-else", None),
        (f"ff-{TRACE_ID}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (f"00-{TRACE_ID.upper()}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE_ID}-00f067aa0ba902b7", None),
        (TRACEPARENT + "\n", None),
        ("", None),
    ],
)
def test_only_a_valid_traceparent_counts(traceparent: str, trace_id: str | None) -> None:
    assert trace_id_of(traceparent) == trace_id


def test_the_engine_logs_of_a_request_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    @in_loop
    async def crowd_out(engine: Engine) -> None:
        worker = Worker(engine, num_blocks=6)
        frontend = await attached(engine)
        for stream_id in (1, 2):
            frontend.submit(stream_id, f"r{stream_id}", length=15, max_tokens=30, traceparent=TRACEPARENT)
        for _ in range(25):
            worker.step()

    with caplog.at_level(logging.INFO):
        crowd_out()
    assert f"request r2 gives up its blocks and waits trace={TRACE_ID}" in caplog.text
