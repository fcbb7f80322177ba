"""What a frontend counts of its requests and calls: by a stopwatch, and over real sockets before a scripted engine."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from functools import partial
from pathlib import Path

import grpc
import pytest
from client_service import PROMPT, Play, Service, ends_well, failure_of, next_response, play_in, stopping_at

from blockplane.control_plane.frontend.delta import Usage
from blockplane.control_plane.frontend.metrics import frontend_metrics
from blockplane.control_plane.frontend.request_counts import RequestCounts, Stopwatch
from blockplane.control_plane.on_loop import on_loop
from blockplane.protos.config import Config
from blockplane.protos.delivery import Ending
from blockplane.protos.errors import AbortedError, UnavailableError
from blockplane.protos.metric_families import MetricFamilies
from blockplane.protos.metrics_port import MetricsPort
from blockplane.v1 import inference_pb2 as pb

USAGE = Usage(num_prompt_tokens=7, num_output_tokens=4, num_cached_tokens=0)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    # No port is opened: only that one could be makes requests be counted.
    return partial(play_in, tmp_path, metrics_address="127.0.0.1:0")


def counts_of(service: Service) -> RequestCounts:
    (counts,) = service.calls.request_counts.values()
    return counts


def ended(service: Service) -> dict[str, int]:
    return {reason: number for reason, number in counts_of(service).num_ended.items() if number}


def errors(service: Service) -> dict[str, int]:
    return {status: number for status, number in service.calls.counts.num_errors.items() if number}


async def until_no_call_is_open(service: Service) -> None:
    async with asyncio.timeout(10):
        while service.calls.counts.num_open:
            await asyncio.sleep(0.01)


# -- one sample --------------------------------------------------------------------------------------------------------


def test_times_are_from_the_calls_beginning_and_each_message_counts_once() -> None:
    counts = RequestCounts(max_model_len=100)
    stopwatch = Stopwatch(counts, began_at=10.0)
    for now in (10.5, 11.5, 11.75):
        stopwatch.took(now)
    stopwatch.ended("length", USAGE)
    stopwatch.left()
    assert (counts.first_token.sum, sum(counts.first_token.counts)) == (0.5, 1)
    assert (counts.between_tokens.sum, sum(counts.between_tokens.counts)) == (1.25, 2)
    assert (counts.whole.sum, counts.decode.sum) == (1.75, 1.25)
    assert (counts.num_prompt_tokens.sum, counts.num_output_tokens.sum) == (7, 4)
    assert counts.num_ended == {"stop": 0, "length": 1, "cache_full": 0, "abort": 0, "error": 0}


def test_lengths_are_counted_by_vllms_bounds_up_to_the_models_own() -> None:
    assert RequestCounts(256).num_prompt_tokens.bounds == (1, 2, 5, 10, 20, 50, 100, 200)


def test_what_does_not_end_well_counts_by_its_reason_alone() -> None:
    counts = RequestCounts(100)
    Stopwatch(counts, 0.0).ended(AbortedError("over."), USAGE)
    Stopwatch(counts, 0.0).ended(UnavailableError("gone."), USAGE)
    Stopwatch(counts, 0.0).left()
    assert counts.num_ended == {"stop": 0, "length": 0, "cache_full": 0, "abort": 2, "error": 1}
    assert sum(counts.whole.counts) == sum(counts.num_prompt_tokens.counts) == 0


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_stream_is_counted_with_the_reason_that_its_client_is_told(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=stopping_at("stop"))
        service.deliver_text(submission.stream_id, "on")
        await next_response(call)
        service.deliver_text(submission.stream_id, "stop")
        assert (await service.engine.next_batch()).aborted_stream_ids == (submission.stream_id,)
        service.deliver({}, Ending(submission.stream_id, AbortedError("its frontend asked for it.")))
        while not (await next_response(call)).finish_reason:
            pass
        assert await ends_well(call)
        counts = counts_of(service)
        assert ended(service) == {"stop": 1}
        assert (sum(counts.first_token.counts), sum(counts.between_tokens.counts)) == (1, 1)
        assert (counts.num_prompt_tokens.sum, counts.num_output_tokens.sum) == (3, 6)
        assert errors(service) == {}

    play(scenario)


def test_whoever_leaves_and_whoever_is_refused_counts_by_status(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        assert service.calls.counts.num_open == 1
        call.cancel()
        assert (await service.engine.next_batch()).aborted_stream_ids == (submission.stream_id,)
        await until_no_call_is_open(service)
        assert (ended(service), errors(service)) == ({"abort": 1}, {"CANCELLED": 1})
        error = await failure_of(service.stub.Generate(pb.GenerateRequest()))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        refused, submission = await service.submit()
        service.deliver({}, Ending(submission.stream_id, UnavailableError("gone.")))
        assert (await failure_of(refused)).code() is grpc.StatusCode.UNAVAILABLE
        assert errors(service) == {"CANCELLED": 1, "INVALID_ARGUMENT": 1, "UNAVAILABLE": 1}
        assert ended(service) == {"abort": 1, "error": 1}

    play(scenario)


def test_what_is_more_than_a_caller_may_have_counts_as_a_quotas_refusal(play: Play) -> None:
    async def scenario(service: Service) -> None:
        await service.submit()
        error = await failure_of(service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (service.calls.quotas.num_refused, errors(service)) == (1, {"RESOURCE_EXHAUSTED": 1})

    play(scenario, max_caller_requests=1)


def test_where_nobody_can_ask_for_the_counts_of_requests_there_are_none(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        service.deliver_text(submission.stream_id, "x", Ending(submission.stream_id, "length"))
        await next_response(call)
        assert await ends_well(call)
        assert service.calls.request_counts == {}

    play_in(tmp_path, scenario)


# -- a stream beside its metrics ---------------------------------------------------------------------------------------


def test_a_stream_is_undisturbed_by_metrics_that_fail_and_by_those_that_take_their_time(play: Play) -> None:
    def broken() -> MetricFamilies:
        raise RuntimeError("broken")

    def slow() -> MetricFamilies:
        time.sleep(3)
        return MetricFamilies()

    async def scenario(service: Service) -> None:
        port = MetricsPort(Config(metrics_address="127.0.0.1:0"), "frontend")
        for tell in (on_loop(broken), on_loop(partial(frontend_metrics, service.calls)), slow):
            port.add(tell)
        try:
            call, submission = await service.submit()
            scrape = asyncio.create_task(asyncio.to_thread(urllib.request.urlopen, port.url, timeout=30))
            began = time.monotonic()
            for _ in range(50):
                service.deliver_text(submission.stream_id, "x")
                assert (await next_response(call)).text == "x"
            assert time.monotonic() - began < 3 or scrape.done(), "the stream waited for the scrape"
            service.deliver_text(submission.stream_id, "y", Ending(submission.stream_id, "length"))
            assert (await next_response(call)).text == "y"
            assert await ends_well(call)
            told = (await scrape).read().decode()
            assert "blockplane:scrape_errors_total 1.0" in told
            assert "blockplane:num_open_calls 1.0" in told
        finally:
            port.close()

    play(scenario)
