"""Sampling limits: each field's edges are taken, what lies beyond is refused by the field's name."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.sampling import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_TEMPERATURE,
    SamplingParams,
    check_sampling_params,
    check_token_ids,
)
from blockplane.protos.structured import (
    MAX_CHOICES,
    MAX_STRUCTURED_BYTES,
    STRUCTURED_KINDS,
    StructuredKind,
    StructuredOutput,
)

VOCAB_SIZE = 50
SOUND = SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.001),
        ("temperature", math.nextafter(MAX_TEMPERATURE, math.inf)),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (0, VOCAB_SIZE)),
        ("stop_token_ids", (3, 2**63 - 1, 4)),
        ("stop_token_ids", (3, -(2**63), 4)),
        ("min_tokens", -1),
        ("min_tokens", SOUND.max_tokens + 1),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", math.nextafter(1, 2)),
        ("top_p", math.nan),
        ("min_p", -0.001),
        ("min_p", math.nextafter(1, 2)),
        ("min_p", math.nan),
        *((f"{kind}_penalty", value) for kind in ("presence", "frequency") for value in (-2.001, 2.001, math.nan)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, 2.001, math.nan, math.inf)),
        *(("logit_bias", ((token_id, 1.0),)) for token_id in (-1, VOCAB_SIZE, 2**63 - 1)),
        *(("logit_bias", ((3, bias),)) for bias in (-100.1, 100.1, math.nan, math.inf)),
        ("logit_bias", ((3, 1.0), (4, 1.0), (3, 1.0))),
        ("logit_bias", tuple((0, 0.0) for _ in range(MAX_LOGIT_BIASES + 1))),
        ("allowed_token_ids", ()),
        *(("allowed_token_ids", (3, token_id)) for token_id in (-1, VOCAB_SIZE, 2**63 - 1)),
        ("bad_words", ((3,), ())),
        *(("bad_words", ((3,), (4, token_id))) for token_id in (-1, VOCAB_SIZE, 2**63 - 1)),
        ("bad_words", ((3,) * (MAX_BAD_WORD_LEN + 1),)),
        ("bad_words", ((3,),) * (MAX_BAD_WORDS + 1)),
        *((field, value) for field in ("logprobs", "prompt_logprobs") for value in (-1, 21)),
    ],
)
def test_a_value_out_of_range_is_refused_naming_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field} .*\.$"):
        check_sampling_params(replace(SOUND, **{field: value}), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", 2**31),
        ("temperature", 0.0),
        ("temperature", 5e-324),
        ("temperature", MAX_TEMPERATURE),
        ("seed", None),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("stop_token_ids", ()),
        ("stop_token_ids", (0, VOCAB_SIZE - 1)),
        ("ignore_eos", True),
        ("min_tokens", SOUND.max_tokens),
        ("top_k", 2**31 - 1),
        ("top_p", 5e-324),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        *((f"{kind}_penalty", value) for kind in ("presence", "frequency") for value in (-2.0, 2.0)),
        *(("repetition_penalty", value) for value in (5e-324, 2.0)),
        ("logit_bias", ((0, -100.0), (VOCAB_SIZE - 1, 100.0))),
        ("allowed_token_ids", (0, VOCAB_SIZE - 1)),
        ("bad_words", ((0,), (VOCAB_SIZE - 1,) * MAX_BAD_WORD_LEN)),
        ("bad_words", ((3,),) * MAX_BAD_WORDS),
        *((field, value) for field in ("logprobs", "prompt_logprobs") for value in (None, 0, 20)),
    ],
)
def test_a_value_at_the_edge_is_taken(field: str, value: Any) -> None:
    check_sampling_params(replace(SOUND, **{field: value}), VOCAB_SIZE)


@given(token_ids=st.lists(st.integers(-2, VOCAB_SIZE + 2)), as_array=st.booleans())
def test_token_ids_are_taken_if_and_only_if_the_model_has_them(token_ids: list[int], as_array: bool) -> None:
    outside = [token_id for token_id in token_ids if not 0 <= token_id < VOCAB_SIZE]
    given_ids: Any = np.array(token_ids, np.int32) if as_array else token_ids
    if outside:
        sentence = rf"^prompt holds {outside[0]}; this model's token ids run from 0 to {VOCAB_SIZE - 1}\.$"
        with pytest.raises(InvalidRequestError, match=sentence):
            check_token_ids("prompt", given_ids, VOCAB_SIZE)
    else:
        check_token_ids("prompt", given_ids, VOCAB_SIZE)


# -- structured output -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((kind, "") for kind in STRUCTURED_KINDS if kind != "json_object"),
        *((kind, "é" * (MAX_STRUCTURED_BYTES // 2) + "a") for kind in STRUCTURED_KINDS),
        ("json_object", "{}"),
        ("choice", "[]"),
        ("choice", "{}"),
        ("choice", '["a", 1]'),
        ("choice", '["a", ""]'),
        ("choice", "[" * 60_000),
        ("choice", json.dumps(["a"] * (MAX_CHOICES + 1))),
    ],
)
def test_a_structured_output_that_is_none_is_refused_naming_the_kind(kind: StructuredKind, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{kind} .*\.$"):
        check_sampling_params(replace(SOUND, structured=StructuredOutput(kind, text)), VOCAB_SIZE)


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput("json_object"),
        StructuredOutput("regex", "a" * MAX_STRUCTURED_BYTES),
        StructuredOutput.choice(["é", '"', "\n"]),
        StructuredOutput.choice(["a"] * MAX_CHOICES),
    ],
)
def test_a_structured_output_within_limits_is_taken_but_not_where_the_text_may_not_end(
    structured: StructuredOutput,
) -> None:
    check_sampling_params(replace(SOUND, structured=structured), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match=rf"^ignore_eos is set beside {structured.kind}"):
        check_sampling_params(replace(SOUND, structured=structured, ignore_eos=True), VOCAB_SIZE)
