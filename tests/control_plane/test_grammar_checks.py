"""Structured outputs at the door: what cannot be held to is refused by its name, and who asks so hurts nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_service import MODEL as ENDLESS_MODEL
from client_service import PROMPT, SMALL, TEXT, VLLM_PROMPT, Play, Service, failure_of, play_in
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.control_plane.frontend import grammar_checks
from blockplane.control_plane.frontend.grammar_checks import GrammarChecks
from blockplane.protos.delivery import Ending
from blockplane.protos.errors import CapacityError, InvalidRequestError, UnavailableError
from blockplane.protos.structured import MAX_CHOICES, MAX_STRUCTURED_BYTES, StructuredOutput
from blockplane.v1 import inference_pb2 as pb

MODEL = replace(ENDLESS_MODEL, eos_token_ids=(SMALL.end,))
SOUND = StructuredOutput("regex", "[a-z]+")
ANOTHER = StructuredOutput("json_object")


def with_checks(scenario: Callable[[GrammarChecks], Awaitable[None]]) -> None:
    async def main() -> None:
        checks = GrammarChecks()
        try:
            await asyncio.wait_for(scenario(checks), 60)
        finally:
            await checks.stop()

    asyncio.run(main())


async def refusal_of(checks: GrammarChecks, structured: StructuredOutput) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await checks.check(structured, MODEL)
    return str(caught.value)


def chain(length: int) -> str:
    """Rules of which each needs the next one: they are gone through by recursion."""
    rules = "\n".join(f'r{index}: "a" r{index + 1}' for index in range(length))
    return f'start: r0\n{rules}\nr{length}: "b"'


def test_what_can_be_held_to_passes_and_what_cannot_is_refused_by_its_name() -> None:
    async def scenario(checks: GrammarChecks) -> None:
        for sound in (SOUND, ANOTHER, StructuredOutput.choice(["é", "b"]), StructuredOutput("grammar", chain(9))):
            await checks.check(sound, MODEL)
        assert "unclosed group" in await refusal_of(checks, StructuredOutput("regex", "("))
        for kind, text in (("json_schema", '{"type": "some"}'), ("grammar", "start: x"), ("regex", "(")):
            assert (await refusal_of(checks, StructuredOutput(kind, text))).startswith(f"{kind} cannot be held to")

    with_checks(scenario)


HOSTILE = {
    "rules that nest beyond any stack": StructuredOutput("grammar", chain(3500)),
    "counts of counts": StructuredOutput("regex", "((a{1000}){1000}){1000}b"),
    "counts of counts in a schema": StructuredOutput(
        "json_schema", json.dumps({"type": "string", "pattern": "^(a{1000}){1000}$"})
    ),
    "more ways to go on than are followed": StructuredOutput(
        "json_schema", json.dumps({"type": "object", "properties": {f"k{index}": {} for index in range(900)}})
    ),
    "lexemes that exclude each other": StructuredOutput("grammar", "start: T\nT: /.*a.{40}/ & /.*b.{40}/ & /.*c.{40}/"),
    "schemas of schemas": StructuredOutput(
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {}}} for x in "ab"]} for i in range(20)]}),
    ),
    "brackets": StructuredOutput("json_schema", '{"items":' * 7000),
    "a divisor": StructuredOutput("json_schema", '{"type": "integer", "multipleOf": 982451653}'),
}


def test_hostile_grammars_are_refused_within_limits_while_the_loop_goes_on() -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await checks.check(SOUND, MODEL)
        ticks = asyncio.create_task(longest_pause())
        for how, structured in HOSTILE.items():
            started = time.monotonic()
            assert (await refusal_of(checks, structured)).startswith(f"{structured.kind} cannot be held to"), how
            assert time.monotonic() - started < grammar_checks.MAX_SECONDS + 2, how
        ticks.cancel()
        assert await ticks < 2
        await checks.check(ANOTHER, MODEL)

    with_checks(scenario)


async def longest_pause() -> float:
    """Of the event loop, until it is cancelled."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    except asyncio.CancelledError:
        return longest


def test_an_answer_is_remembered_and_asked_for_once() -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await asyncio.gather(*(checks.check(SOUND, MODEL) for _ in range(5)))
        assert checks._process is not None
        os.kill(checks._process.pid, signal.SIGSTOP)
        await asyncio.wait_for(checks.check(SOUND, MODEL), 1)
        os.kill(checks._process.pid, signal.SIGCONT)

    with_checks(scenario)


def test_another_model_is_asked_about_anew() -> None:
    async def scenario(checks: GrammarChecks) -> None:
        bad = StructuredOutput("regex", "(")
        with pytest.raises(InvalidRequestError):
            await checks.check(bad, MODEL)
        # Whether a model without an end of text serves any is the engine's to say.
        await checks.check(bad, ENDLESS_MODEL)
        with pytest.raises(InvalidRequestError):
            await checks.check(bad, MODEL)

    with_checks(scenario)


