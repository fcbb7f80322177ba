"""Structured output through the whole system: valid for all at once, and exact over the loss of a worker."""

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from json_schemas import is_valid
from processes import System, running_system, wait_for
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.errors import InvalidRequestError, UnsupportedError
from blockplane.protos.structured import StructuredOutput

PROMPT = list(range(50))
PATTERN = r"([a-z]{2,9}, ){8}and [0-9]{3}\."
SCHEMA = StructuredOutput(
    "json_schema",
    json.dumps(
        {
            "x-guidance": {"whitespace_pattern": ""},
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "ids": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            },
            "required": ["name", "ids"],
            "additionalProperties": False,
        }
    ),
)
HOSTILE = StructuredOutput(
    "grammar", "start: r0\n" + "\n".join(f'r{index}: "a" r{index + 1}' for index in range(3500)) + '\nr3500: "b"'
)
CHECKER = "frontend.grammar_checker"


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system("--max-model-len=2048") as system:
        yield system


def text_of(client: Client, structured: StructuredOutput, seed: int) -> str:
    """What comes at a heat at which the model says anything; it ended by itself."""
    deltas = list(client.generate(PROMPT, temperature=9, seed=seed, max_tokens=1500, structured=structured))
    assert deltas[-1].finish_reason == "stop"
    return "".join(delta.text for delta in deltas)


def test_everybody_gets_what_they_asked_for_while_somebody_asks_for_what_cannot_be(system: System) -> None:
    def run(seed: int) -> str:
        with system.client() as client:
            if seed % 8 == 7:
                with pytest.raises(InvalidRequestError, match="grammar cannot be held to"):
                    text_of(client, HOSTILE, seed)
                return ""
            return text_of(client, SCHEMA if seed % 2 else StructuredOutput("regex", PATTERN), seed)

    with ThreadPoolExecutor(16) as pool, system.client() as client:
        texts = list(pool.map(run, range(16)))
        plain = client.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
        assert [token for delta in plain for token in delta.token_ids] == continue_greedily(PROMPT, 40, ignore_eos=True)
    for text in texts[::2]:
        assert re.fullmatch(PATTERN, text)
    for text in (*texts[1:7:2], *texts[9:15:2]):
        value = json.loads(text)
        assert len(value["name"]) <= 12
        assert all(type(number) is int for number in value["ids"])
    assert len({*texts}) == 15


def test_a_structured_stream_outlives_its_worker_exactly(system: System) -> None:
    long = StructuredOutput("regex", r"([a-z]{2,9}, ){20}and [0-9]{3}\.")
    with system.client() as client:
        expected = text_of(client, long, 5)
        stream = client.generate(PROMPT, temperature=9, seed=5, max_tokens=1500, structured=long)
        text = "".join(next(stream).text for _ in range(5))
        worker = system.processes("worker")[0]
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        wait_for(lambda: system.statistics().num_held == 1, "it has not ended, and waits for another worker")
        system.start("worker")
        assert text + "".join(delta.text for delta in stream) == expected


def test_a_worker_that_is_told_to_knows_none_and_the_frontend_s_death_leaves_no_checker() -> None:
    with running_system("--structured-output=off") as system, system.client() as client:
        with pytest.raises(UnsupportedError, match="knows structured output"):
            text_of(client, SCHEMA, 1)
        frontend = system.processes("frontend")[0]
        checkers = [pid for pid in children_of(frontend.pid) if CHECKER in command_line(pid)]
        assert len(checkers) == 1
        frontend.kill()
        wait_for(lambda: CHECKER not in command_line(checkers[0]), "the checker ends with its frontend")


def children_of(parent: int) -> list[int]:
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in pids if parent == _parent_of(pid)]


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


# -- the real model ----------------------------------------------------------------------------------------------------

ANY_SPACE = {"x-guidance": {"whitespace_pattern": " "}}
BOUNDED: dict[str, dict[str, Any]] = {
    "A pet as JSON: ": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "Three colours: ": {"type": "array", "items": {"enum": ["red", "blue", "é 😀"]}, "minItems": 1, "maxItems": 3},
    "The verdict: ": {
        "type": "object",
        "properties": {"guilty": {"type": "boolean"}, "years": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["guilty"],
        "additionalProperties": False,
    },
    "A word in quotes: ": {"type": "string", "maxLength": 10},
}
NUM_EACH = 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gemma_s_json_is_valid_in_200_of_200_runs_at_temperature_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Over the wire, schemas tried out at the door, all at once as the samples of four requests."""

    def run(prompt: str) -> list[str]:
        schema, texts = StructuredOutput("json_schema", json.dumps({**BOUNDED[prompt], **ANY_SPACE})), [""] * NUM_EACH
        with system.client() as client:
            for delta in client.generate(
                prompt, num_samples=NUM_EACH, temperature=1, seed=1, max_tokens=120, structured=schema
            ):
                texts[delta.sample_index] += delta.text
                assert delta.finish_reason in (None, "stop")
        return texts

    with closing(System("--model=gemma3-270m", "--max-model-len=256")) as system, system.client() as client:
        for kind in ("engine", "frontend", "worker"):
            system.start(kind)
        client.wait_until_serving(timeout=300)
        started = time.monotonic()
        with ThreadPoolExecutor(len(BOUNDED)) as pool:
            texts = dict(zip(BOUNDED, pool.map(run, BOUNDED), strict=True))
        seconds = time.monotonic() - started
    invalid = [
        text for prompt, answers in texts.items() for text in answers if not is_valid(json.loads(text), BOUNDED[prompt])
    ]
    different = {text for answers in texts.values() for text in answers}
    with capsys.disabled():
        print(
            f"\n{len(BOUNDED) * NUM_EACH} runs in {seconds:.0f} s, {len(different)} different texts, invalid: {invalid}"
        )
    assert invalid == []
    assert len(different) > NUM_EACH
