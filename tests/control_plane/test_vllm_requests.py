"""What a request of the public vLLM engine protocol comes to in our own: every field, and what its zeros mean."""

from dataclasses import replace
from typing import Any

import pytest
from client_service import MODEL, PROMPT, VLLM_PROMPT
from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.control_plane.frontend.vllm_requests import request_of
from blockplane.protos.errors import UnsupportedError
from blockplane.protos.structured import STRUCTURED_KINDS
from blockplane.v1 import inference_pb2 as pb

FIELDS = vllm.SamplingParams.DESCRIPTOR.fields_by_name
NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}
"""What the protocol cannot leave out, as our own says the same."""


def params_of(**sampling: Any) -> pb.SamplingParams:
    request = vllm.GenerateRequest(tokenized=VLLM_PROMPT, sampling_params=vllm.SamplingParams(**sampling))
    return request_of(request, MODEL).sampling_params


def test_a_bare_request_leaves_the_defaults_to_the_model() -> None:
    assert request_of(vllm.GenerateRequest(tokenized=VLLM_PROMPT, request_id="r"), MODEL) == pb.GenerateRequest(
        request_id="r", token_ids=PROMPT, whole_output=True, sampling_params=pb.SamplingParams(**NEUTRAL)
    )


def test_a_text_and_a_stream_and_several_samples_are_what_they_are() -> None:
    request = vllm.GenerateRequest(text="hi", stream=True, sampling_params=vllm.SamplingParams(n=3))
    ours = request_of(request, MODEL)
    assert (ours.text, ours.whole_output, ours.num_samples) == ("hi", False, 3)


def test_every_parameter_is_passed_on() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 5],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 20,
        "seed": 42,
        "include_stop_str_in_output": True,
        "logit_bias": {7: -1.5},
        "truncate_prompt_tokens": 2,
    }
    constraints = {field.name for field in vllm.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    assert {*given} == {*FIELDS} - constraints - {"n", "grammar_from_first_token"}
    assert params_of(**given) == pb.SamplingParams(**given)


def test_zeros_of_the_fields_that_have_no_presence_are_defaults_and_of_those_that_have_it_zeros() -> None:
    assert params_of(top_p=0, repetition_penalty=0) == pb.SamplingParams(**NEUTRAL)
    zeros = {"temperature": 0, "max_tokens": 0, "logprobs": 0, "seed": 0}
    assert params_of(**zeros) == pb.SamplingParams(**NEUTRAL, **zeros)


def test_a_seed_below_zero_is_one_of_its_own() -> None:
    assert [params_of(seed=seed).seed for seed in (-1, -(2**31), 2**31 - 1)] == [2**64 - 1, 2**64 - 2**31, 2**31 - 1]


def test_a_prompt_may_be_cut_to_what_leaves_room_for_one_token() -> None:
    assert params_of(truncate_prompt_tokens=-1).truncate_prompt_tokens == MODEL.max_model_len - 1
    short = replace(MODEL, max_model_len=8)
    request = vllm.GenerateRequest(
        tokenized=VLLM_PROMPT, sampling_params=vllm.SamplingParams(truncate_prompt_tokens=-1)
    )
    assert request_of(request, short).sampling_params.truncate_prompt_tokens == 7


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"choice": vllm.ChoiceConstraint(choices=["a", "b"])}, {"choice": pb.Choice(texts=["a", "b"])}),
    ],
)
def test_constraints_are_what_our_own_are_of_the_same_names(
    constraint: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert {*constraint} <= {*STRUCTURED_KINDS}
    params = params_of(**constraint, grammar_from_first_token=True)
    assert params == pb.SamplingParams(**NEUTRAL, **expected)


def test_every_field_of_a_request_is_served_or_refused_by_its_name() -> None:
    """Fields that a later version of the protocol brings are refused, too, as soon as this one is installed."""
    served = {"request_id", "tokenized", "text", "sampling_params", "stream"}
    for field in vllm.GenerateRequest.DESCRIPTOR.fields:
        if field.name in served:
            continue
        request = vllm.GenerateRequest(tokenized=VLLM_PROMPT)
        if field.message_type is None:
            setattr(request, field.name, "x" if field.name.endswith("json") else 1)
        elif field.name.startswith("extra"):
            getattr(request, field.name).add()
        else:
            getattr(request, field.name).SetInParent()
        with pytest.raises(UnsupportedError, match=field.name):
            request_of(request, MODEL)