def test_a_process_that_is_killed_ends_the_question_and_the_next_one_gets_another() -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await checks.check(SOUND, MODEL)
        assert checks._process is not None
        os.kill(checks._process.pid, signal.SIGSTOP)
        asked = asyncio.create_task(checks.check(ANOTHER, MODEL))
        await asyncio.sleep(0.05)
        os.kill(checks._process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="send the request again"):
            await asked
        await checks.check(ANOTHER, MODEL)

    with_checks(scenario)


def test_who_leaves_before_the_answer_leaves_the_next_one_its_own() -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await checks.check(SOUND, MODEL)
        leaving = asyncio.create_task(checks.check(StructuredOutput("regex", "("), MODEL))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await checks.check(ANOTHER, MODEL)
        assert "unclosed" in await refusal_of(checks, StructuredOutput("regex", "("))

    with_checks(scenario)


def test_more_questions_than_may_wait_are_refused_with_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 3)

    async def scenario(checks: GrammarChecks) -> None:
        questions = [StructuredOutput("regex", f"a{{{count}}}") for count in range(1, 6)]
        answers = await asyncio.gather(*(checks.check(each, MODEL) for each in questions), return_exceptions=True)
        assert answers[:3] == [None] * 3
        for answer in answers[3:]:
            assert isinstance(answer, CapacityError)
            assert answer.retry_after_seconds == 1
        await checks.check(questions[4], MODEL)

    with_checks(scenario)


def test_the_process_ends_with_its_input() -> None:
    async def scenario(checks: GrammarChecks) -> None:
        await checks.check(SOUND, MODEL)
        process = checks._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0

    with_checks(scenario)


# -- over the services -------------------------------------------------------------------------------------------------


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(play_in, tmp_path)


REFUSED: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": '{"type": "some"}'},
    "regex": {"regex": "("},
    "grammar": {"grammar": "start: x"},
    "choice": {"choice": pb.Choice(texts=["a", ""])},
    "choice has 1025 texts": {"choice": pb.Choice(texts=["a"] * (MAX_CHOICES + 1))},
    "regex has 65537 bytes": {"regex": "a" * (MAX_STRUCTURED_BYTES + 1)},
    "json_schema is empty": {"json_schema": ""},
    "ignore_eos": {"json_object": True, "ignore_eos": True},
}


def test_a_refusal_is_the_call_s_status_names_the_field_and_never_reaches_the_engine(play: Play) -> None:
    async def scenario(service: Service) -> None:
        service.calls.serve_model((MODEL, TEXT))
        for sentence, fields in REFUSED.items():
            request = pb.GenerateRequest(token_ids=PROMPT, sampling_params=pb.SamplingParams(**fields))
            error = await failure_of(service.stub.Generate(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, sentence
            assert sentence in (error.details() or "")
        request = vllm.GenerateRequest(
            request_id="mine", tokenized=VLLM_PROMPT, sampling_params=vllm.SamplingParams(regex="(")
        )
        error = await failure_of(service.vllm.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "regex cannot be held to" in (error.details() or "")
        # What comes first to the engine is the first that is sound.
        call, submission = await service.submit(sampling_params=pb.SamplingParams(regex="[a-z]+"))
        assert submission.params.structured == SOUND
        service.deliver_text(submission.stream_id, "ab", Ending(submission.stream_id, "stop"))
        response = await asyncio.wait_for(call.read(), SECONDS)
        assert isinstance(response, pb.GenerateResponse)
        assert response.text == "ab"
        await service.calls.drain()

    play(scenario)


MEANT = {
    "json_schema": ({"json_schema": '{"type": "object"}'}, StructuredOutput("json_schema", '{"type": "object"}')),
    "json_object": ({"json_object": True}, StructuredOutput("json_object")),
    "grammar": ({"grammar": 'start: "a"'}, StructuredOutput("grammar", 'start: "a"')),
    "choice": ({"choice": pb.Choice(texts=["é", "b"])}, StructuredOutput("choice", '["é", "b"]')),
    "any text": ({"json_object": False}, None),
}


def test_each_way_of_asking_reaches_the_engine_as_what_it_means(play: Play) -> None:
    async def scenario(service: Service) -> None:
        for fields, meant in MEANT.values():
            call, submission = await service.submit(sampling_params=pb.SamplingParams(**fields))
            assert submission.params.structured == meant
            call.cancel()
            await service.engine.next_batch()
        await service.calls.drain()

    play(scenario)


def test_a_deadline_holds_while_the_answer_is_waited_for(play: Play) -> None:
    async def scenario(service: Service) -> None:
        service.calls.serve_model((MODEL, TEXT))
        await service.calls._grammar_checks.check(SOUND, MODEL)
        process = service.calls._grammar_checks._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        request = pb.GenerateRequest(token_ids=PROMPT, sampling_params=pb.SamplingParams(json_object=True))
        error = await failure_of(service.stub.Generate(request, timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # It is stopped still, and the answer outstanding.
        await service.calls.drain()

    play(scenario)
