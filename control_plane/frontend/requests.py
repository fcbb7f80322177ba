"""What a client's request means: prompt to ids, parameters to checked values, absent ones to defaults. No streams."""

import secrets
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from blockplane.control_plane.frontend.output import TextParams
from blockplane.control_plane.frontend.stop_texts import check_stop_texts
from blockplane.control_plane.frontend.text import Text
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import InvalidRequestError, invalid_parameter
from blockplane.protos.model import ModelInfo
from blockplane.protos.sampling import (
    MAX_BAD_WORDS,
    MAX_SAMPLES,
    SamplingParams,
    check_sampling_params,
    check_token_ids,
)
from blockplane.protos.structured import StructuredOutput
from blockplane.protos.trace_context import current_traceparent
from blockplane.v1 import inference_pb2 as pb

MAX_PRIORITY = 1000
"""So far from 0, either way, a priority may be."""

_SAMPLING = {field.name for field in fields(SamplingParams)}
"""What is sampling by its name; the rest is text, or has a form of its own."""

_FOREVER_SECONDS = 365 * 24 * 3600.0
"""Callers without a deadline may send one that lies as far away as their language can say."""


def submission_of(
    request: pb.GenerateRequest, model: ModelInfo, text: Text, seconds_left: float | None, caller: str = ""
) -> Submission:
    """The request as the engine takes it, on no stream yet. Raises InvalidRequestError naming the field at fault."""
    check_stop_texts(request.sampling_params.stop)
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {request.priority}; choose {-MAX_PRIORITY} (first) to {MAX_PRIORITY}.", "priority"
        )
    if request.num_samples > MAX_SAMPLES:
        raise InvalidRequestError(f"num_samples is {request.num_samples}; choose 1 to {MAX_SAMPLES}.", "num_samples")
    return Submission(
        stream_id=0,
        request_id=request.request_id or secrets.token_hex(8),
        prompt_token_ids=np.array(_prompt_token_ids(request, model, text), np.int32),
        params=_sampling_params(request.sampling_params, model, text),
        num_samples=request.num_samples or 1,
        priority=request.priority,
        timeout_seconds=None if seconds_left is None or seconds_left > _FOREVER_SECONDS else seconds_left,
        cache_salt=request.cache_salt,
        skip_prefix_cache=request.skip_prefix_cache,
        caller=caller,
        frontend_state=frontend_state_of(request),
        traceparent=current_traceparent.get(),
    )


def frontend_state_of(request: pb.GenerateRequest) -> bytes:
    """What of a request is needed to resume it: all but the prompt, which the engine has as ids."""
    state = pb.GenerateRequest()
    state.CopyFrom(request)
    for prompt in ("text", "token_ids"):
        state.ClearField(prompt)
    return state.SerializeToString()


def text_params_of_state(frontend_state: bytes) -> TextParams:
    """How the request wants its output told that left this behind."""
    return text_params_of(pb.GenerateRequest.FromString(frontend_state))


def text_params_of(request: pb.GenerateRequest, *, is_told: bool = True) -> TextParams:
    """How a request wants its output told. `is_told`: whether its text is told at all."""
    params = request.sampling_params
    skips = params.skip_special_tokens or not params.HasField("skip_special_tokens")
    spaces = params.spaces_between_special_tokens or not params.HasField("spaces_between_special_tokens")
    return TextParams(
        stop=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=skips,
        spaces_between_special_tokens=spaces,
        is_told=is_told,
        is_whole=request.whole_output,
    )


def _prompt_token_ids(request: pb.GenerateRequest, model: ModelInfo, text: Text) -> list[int]:
    """The prompt as ids that the model has. Raises InvalidRequestError if there is none, or an id is out of range."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("the request has no prompt; set text or token_ids.", "prompt")
    num_kept = _num_kept(request.sampling_params)
    if kind == "text":
        adds_bos = request.add_special_tokens or not request.HasField("add_special_tokens")
        token_ids = text.encode(request.text, num_kept, add_bos_token=adds_bos)
    else:
        token_ids = list(request.token_ids.ids[-(num_kept or 0) :])
    if not token_ids:
        raise InvalidRequestError(f"the prompt's {kind} holds no token; send at least one.", kind)
    check_token_ids("prompt", token_ids, model.vocab_size)
    return token_ids


def _num_kept(params: pb.SamplingParams) -> int | None:
    """How many of the prompt's last tokens are used; None = all."""
    if not params.HasField("truncate_prompt_tokens"):
        return None
    if not params.truncate_prompt_tokens:
        raise invalid_parameter(
            "truncate_prompt_tokens", "truncate_prompt_tokens is 0; keep at least 1 token, or leave it out for all."
        )
    return params.truncate_prompt_tokens


def _sampling_params(proto: pb.SamplingParams, model: ModelInfo, text: Text) -> SamplingParams:
    """The request's parameters, checked, with the model's defaults where it sets none."""
    given: dict[str, Any] = {
        field.name: value
        for field, value in proto.ListFields()
        if field.name in _SAMPLING and field.has_presence and field.message_type is None
    }
    # Where no number of tokens is given, the end is the model's: max_model_len, which the engine watches.
    defaults = {"max_tokens": model.max_model_len, "temperature": model.defaults.temperature}
    params = SamplingParams(
        **(defaults | given),
        stop_token_ids=tuple(proto.stop_token_ids),
        ignore_eos=proto.ignore_eos,
        logit_bias=tuple(proto.logit_bias.items()),
        allowed_token_ids=tuple(proto.allowed_token_ids.ids) if proto.HasField("allowed_token_ids") else None,
        bad_words=tuple(_bad_words(proto, model, text)),
        structured=_structured_output(proto),
    )
    check_sampling_params(params, model.vocab_size)
    return params


def _structured_output(proto: pb.SamplingParams) -> StructuredOutput | None:
    """What the output's text must be; None = any text."""
    match proto.WhichOneof("structured"):
        case None:
            return None
        case "json_object":
            return StructuredOutput("json_object") if proto.json_object else None
        case "choice":
            return StructuredOutput.choice(proto.choice.texts)
        case kind:
            return StructuredOutput(kind, getattr(proto, kind))


def _bad_words(proto: pb.SamplingParams, model: ModelInfo, text: Text) -> Iterator[tuple[int, ...]]:
    """The id sequences that neither kind of bad words lets come, checked as far as their field's name would be lost."""
    num_words = len(proto.bad_words) + len(proto.bad_word_token_ids)
    if num_words > MAX_BAD_WORDS:
        raise invalid_parameter(
            "bad_words", f"bad_words and bad_word_token_ids are {num_words}; send {MAX_BAD_WORDS} at most."
        )
    for word in proto.bad_words:
        yield from map(tuple, text.spellings(word))
    for ids in proto.bad_word_token_ids:
        if not ids.ids:
            raise invalid_parameter("bad_word_token_ids", "bad_word_token_ids holds an empty sequence; leave it out.")
        check_token_ids("sampling_params.bad_word_token_ids", ids.ids, model.vocab_size)
        yield tuple(ids.ids)
