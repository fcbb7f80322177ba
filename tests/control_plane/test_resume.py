"""A client that comes back for the rest: each token and each character once, whatever stood open where it left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client_service import PROMPT, SMALL, TEXT, Scenario, Service, failure_of, ids_of, next_response, play_in
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import SECONDS

from blockplane.control_plane.frontend.delta import Delta
from blockplane.control_plane.frontend.output import Output, TextParams
from blockplane.control_plane.frontend.requests import frontend_state_of
from blockplane.control_plane.frontend.resume import resumed_samples
from blockplane.control_plane.frontend.token_stream import Reader, TokenStream
from blockplane.protos.delivery import Delivery, Ending, Resumed, Resumption
from blockplane.protos.errors import AbortedError, DataLossError, NotFoundError
from blockplane.protos.finish import FinishReason
from blockplane.v1 import inference_pb2 as pb

PROMPT_IDS = list(PROMPT.ids)
ResumeCall = grpc.aio.UnaryStreamCall[pb.ResumeRequest, pb.GenerateResponse]


def resumed(
    stream_id: int, output_ids: Sequence[int], *stop_texts: str, num_samples: int = 1, whole: bool = False, **told: bool
) -> Resumed:
    """`told`: how its text is."""
    params = pb.SamplingParams(stop=stop_texts, **told)
    request = pb.GenerateRequest(token_ids=PROMPT, sampling_params=params, whole_output=whole)
    token_ids = np.array([*PROMPT_IDS, *output_ids], np.int32)
    return Resumed(stream_id, token_ids, len(PROMPT_IDS), num_samples, frontend_state_of(request))


# -- text --------------------------------------------------------------------------------------------------------------


def told(output_ids: list[int], stop_texts: Sequence[str], **how: bool) -> tuple[list[int], list[str]]:
    """What an undisturbed client gets: the ids, and the text with each of them; then what comes with the end."""
    output = Output(TEXT, PROMPT_IDS, TextParams(tuple(stop_texts), **how))
    ids, texts = list[int](), list[str]()
    for token_id in output_ids:
        new, text = output.push([token_id])
        if new:
            ids += new
            texts.append(text)
    return ids, [*texts, output.finish()]


def rest_of(
    output_ids: list[int], stop_texts: Sequence[str], num_had: int, num_known: int, **how: bool
) -> tuple[list[int], str]:
    """What a client gets that has so many tokens, where the engine knew of so many when it came back."""
    stream = TokenStream(0, Reader(1), limit=1000)
    stream.put_resumed(resumed(0, output_ids[:num_known], *stop_texts, **how))
    (sample,), past = resumed_samples([stream], [num_had], TEXT, lambda stream: None)
    deltas = [delta for _, delta in past]
    for token_id in output_ids[num_known:]:
        stream.put([token_id])
        deltas.append(sample.advance() or Delta([], ""))
    stream.end("length")
    deltas.append(sample.advance() or Delta([], ""))
    assert sample.has_ended
    return [token_id for delta in deltas for token_id in delta.token_ids], "".join(delta.text for delta in deltas)


@given(
    text=st.text("ab€😀|", max_size=6),
    stop_texts=st.lists(st.text("ab€<", min_size=1, max_size=3), max_size=2),
    how=st.fixed_dictionaries({"include_stop_str_in_output": st.booleans(), "skip_special_tokens": st.booleans()}),
    cut=st.integers(0, 30),
    data=st.data(),
)
def test_what_came_and_the_rest_are_the_whole(
    text: str, stop_texts: list[str], how: dict[str, bool], cut: int, data: st.DataObject
) -> None:
    """Wherever the stream broke: inside a character, inside a stop text, behind the end; and however text is told."""
    # One token a byte, so that tokens end inside characters; the cut may leave the last of them open for ever.
    bar, output_ids = ids_of("|"), ids_of(text)
    output_ids = [SMALL.end if [token_id] == bar else token_id for token_id in output_ids]
    output_ids = output_ids[: max(0, len(output_ids) - cut % 3)]
    ids, texts = told(output_ids, stop_texts, **how)
    num_had = data.draw(st.integers(0, len(ids)), "had")
    num_known = data.draw(st.integers(num_had, len(output_ids)), "known")
    rest_ids, rest_text = rest_of(output_ids, stop_texts, num_had, num_known, **how)
    assert ids[:num_had] + rest_ids == ids
    assert "".join(texts[:num_had]) + rest_text == "".join(texts)


def test_the_end_of_a_stop_text_that_the_engine_never_heard_of_is_told_to_it() -> None:
    stream, stopped = TokenStream(5, Reader(1), limit=1000), list[TokenStream]()
    stream.put_resumed(resumed(5, ids_of("ab!!"), "!"))
    (sample,), past = resumed_samples([stream], [1], TEXT, stopped.append)
    assert [(delta.text, len(delta.token_ids)) for _, delta in past] == [("b", 2)]
    assert stopped == [stream]
    stream.end(AbortedError("its frontend asked for the stream's end."))
    last = sample.advance()
    assert last is not None
    assert last.usage is not None
    assert (last.outcome, last.usage.num_output_tokens, sample.failure) == ("stop", 3, None)


@pytest.mark.parametrize(("stop_texts", "num_known"), [((), 3), (("b",), 2)])
def test_more_than_there_is_is_data_loss(stop_texts: tuple[str, ...], num_known: int) -> None:
    """What follows a stop text is not there either."""
    stream = TokenStream(0, Reader(1), limit=1000)
    stream.put_resumed(resumed(0, ids_of("abc"), *stop_texts))
    with pytest.raises(DataLossError, match=f"4 tokens of sample 0 .* {num_known} are known; send"):
        resumed_samples([stream], [4], TEXT, lambda stream: None)


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def play(tmp_path: Path) -> Any:
    def play(scenario: Scenario) -> None:
        play_in(tmp_path, scenario)

    return play


async def ask(
    service: Service, *from_tokens: int, caller: str | None = None, timeout: float = SECONDS
) -> tuple[ResumeCall, Resumption]:
    """A call that has reached the engine, and as what."""
    metadata = () if caller is None else (("blockplane-caller", caller),)
    request = pb.ResumeRequest(request_id="mine", from_tokens=from_tokens)
    call = service.stub.Resume(request, metadata=metadata, timeout=timeout)
    (resumption,) = (await service.engine.next_batch()).resumptions
    return call, resumption


def send(
    service: Service, *news: Resumed, endings: Sequence[Ending] = (), tokens: dict[int, int] | None = None
) -> None:
    ids, token_ids = [*(tokens or {})], [*(tokens or {}).values()]
    columns = np.array(ids, np.int32), None, np.array(token_ids, np.int32)
    service.engine.to_send.put_nowait(Delivery(*columns, tuple(endings), resumed=news))


def test_a_resumed_stream_is_what_its_client_lacks_and_then_what_comes(play: Any) -> None:
    async def scenario(service: Service) -> None:
        call, resumption = await ask(service, 2, caller="ada")
        stream_id = resumption.stream_id
        assert resumption == Resumption(stream_id, "mine", "ada")
        new = ids_of("d")
        # What comes in one delivery with the past follows it.
        send(service, resumed(stream_id, ids_of("abc")), tokens={stream_id: new[0]})
        first, second = await next_response(call), await next_response(call)
        assert (first.request_id, first.text, list(first.token_ids)) == ("mine", "c", ids_of("c"))
        assert (second.text, list(second.token_ids)) == ("d", new)
        service.deliver({stream_id: ids_of("e")}, Ending(stream_id, "length", 2))
        last = await next_response(call)
        assert (last.text, last.finish_reason) == ("e", pb.FINISH_REASON_LENGTH)
        assert last.usage == pb.Usage(num_prompt_tokens=3, num_output_tokens=5, num_cached_tokens=2)
        assert await call.code() == grpc.StatusCode.OK

    play(scenario)


def test_a_request_that_wants_all_at_once_gets_all_at_once_when_it_is_resumed(play: Any) -> None:
    async def scenario(service: Service) -> None:
        call, resumption = await ask(service)
        stream_id = resumption.stream_id
        send(service, resumed(stream_id, ids_of("abc"), whole=True))
        service.deliver_text(stream_id, "d")
        service.deliver_text(stream_id, "e", Ending(stream_id, "length", 2))
        only = await next_response(call)
        assert (only.text, list(only.token_ids)) == ("abcde", ids_of("abcde"))
        assert only.usage.num_output_tokens == 5
        assert await asyncio.wait_for(call.read(), SECONDS) is grpc.aio.EOF

    play(scenario)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_request_that_has_ended_gives_its_rest_and_its_end(play: Any, reason: FinishReason) -> None:
    async def scenario(service: Service) -> None:
        call, resumption = await ask(service, 3)
        stream_id = resumption.stream_id
        send(service, resumed(stream_id, ids_of("abc")), endings=[Ending(stream_id, reason, 1)])
        last = await next_response(call)
        assert (list(last.token_ids), last.text, last.usage.num_output_tokens) == ([], "", 3)
        assert pb.FinishReason.Name(last.finish_reason) == f"FINISH_REASON_{reason.upper()}"
        assert await call.code() == grpc.StatusCode.OK
        send(service)
        assert service.engine.batches.empty(), "there is nothing to abort"

    play(scenario)


def test_each_sample_goes_on_where_its_client_has_it(play: Any) -> None:
    async def scenario(service: Service) -> None:
        call, resumption = await ask(service, 1)
        streams = [resumption.stream_id, resumption.stream_id + 1]
        send(service, *(resumed(stream, ids_of("ab"), num_samples=2) for stream in streams))
        texts = {}
        for _ in streams:
            response = await next_response(call)
            texts[response.sample_index] = response.text
        assert texts == {0: "b", 1: "ab"}
        failure = Ending(streams[1], AbortedError("somebody ended it."))
        service.deliver({streams[1]: ids_of("c")}, Ending(streams[0], "length"), failure)
        responses = [await next_response(call), await next_response(call)]
        assert [(response.sample_index, response.text) for response in responses] == [(0, ""), (1, "c")]
        error = await failure_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.CANCELLED, "somebody ended it.")

    play(scenario)


def test_what_nobody_may_resume_is_said_as_the_engine_says_it(play: Any) -> None:
    async def scenario(service: Service) -> None:
        call, resumption = await ask(service)
        assert resumption.caller == ""
        send(service, endings=[Ending(resumption.stream_id, NotFoundError("there is no such request."))])
        error = await failure_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "there is no such request.")

    play(scenario)


@pytest.mark.parametrize(
    ("from_tokens", "status"), [([3], grpc.StatusCode.DATA_LOSS), ([0, 0], grpc.StatusCode.INVALID_ARGUMENT)]
)
def test_a_call_that_asks_for_what_is_not_there_ends_no_request(
    play: Any, from_tokens: list[int], status: grpc.StatusCode
) -> None:
    async def scenario(service: Service) -> None:
        call, resumption = await ask(service, *from_tokens)
        send(service, resumed(resumption.stream_id, ids_of("ab")))
        assert (await failure_of(call)).code() == status
        again, second = await ask(service, 1)
        send(service, resumed(second.stream_id, ids_of("ab")))
        assert (await next_response(again)).text == "b"
        assert service.engine.batches.empty(), "nothing was aborted"

    play(scenario)


@pytest.mark.parametrize("is_known", [True, False])
def test_leaving_a_resumed_stream_aborts_it(play: Any, is_known: bool) -> None:
    async def scenario(service: Service) -> None:
        call, resumption = await ask(service)
        if is_known:
            send(service, resumed(resumption.stream_id, ids_of("a")))
            await next_response(call)
        call.cancel()
        batch = await service.engine.next_batch()
        assert resumption.stream_id in batch.aborted_stream_ids

    play(scenario)


def test_without_an_engine_there_is_nothing_to_resume(play: Any) -> None:
    async def scenario(service: Service) -> None:
        call, _ = await ask(service)
        service.engine.to_send.put_nowait(None)
        error = await failure_of(call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "engine went away" in (error.details() or "")
        assert await service.next_model() is None
        error = await failure_of(service.stub.Resume(pb.ResumeRequest(request_id="mine")))
        assert error.code() == grpc.StatusCode.UNAVAILABLE

    play(scenario)


def test_a_submission_says_whose_it_is_and_carries_what_its_resumption_needs(play: Any) -> None:
    async def scenario(service: Service) -> None:
        request = pb.GenerateRequest(token_ids=PROMPT, sampling_params=pb.SamplingParams(stop=["x"]))
        call = service.stub.Generate(request, metadata=(("blockplane-caller", "ada"),))
        (submission,) = (await service.engine.next_batch()).submissions
        assert submission.caller == "ada"
        request.ClearField("token_ids")
        assert pb.GenerateRequest.FromString(submission.frontend_state) == request
        call.cancel()
        await asyncio.wait_for(service.engine.next_batch(), SECONDS)

    play(scenario)


def test_bytes_of_the_small_tokenizer_are_tokens() -> None:
    """What the property above rests on."""
    assert len(ids_of("€")) == 3
    assert SMALL.ids(b"a") == ids_of("a")
