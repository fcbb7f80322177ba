"""What one caller may have in flight at a frontend, over real sockets: refused beyond, given back at every end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client_service import PROMPT, VLLM_PROMPT, Play, Service, ends_well, failure_of, next_response, play_in
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.control_plane.frontend.quotas import RETRY_SECONDS, Quotas
from blockplane.control_plane.frontend.requests import frontend_state_of
from blockplane.protos.delivery import Delivery, Ending, Resumed
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import CapacityError, ModelOutputError
from blockplane.v1 import inference_pb2 as pb


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return lambda scenario, **settings: play_in(tmp_path, scenario, **settings)


async def submit(
    service: Service, caller: str = "alice", timeout: float | None = None, **fields: Any
) -> tuple[Any, int]:
    """A caller's request that has reached the engine, and its stream there."""
    request, metadata = pb.GenerateRequest(token_ids=PROMPT, **fields), (("blockplane-caller", caller),)
    call = service.stub.Generate(request, metadata=metadata, timeout=timeout)
    (submission,) = (await service.engine.next_batch()).submissions
    return call, submission.stream_id


async def refusal(service: Service, caller: str = "alice", **fields: Any) -> CapacityError:
    request, metadata = pb.GenerateRequest(token_ids=PROMPT, **fields), (("blockplane-caller", caller),)
    error = error_of_call(await failure_of(service.stub.Generate(request, metadata=metadata)))
    assert isinstance(error, CapacityError), error
    return error


def test_a_caller_with_all_its_requests_in_flight_is_refused_and_told_when_to_call_again(play: Play) -> None:
    async def scenario(service: Service) -> None:
        await submit(service)
        call, stream_id = await submit(service)
        error = await refusal(service)
        assert str(error) == "caller 'alice' has 2 requests in flight, which is all it may; wait for one to end."
        assert error.retry_after_seconds == RETRY_SECONDS
        await submit(service, "bob")
        service.deliver_text(stream_id, "ok", Ending(stream_id, "length"))
        assert (await next_response(call)).text == "ok"
        assert await ends_well(call)
        await submit(service)

    play(scenario, max_caller_requests=2)


def test_tokens_in_flight_are_the_prompt_and_the_most_output_of_each_sample(play: Play) -> None:
    def params(max_tokens: int) -> dict[str, Any]:
        return {"sampling_params": pb.SamplingParams(max_tokens=max_tokens)}

    async def scenario(service: Service) -> None:
        num_prompt = len(PROMPT.ids)
        never = await refusal(service, **params(51 - num_prompt), num_samples=2)
        assert (never.retry_after_seconds, str(never).split(",")[0]) == (None, "the request may come to 102 tokens")
        await submit(service, **params(20 - num_prompt), num_samples=2)
        error = await refusal(service, **params(61 - num_prompt))
        assert str(error).startswith("caller 'alice' has 40 tokens in flight and may have 100, too few for 61 more")
        assert error.retry_after_seconds == RETRY_SECONDS
        await submit(service, **params(60 - num_prompt))

    play(scenario, max_caller_tokens=100)


def test_a_request_without_a_limit_counts_as_a_full_context(play: Play) -> None:
    async def scenario(service: Service) -> None:
        await submit(service)
        model, _ = service.calls.require_served()
        assert service.calls.quotas.num_tokens["alice"] == model.max_model_len

    play(scenario)


async def finish(service: Service, call: Any, stream_id: int) -> None:
    service.deliver_text(stream_id, "ok", Ending(stream_id, "length"))
    await next_response(call)
    assert await ends_well(call)


async def fail(service: Service, call: Any, stream_id: int) -> None:
    service.deliver({}, Ending(stream_id, ModelOutputError("not finite.")))
    await failure_of(call)


async def cancel(service: Service, call: Any, stream_id: int) -> None:
    call.cancel()


