"""Log-probabilities in the messages of the public vLLM engine protocol: parallel columns, the prompt's once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client_service import Play, Service, ends_well, failure_of, ids_of, next_message, play_in
from smg_grpc_proto import vllm_engine_pb2 as vllm
from told import columns_of

from blockplane.control_plane.frontend import vllm_responses
from blockplane.protos.delivery import Delivery, Ending, PromptLogprobs


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


def deliver(service: Service, stream_id: int, text: str, *tokens: list[tuple[int, float]], end: bool = False) -> None:
    token_ids = ids_of(text)
    columns = (np.array(column, np.int32) for column in ([stream_id], [len(token_ids)], token_ids))
    endings = (Ending(stream_id, "length"),) if end else ()
    service.engine.to_send.put_nowait(Delivery(*columns, endings, logprobs=columns_of([*tokens])))


def deliver_of_prompt(service: Service, stream_id: int, *tokens: list[tuple[int, float]]) -> None:
    told = PromptLogprobs(stream_id, columns_of([*tokens]))
    service.engine.to_send.put_nowait(Delivery(prompt_logprobs=(told,)))


def output_logprobs(*tokens: list[tuple[int, float]]) -> vllm.OutputLogProbs:
    return vllm.OutputLogProbs(
        token_ids=[entries[0][0] for entries in tokens],
        token_logprobs=[entries[0][1] for entries in tokens],
        top_logprobs=[top(entries) for entries in tokens],
    )


def top(entries: list[tuple[int, float]]) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(token_ids=[i for i, _ in entries[1:]], values=[value for _, value in entries[1:]])


A, B, C = [(97, -1.5), (8, -0.5)], [(98, -0.25), (98, -0.25)], [(99, -4.0), (1, -1.0)]
OF_PROMPT = [(2, -0.5), (7, -0.25)], [(3, -2.0), (9, -1.0)]
INPUT = vllm.InputLogProbs(
    token_ids=[1, 2, 3],
    token_logprobs=[
        vllm.InputTokenLogProb(),
        vllm.InputTokenLogProb(value=-0.5),
        vllm.InputTokenLogProb(value=-2.0),
    ],
    top_logprobs=[vllm.TopLogProbs(), *map(top, OF_PROMPT)],
)


def test_a_chunk_tells_of_its_own_tokens_and_the_first_one_of_the_prompt(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(logprobs=1, prompt_logprobs=1)
        assert (submission.params.logprobs, submission.params.prompt_logprobs) == (1, 1)
        for token in OF_PROMPT:
            deliver_of_prompt(service, submission.stream_id, token)
        deliver(service, submission.stream_id, "ab", A, B)
        deliver(service, submission.stream_id, "c", C, end=True)
        first, second, end = [await next_message(call) for _ in range(3)]
        assert (first.chunk.output_logprobs, first.chunk.input_logprobs) == (output_logprobs(A, B), INPUT)
        assert (second.chunk.output_logprobs, second.chunk.HasField("input_logprobs")) == (output_logprobs(C), False)
        assert not end.complete.HasField("output_logprobs")
        assert await ends_well(call)

    play(scenario)


def test_a_call_that_does_not_stream_tells_of_all_at_once(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(stream=False, logprobs=1, prompt_logprobs=1, stop=["bc"])
        for token in OF_PROMPT:
            deliver_of_prompt(service, submission.stream_id, token)
        deliver(service, submission.stream_id, "a", A)
        deliver(service, submission.stream_id, "bcd", B, C, A, end=True)
        complete = (await next_message(call)).complete
        assert (complete.output_logprobs, complete.input_logprobs) == (output_logprobs(A, B, C), INPUT)
        assert list(complete.output_ids) == ids_of("abc"), "what stands behind a stop text is told of nowhere"

    play(scenario)


def test_who_asks_for_none_gets_none(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm()
        assert (submission.params.logprobs, submission.params.prompt_logprobs) == (None, None)
        service.deliver_text(submission.stream_id, "ab")
        chunk = (await next_message(call)).chunk
        assert [chunk.HasField(name) for name in ("output_logprobs", "input_logprobs")] == [False, False]

    play(scenario)


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": True}], ids=["whole", "prompt"])
def test_what_gateways_cannot_take_in_one_message_is_refused_with_a_way_out(
    play: Play, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(vllm_responses, "MAX_MESSAGE_BYTES", 150)

    async def scenario(service: Service) -> None:
        call, submission = await service.submit_vllm(logprobs=1, prompt_logprobs=1, **fields)
        deliver_of_prompt(service, submission.stream_id, *OF_PROMPT * 4)
        deliver(service, submission.stream_id, "ab", A, B, end=True)
        failure = await failure_of(call)
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT, "whoever tries again computes all of it again"
        assert (failure.details() or "").endswith("ask for fewer log-probabilities or tokens, or stream the output.")

    play(scenario)


def test_no_message_is_larger_than_a_client_takes_that_leaves_grpcs_limit_alone() -> None:
    """4 MiB, the frame's few bytes included."""
    assert vllm_responses.MAX_MESSAGE_BYTES <= (4 << 20) - 64
