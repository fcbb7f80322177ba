"""Log-probabilities on their way to the client: one for each token that it gets, and the prompt's before them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from client_service import Play, Service, ids_of, next_response, play_in

from blockplane.protos.delivery import Delivery, Ending, PromptLogprobs
from blockplane.protos.logprobs import Logprobs
from blockplane.v1 import inference_pb2 as pb


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


def logprobs_of(*tokens: list[tuple[int, float]]) -> Logprobs:
    """Each token's entries; none where nobody asked."""
    token_ids = np.array([token_id for entries in tokens for token_id, _ in entries], np.int32)
    values = np.array([value for entries in tokens for _, value in entries], np.float32)
    return Logprobs(np.array([*map(len, tokens)], np.int32), token_ids, values)


def deliver(service: Service, tokens: dict[int, str], logprobs: Logprobs | None) -> None:
    token_ids = [ids_of(text) for text in tokens.values()]
    columns = [*tokens], [*map(len, token_ids)], [token_id for ids in token_ids for token_id in ids]
    stream_ids, num_tokens, flat = (np.array(column, np.int32) for column in columns)
    service.engine.to_send.put_nowait(Delivery(stream_ids, num_tokens, flat, logprobs=logprobs))


def test_each_token_comes_with_its_own_and_the_likeliest(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(num_samples=2)
        first = submission.stream_id
        told = logprobs_of([(97, -1.5), (8, -0.5), (97, -1.5)], [(98, -0.25)], [(99, -3.0), (1, -1.0)])
        deliver(service, {first: "ab", first + 1: "c"}, told)
        assert list((await next_response(call)).logprobs) == [
            pb.TokenLogprobs(token_id=97, logprob=-1.5, top_token_ids=[8, 97], top_logprobs=[-0.5, -1.5]),
            pb.TokenLogprobs(token_id=98, logprob=-0.25),
        ]
        assert list((await next_response(call)).logprobs) == [
            pb.TokenLogprobs(token_id=99, logprob=-3.0, top_token_ids=[1], top_logprobs=[-1.0]),
        ]

    play(scenario)


def test_a_stream_that_asked_for_none_gets_none_beside_one_that_did(play: Play) -> None:
    async def scenario(service: Service) -> None:
        asking, asked = await service.submit(sampling_params=pb.SamplingParams(temperature=0))
        silent, unasked = await service.submit()
        deliver(service, {unasked.stream_id: "xy", asked.stream_id: "z"}, logprobs_of([], [], [(122, -2.0)]))
        assert list((await next_response(silent)).logprobs) == []
        assert list((await next_response(asking)).logprobs) == [pb.TokenLogprobs(token_id=122, logprob=-2.0)]

    play(scenario)


def test_of_tokens_behind_a_stop_text_nothing_is_told(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(sampling_params=pb.SamplingParams(stop=["b"]))
        told = logprobs_of([(97, -1.0), (3, -1.0)], [(98, -2.0), (3, -1.0)], [(99, -3.0), (3, -1.0)])
        deliver(service, {submission.stream_id: "abc"}, told)
        assert [token.logprob for token in (await next_response(call)).logprobs] == [-1.0, -2.0]

    play(scenario)


def test_the_prompts_come_as_they_are_told_before_any_token(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit()
        stream_id = submission.stream_id
        for token_id in (2, 3):
            told = PromptLogprobs(stream_id, logprobs_of([(token_id, -0.5), (7, -0.25)]))
            service.engine.to_send.put_nowait(Delivery(prompt_logprobs=(told,)))
            assert await next_response(call) == pb.GenerateResponse(
                request_id=submission.request_id,
                prompt_logprobs=[
                    pb.TokenLogprobs(token_id=token_id, logprob=-0.5, top_token_ids=[7], top_logprobs=[-0.25])
                ],
            )
        deliver(service, {stream_id: "a"}, None)
        response = await next_response(call)
        assert (response.text, list(response.prompt_logprobs), list(response.logprobs)) == ("a", [], [])

    play(scenario)


def test_a_whole_sample_comes_with_all_of_them(play: Play) -> None:
    async def scenario(service: Service) -> None:
        call, submission = await service.submit(whole_output=True, sampling_params=pb.SamplingParams(stop=["c"]))
        stream_id = submission.stream_id
        for token_id in (2, 3):
            told = PromptLogprobs(stream_id, logprobs_of([(token_id, -0.5)]))
            service.engine.to_send.put_nowait(Delivery(prompt_logprobs=(told,)))
        deliver(service, {stream_id: "a"}, logprobs_of([(97, -1.0), (3, -4.0)]))
        deliver(service, {stream_id: "bcd"}, logprobs_of([(98, -2.0)], [(99, -3.0)], [(100, -1.0)]))
        service.deliver({}, Ending(stream_id, "length"))
        response = await next_response(call)
        assert response.text == "ab"
        assert [token.logprob for token in response.logprobs] == [-1.0, -2.0, -3.0]
        assert list(response.logprobs[0].top_token_ids) == [3]
        assert [token.token_id for token in response.prompt_logprobs] == [2, 3]

    play(scenario)
