"""What a client's request comes to for the engine: every field, its default, and its refusal by name."""

from dataclasses import fields, replace
from typing import Any

import pytest
from client_service import MODEL, PROMPT, TEXT, VOCAB_SIZE

from blockplane.control_plane.frontend.requests import submission_of
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.model import GenerationDefaults
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import inference_pb2 as pb

FIELDS = pb.SamplingParams.DESCRIPTOR.fields_by_name


def submitted(*, num_samples: int = 0, **sampling: Any) -> Submission:
    params = pb.SamplingParams(**sampling)
    request = pb.GenerateRequest(token_ids=PROMPT, sampling_params=params, num_samples=num_samples)
    return submission_of(pb.GenerateRequest.FromString(request.SerializeToString()), MODEL, TEXT, None)


def test_every_sampling_parameter_reaches_the_engine_as_it_was_sent() -> None:
    given: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0.7,
        "seed": 2**64 - 1,
        "ignore_eos": True,
        "min_tokens": 4,
        "top_k": 2**31 - 1,
        "top_p": 0.95,
        "min_p": 0.05,
        "presence_penalty": -1.1,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
    }
    params = submitted(
        **given,
        stop_token_ids=[3, 5],
        logit_bias={7: -99.9, 0: 0.1},
        allowed_token_ids=pb.TokenIds(ids=[VOCAB_SIZE - 1, 0]),
        bad_word_token_ids=[pb.TokenIds(ids=[1, 2]), pb.TokenIds(ids=[3])],
    ).params
    assert replace(params, logit_bias=tuple(sorted(params.logit_bias))) == SamplingParams(
        **given,
        stop_token_ids=(3, 5),
        logit_bias=((0, 0.1), (7, -99.9)),
        allowed_token_ids=(VOCAB_SIZE - 1, 0),
        bad_words=((1, 2), (3,)),
    )


def test_the_protocol_has_every_parameter_by_its_name_and_no_other() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert {*FIELDS} == names | {"stop", "bad_word_token_ids"}


def test_what_is_absent_takes_the_models_default_and_what_is_zero_is_not_absent() -> None:
    model = replace(MODEL, defaults=GenerationDefaults(temperature=0.6))
    request = pb.GenerateRequest(token_ids=PROMPT)
    assert submission_of(request, model, TEXT, None).params == SamplingParams(model.max_model_len, temperature=0.6)
    request.sampling_params.temperature = 0
    assert submission_of(request, model, TEXT, None).params == SamplingParams(model.max_model_len, temperature=0)


@pytest.mark.parametrize(("num_samples", "expected"), [(0, 1), (1, 1), (64, 64)])
def test_as_many_samples_are_asked_for_as_were_sent(num_samples: int, expected: int) -> None:
    assert submitted(num_samples=num_samples).num_samples == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", float("nan")),
        ("min_tokens", MODEL.max_model_len + 1),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.01),
        ("logit_bias", {1: 100.1}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", dict.fromkeys(range(301), 1)),
        ("allowed_token_ids", pb.TokenIds()),
        ("bad_words", [""]),
        ("bad_words", ["x" * 65]),
        ("bad_words", ["x"] * 301),
        ("bad_word_token_ids", [pb.TokenIds()]),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field} .*\.$"):
        submitted(**{field: value})


def test_bad_words_of_both_kinds_are_counted_together() -> None:
    both = {"bad_words": ["x"] * 150, "bad_word_token_ids": [pb.TokenIds(ids=[1])] * 150}
    assert len(submitted(**both).params.bad_words) == 300
    both["bad_words"].append("y")
    with pytest.raises(InvalidRequestError, match=r"^bad_words and bad_word_token_ids are 301;"):
        submitted(**both)


def test_a_bad_word_is_kept_out_by_the_tokens_that_spell_it() -> None:
    assert submitted(bad_words=["ab", " é"]).params.bad_words == (
        (ord("a"), ord("b")),
        tuple("é".encode()),
    )
