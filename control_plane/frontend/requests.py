"""What a client's request means: prompt to ids, parameters to checked values, absent ones to defaults. No streams."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blockplane.control_plane.frontend.stop_texts import check_stop_texts
from blockplane.control_plane.frontend.text import Text
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import InvalidRequestError
from blockplane.protos.model import ModelInfo
from blockplane.protos.sampling import (
    MAX_BAD_WORDS,
    MAX_SAMPLES,
    SamplingParams,
    check_sampling_params,
    check_token_ids,
)
from blockplane.v1 import inference_pb2 as pb

MAX_PRIORITY = 1000
"""So far from 0, either way, a priority may be."""

_FOREVER_SECONDS = 365 * 24 * 3600.0
"""Callers without a deadline may send one that lies as far away as their language can say."""


def submission_of(
    request: pb.GenerateRequest, model: ModelInfo, text: Text, seconds_left: float | None, caller: str = ""
) -> Submission:
    """The request as the engine takes it, on no stream yet. Raises InvalidRequestError naming the field at fault."""
    check_stop_texts(request.sampling_params.stop)
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequestError(f"priority is {request.priority}; choose {-MAX_PRIORITY} (first) to {MAX_PRIORITY}.")
    if request.num_samples > MAX_SAMPLES:
        raise InvalidRequestError(f"num_samples is {request.num_samples}; choose 1 to {MAX_SAMPLES}.")
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
    )


def frontend_state_of(request: pb.GenerateRequest) -> bytes:
    """What of a request is needed to resume it: all but the prompt, which the engine has as ids."""
    state = pb.GenerateRequest()
    state.CopyFrom(request)
    for prompt in ("text", "token_ids"):
        state.ClearField(prompt)
    return state.SerializeToString()


def stop_texts_of(frontend_state: bytes) -> Sequence[str]:
    return pb.GenerateRequest.FromString(frontend_state).sampling_params.stop


def _prompt_token_ids(request: pb.GenerateRequest, model: ModelInfo, text: Text) -> list[int]:
    """The prompt as ids that the model has. Raises InvalidRequestError if there is none, or an id is out of range."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("the request has no prompt; set text or token_ids.")
    token_ids = text.encode(request.text) if kind == "text" else list(request.token_ids.ids)
    if not token_ids:
        raise InvalidRequestError(f"the prompt's {kind} holds no token; send at least one.")
    check_token_ids("prompt", token_ids, model.vocab_size)
    return token_ids


def _sampling_params(proto: pb.SamplingParams, model: ModelInfo, text: Text) -> SamplingParams:
    """The request's parameters, checked, with the model's defaults where it sets none."""
    given: dict[str, Any] = {
        field.name: value for field, value in proto.ListFields() if field.has_presence and field.message_type is None
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
    )
    check_sampling_params(params, model.vocab_size)
    return params


def _bad_words(proto: pb.SamplingParams, model: ModelInfo, text: Text) -> Iterator[tuple[int, ...]]:
    """The id sequences that neither kind of bad words lets come, checked as far as their field's name would be lost."""
    num_words = len(proto.bad_words) + len(proto.bad_word_token_ids)
    if num_words > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words and bad_word_token_ids are {num_words}; send {MAX_BAD_WORDS} at most.")
    for word in proto.bad_words:
        yield from map(tuple, text.spellings(word))
    for ids in proto.bad_word_token_ids:
        if not ids.ids:
            raise InvalidRequestError("bad_word_token_ids holds an empty sequence; leave it out.")
        check_token_ids("bad_word_token_ids", ids.ids, model.vocab_size)
        yield tuple(ids.ids)
