"""What a client's request comes to for the engine: every field, its default, and its refusal by name."""

from dataclasses import fields, replace
from typing import Any

import pytest
from client_service import MODEL, PROMPT, SMALL, TEXT, VOCAB_SIZE
from small_tokenizers import END

from blockplane.control_plane.frontend.output import TextParams
from blockplane.control_plane.frontend.requests import submission_of, text_params_of, text_params_of_state
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.model import GenerationDefaults
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import STRUCTURED_KINDS
from blockplane.v1 import inference_pb2 as pb

FIELDS = pb.SamplingParams.DESCRIPTOR.fields_by_name
TEXTUAL = {
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
}
"""Those of the protocol's parameters that the frontend keeps for itself."""


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
    assert {*FIELDS} - TEXTUAL - {*STRUCTURED_KINDS} == names - {"structured"} | {"bad_word_token_ids"}


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


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (pb.GenerateRequest(), TextParams()),
        (
            pb.GenerateRequest(
                whole_output=True,
                sampling_params=pb.SamplingParams(
                    stop=["a", "b"],
                    include_stop_str_in_output=True,
                    skip_special_tokens=False,
                    spaces_between_special_tokens=False,
                ),
            ),
            TextParams(("a", "b"), True, False, False, is_whole=True),
        ),
        (
            pb.GenerateRequest(
                sampling_params=pb.SamplingParams(skip_special_tokens=True, spaces_between_special_tokens=True)
            ),
            TextParams(),
        ),
    ],
)
def test_how_an_output_is_told_is_as_the_request_says_and_stays_so_when_it_is_resumed(
    request_: pb.GenerateRequest, expected: TextParams
) -> None:
    request_.token_ids.CopyFrom(PROMPT)
    assert text_params_of(request_) == expected
    assert text_params_of_state(submission_of(request_, MODEL, TEXT, None).frontend_state) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, [1, 2, 3]), (1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3])]
)
def test_of_a_prompt_of_ids_the_last_are_kept(limit: int | None, expected: list[int]) -> None:
    assert submitted(truncate_prompt_tokens=limit).prompt_token_ids.tolist() == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, [7, *b"abc"]), (1, [7]), (2, [7, *b"c"]), (4, [7, *b"abc"]), (9, [7, *b"abc"])]
)
def test_of_a_text_the_last_tokens_are_kept_behind_the_first_of_all(limit: int | None, expected: list[int]) -> None:
    params = pb.SamplingParams(truncate_prompt_tokens=limit)
    request = pb.GenerateRequest(text="abc", sampling_params=params)
    submission = submission_of(request, MODEL, SMALL.text(bos_token_id=7), None)
    assert submission.prompt_token_ids.tolist() == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [7, *b"abc"]),
        ({"add_special_tokens": True}, [7, *b"abc"]),
        ({"add_special_tokens": False}, [*b"abc"]),
        ({"add_special_tokens": False, "sampling_params": pb.SamplingParams(truncate_prompt_tokens=2)}, [*b"bc"]),
    ],
)
def test_a_text_that_spells_its_own_special_tokens_gets_no_other(fields: dict[str, Any], expected: list[int]) -> None:
    request = pb.GenerateRequest(text="abc", **fields)
    assert submission_of(request, MODEL, SMALL.text(bos_token_id=7), None).prompt_token_ids.tolist() == expected


def test_the_bos_token_that_a_template_spells_is_one_token() -> None:
    request = pb.GenerateRequest(text=f"{END}abc", add_special_tokens=False)
    submission = submission_of(request, MODEL, SMALL.text(bos_token_id=SMALL.end), None)
    assert submission.prompt_token_ids.tolist() == [SMALL.end, *b"abc"]


def test_a_prompt_is_not_cut_to_nothing() -> None:
    with pytest.raises(InvalidRequestError, match=r"^truncate_prompt_tokens is 0;"):
        submitted(truncate_prompt_tokens=0)
