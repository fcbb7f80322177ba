"""Structured outputs over whole texts on the synthetic model: always valid, and the same however they are scheduled."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from drafting import grammars, imperfect_twin, num_drafted, perfect_twin, planes_with, text_of
from engine_player import EnginePlayer
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import is_valid, objects, schemas

from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID, VOCAB_SIZE
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import sample
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.protos.errors import ModelOutputError, ProtocolError
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import StructuredOutput

PATTERN = r"([a-z]{2,4}-){2,3}[0-9]{1,4}!"
REGEX = StructuredOutput("regex", PATTERN)
COMPACT = {"x-guidance": {"whitespace_pattern": ""}}
SCHEMA = {
    **COMPACT,
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99999}, "b": {"enum": ["x", "yy", "zzz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
HOT = SamplingParams(40, 9.0)
PARAMS = {
    "greedy": SamplingParams(40, structured=REGEX),
    "random": replace(HOT, structured=REGEX),
    "schema": replace(HOT, structured=StructuredOutput("json_schema", json.dumps(SCHEMA))),
    "choice": replace(HOT, structured=StructuredOutput.choice([f"number {index} of the list" for index in range(40)])),
    "penalized": replace(HOT, structured=REGEX, repetition_penalty=1.3, frequency_penalty=0.5, top_k=40, top_p=0.9),
}
PROMPT = [(7 * index) % 250 for index in range(45)]
SEED = 42
SOURCES: dict[str, Callable[[], Model | None]] = {
    "ngram": lambda: None,
    "perfect": perfect_twin,
    "imperfect": imperfect_twin,
}


def spelled(output: list[int]) -> str:
    """The text of an output that has ended by itself."""
    assert output[-1] == EOS_TOKEN_ID
    return bytes(output[:-1]).decode()


@cache
def alone(name: str) -> tuple[int, ...]:
    return tuple(text_of(planes_with(), PROMPT, PARAMS[name], SEED))


def test_what_comes_alone_is_what_was_asked_for() -> None:
    for name in ("greedy", "random", "penalized"):
        assert re.fullmatch(PATTERN, spelled([*alone(name)])), name
    value = json.loads(spelled([*alone("schema")]))
    assert set(value) == {"a", "b"}
    assert 0 <= value["a"] <= 99999
    assert value["b"] in ("x", "yy", "zzz")
    assert re.fullmatch(r"number [1-3]?[0-9] of the list", spelled([*alone("choice")]))
    assert len({alone(name) for name in PARAMS}) == len(PARAMS)


@pytest.mark.parametrize("name", PARAMS)
def test_it_is_the_same_with_mates_chunked_and_in_another_row_after_a_preemption(name: str) -> None:
    configure = Configure(4, 400, 128, num_batched_tokens_buckets=(16, 256), num_seqs_buckets=(1, 4))
    engine = EnginePlayer(SyntheticModel("float32"), configure, max_segment=4, grammars=grammars())
    for row, mate in enumerate((HOT, PARAMS["random"], PARAMS["choice"])):
        engine.admit(row, PROMPT[: 5 + row], params=mate, seed=row)
    engine.admit(3, PROMPT, params=PARAMS[name], seed=SEED)
    while len(engine.texts[3]) < len(PROMPT) + 7:
        engine.step()
    begun = engine.texts[3][len(PROMPT) :]
    engine.release(3)
    engine.release(1)
    engine.admit(3, PROMPT[:9], params=PARAMS["choice"], seed=9)
    engine.admit(1, PROMPT, output=tuple(begun), params=PARAMS[name], seed=SEED)
    while engine.texts[1][-1] != EOS_TOKEN_ID:
        engine.step()
    assert engine.texts[1][len(PROMPT) :] == [*alone(name)]


@pytest.mark.parametrize(("source", "num_ahead"), [("ngram", 1), ("perfect", 2), ("imperfect", 1)])
def test_drafts_change_no_token_and_some_are_accepted(source: str, num_ahead: int) -> None:
    planes = planes_with(4, SOURCES[source](), num_seqs_buckets=(8,))
    prompt = [*PROMPT, *alone("choice")] if source == "ngram" else PROMPT
    numbers = {name: planes.submit(prompt, params, SEED) for name, params in PARAMS.items()}
    free = planes.submit(PROMPT, HOT, seed=5)
    planes.run(num_ahead)
    if source != "ngram":
        assert {name: tuple(planes.texts[number]) for name, number in numbers.items()} == {
            name: alone(name) for name in PARAMS
        }
    else:
        undrafted = planes_with()
        again = {name: undrafted.submit(prompt, params, SEED) for name, params in PARAMS.items()}
        undrafted.run()
        assert [planes.texts[numbers[name]] for name in PARAMS] == [undrafted.texts[again[name]] for name in PARAMS]
    assert planes.texts[free] == text_of(planes_with(), PROMPT, HOT, seed=5)
    num_drafts, num_accepted = num_drafted(planes)
    assert 0 < num_accepted <= num_drafts
    assert source == "ngram" or num_accepted > num_drafts / 10


def test_a_draft_model_knows_what_may_come_so_that_a_twin_guesses_all_of_it() -> None:
    planes = planes_with(4, perfect_twin())
    assert text_of(planes, PROMPT, PARAMS["random"], SEED) == [*alone("random")]
    num_drafts, num_accepted = num_drafted(planes)
    # What is drafted behind the end is in vain.
    assert num_drafts - 4 <= num_accepted


def test_rows_that_give_way_and_resume_say_the_same() -> None:
    planes = planes_with(num_blocks=84, max_model_len=96, num_seqs_buckets=(8,))
    numbers = {name: planes.submit(PROMPT, params, SEED) for name, params in PARAMS.items()}
    planes.run()
    assert planes.scheduler.statistics().num_preemptions > 0
    assert {name: tuple(planes.texts[number]) for name, number in numbers.items()} == {
        name: alone(name) for name in PARAMS
    }


def test_mates_of_a_structured_row_are_told_bitwise_what_they_are_told_alone() -> None:
    told = replace(HOT, max_tokens=30, ignore_eos=True, logprobs=5)
    planes, without = planes_with(num_seqs_buckets=(2,)), planes_with(num_seqs_buckets=(2,))
    for mate in (PARAMS["schema"], replace(HOT, max_tokens=len(alone("schema")))):
        one = planes if mate.structured else without
        one.submit(PROMPT, told, seed=1)
        one.submit(PROMPT[:9], mate, seed=2)
        one.run()
    for with_mate, with_another in zip(planes.results, without.results, strict=False):
        ours, theirs = with_mate.logprobs, with_another.logprobs
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.num_entries[0] == theirs.num_entries[0]
            count = ours.num_entries[0]
            assert ours.logprobs[:count].tobytes() == theirs.logprobs[:count].tobytes()
            assert ours.token_ids[:count].tolist() == theirs.token_ids[:count].tolist()
    assert planes.texts[0] == without.texts[0]


def test_the_model_s_own_probabilities_are_told_of_what_the_grammar_chose() -> None:
    planes = planes_with()
    planes.submit(PROMPT, replace(PARAMS["choice"], logprobs=3), SEED)
    planes.run()
    first = planes.results[0].logprobs
    assert first is not None
    assert first.token_ids[0] == ord("n")
    assert ord("n") not in first.token_ids[1:], "it was not among the likeliest to the model"


# -- conflicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conflict", "num_before"),
    [
        ({"structured": StructuredOutput.choice(["ab"]), "min_tokens": 3}, 2),
        ({"structured": StructuredOutput.choice(["ab"]), "bad_words": ((97, 98),)}, 1),
        ({"structured": StructuredOutput.choice(["ab"]), "allowed_token_ids": (98,)}, 0),
    ],
)
def test_a_row_whose_grammar_and_other_limits_leave_nothing_ends_there_alone(
    conflict: dict[str, Any], num_before: int
) -> None:
    planes = planes_with(3, perfect_twin())
    number = planes.submit(PROMPT, SamplingParams(20, **conflict))
    mate = planes.submit(PROMPT, PARAMS["random"], SEED)
    planes.run()
    assert planes.texts[number] == [*b"ab"][:num_before]
    assert isinstance(planes.outcomes[number], ModelOutputError)
    assert planes.texts[mate] == [*alone("random")]


def test_a_worker_that_knows_no_structured_output_refuses_the_plan() -> None:
    sampling = SamplingRows(4, VOCAB_SIZE, (EOS_TOKEN_ID,))
    admission = Admission(0, np.array([1], np.int32), 1, 0, PARAMS["greedy"], 0)
    with pytest.raises(ProtocolError, match="structured output"):
        sampling.apply(StepPlan(1, admissions=(admission,)))


# -- bounded schemas ---------------------------------------------------------------------------------------------------


def random_output(structured: StructuredOutput, seed: int, most: int) -> list[int]:
    """What comes of random logits, up to the end of the text."""
    configure = Configure(4, 2, most + 2, num_batched_tokens_buckets=(4,), num_seqs_buckets=(1,))
    rows, sampling = Rows(configure), SamplingRows(1, VOCAB_SIZE, (EOS_TOKEN_ID,), grammars())
    rarely_blank = tuple((ord(blank), -6.0) for blank in " \t\n\r")
    params = SamplingParams(most, 3.0, structured=structured, logit_bias=rarely_blank)
    admission = Admission(0, np.array([1], np.int32), 1, 0, params, seed)
    plan = StepPlan(1, admissions=(admission,))
    rows.apply(plan)
    sampling.apply(plan)
    generator, row = torch.Generator().manual_seed(seed), np.zeros(1, np.int64)
    for _ in range(most):
        logits = 3 * torch.randn(1, VOCAB_SIZE, generator=generator)
        token_ids = sample(logits, sampling.batch(rows, row)).token_ids
        rows.append(row, token_ids)
        if token_ids[0] in (EOS_TOKEN_ID, -1):
            break
    return rows.token_ids[0, 1 : rows.num_tokens[0]].tolist()


@settings(max_examples=40, deadline=None)
@given(objects(schemas(1)), st.integers(0, 2**32))
def test_any_text_of_a_bounded_schema_ends_as_json_that_it_describes(schema: dict[str, Any], seed: int) -> None:
    output = random_output(StructuredOutput("json_schema", json.dumps(schema)), seed, most=1500)
    assert is_valid(json.loads(spelled(output)), schema)


def test_the_judge_of_schemas_tells_what_is_wrong() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, "x"]}, "minItems": 1, "maxItems": 2}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert is_valid({"a": [1, "x"]}, schema)
    for wrong in ({}, {"a": []}, {"a": [True]}, {"a": ["y"]}, {"a": [1, 1, 1]}, {"a": [1], "b": 1}, []):
        assert not is_valid(wrong, schema)