async def overdue(service: Service, call: Any, stream_id: int) -> None:
    assert (await failure_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def lose_the_client(service: Service, call: Any, stream_id: int) -> None:
    await service.channel.close()


async def lose_the_engine(service: Service, call: Any, stream_id: int) -> None:
    service.engine.to_send.put_nowait(None)
    await failure_of(call)


@pytest.mark.parametrize("end", [finish, fail, cancel, overdue, lose_the_client, lose_the_engine])
def test_whatever_ends_a_request_gives_back_what_it_had(play: Play, end: Any) -> None:
    async def scenario(service: Service) -> None:
        call, stream_id = await submit(service, timeout=0.5 if end is overdue else None)
        quotas = service.calls.quotas
        assert quotas.num_requests == {"alice": 1}
        await end(service, call, stream_id)
        async with asyncio.timeout(SECONDS):
            while quotas.num_requests:
                await asyncio.sleep(0.01)
        assert not quotas.num_tokens

    play(scenario, max_caller_requests=1)


def test_a_refused_request_leaves_nothing(play: Play) -> None:
    async def scenario(service: Service) -> None:
        await refusal(service, sampling_params=pb.SamplingParams(max_tokens=100))
        assert (service.calls.quotas.num_requests, service.calls.quotas.num_tokens) == ({}, {})

    play(scenario, max_caller_tokens=10)


def test_gateways_are_held_to_it_too(play: Play) -> None:
    async def scenario(service: Service) -> None:
        await service.submit_vllm()
        second = service.vllm.Generate(vllm.GenerateRequest(tokenized=VLLM_PROMPT))
        assert (await failure_of(second)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(scenario, max_caller_requests=1)


def test_a_resumed_request_counts_though_its_caller_has_all_that_it_may(play: Play) -> None:
    request = pb.GenerateRequest(token_ids=PROMPT)
    so_far = np.array([*PROMPT.ids, 65, 66], np.int32)

    async def scenario(service: Service) -> None:
        await submit(service)
        again = service.stub.Resume(pb.ResumeRequest(request_id="r"), metadata=(("blockplane-caller", "alice"),))
        (asked,) = (await service.engine.next_batch()).resumptions
        before = Resumed(asked.stream_id, so_far, len(PROMPT.ids), 1, frontend_state_of(request))
        service.engine.to_send.put_nowait(Delivery(resumed=(before,)))
        await next_response(again)
        quotas = service.calls.quotas
        assert quotas.num_requests == {"alice": 2}
        service.deliver({}, Ending(asked.stream_id, "length"))
        await next_response(again)
        assert await ends_well(again)
        assert quotas.num_requests == {"alice": 1}

    play(scenario, max_caller_requests=1)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6), st.booleans()), max_size=30))
def test_counts_are_those_of_what_is_open_and_never_above_the_limits(steps: list[tuple[str, int, bool]]) -> None:
    quotas, open_ = Quotas(3, 10), list[tuple[str, int, Any]]()
    for caller, num_tokens, opens in steps:
        if opens or not open_:
            held = quotas.held(caller, num_tokens)
            mine = [tokens for owner, tokens, _ in open_ if owner == caller]
            if len(mine) < 3 and sum(mine) + num_tokens <= 10:
                held.__enter__()
                open_.append((caller, num_tokens, held))
            else:
                with pytest.raises(CapacityError):
                    held.__enter__()
        else:
            open_.pop(num_tokens % len(open_))[2].__exit__(None, None, None)
        for each in "ab":
            mine = [tokens for owner, tokens, _ in open_ if owner == each]
            assert (quotas.num_requests[each], quotas.num_tokens[each]) == (len(mine), sum(mine))


def test_a_request_that_is_read_anew_counts_and_is_never_refused() -> None:
    quotas = Quotas(1, 10)
    with quotas.held("a", 5), quotas.held("a", 500, is_admitted=True):
        assert (quotas.num_requests["a"], quotas.num_tokens["a"]) == (2, 505)
        with pytest.raises(CapacityError), quotas.held("a", 1):
            pass
    with quotas.held("a", 10):
        pass
