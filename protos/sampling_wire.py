"""Sampling parameters to protobuf and back, one form for frontends and workers; knows no message that carries them."""

from collections.abc import Sequence

import numpy as np

from blockplane.protos.columns import column_from_bytes, column_to_bytes
from blockplane.protos.errors import ProtocolError
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import STRUCTURED_KINDS, StructuredOutput
from blockplane.v1 import engine_pb2 as pb


def sampling_to_proto(params: SamplingParams) -> pb.SamplingSettings:
    return pb.SamplingSettings(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        stop_token_ids=_ids_to_bytes(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias_token_ids=_ids_to_bytes([token_id for token_id, _ in params.logit_bias]),
        logit_biases=[bias for _, bias in params.logit_bias],
        allowed_token_ids=None if params.allowed_token_ids is None else _ids_to_bytes(params.allowed_token_ids),
        bad_words=[_ids_to_bytes(word) for word in params.bad_words],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        structured=structured_to_proto(params.structured),
    )


def sampling_from_proto(proto: pb.SamplingSettings) -> SamplingParams:
    """Raises ProtocolError if the columns do not belong together."""
    biased_ids = _ids_from_bytes(proto.logit_bias_token_ids)
    if len(biased_ids) != len(proto.logit_biases):
        raise ProtocolError("the columns of a logit bias differ in length; run the same version everywhere.")
    return SamplingParams(
        max_tokens=proto.max_tokens,
        temperature=proto.temperature,
        seed=proto.seed if proto.HasField("seed") else None,
        stop_token_ids=_ids_from_bytes(proto.stop_token_ids),
        ignore_eos=proto.ignore_eos,
        min_tokens=proto.min_tokens,
        top_k=proto.top_k,
        top_p=proto.top_p,
        min_p=proto.min_p,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        repetition_penalty=proto.repetition_penalty,
        logit_bias=tuple(zip(biased_ids, proto.logit_biases, strict=True)),
        allowed_token_ids=_ids_from_bytes(proto.allowed_token_ids) if proto.HasField("allowed_token_ids") else None,
        bad_words=tuple(map(_ids_from_bytes, proto.bad_words)),
        logprobs=proto.logprobs if proto.HasField("logprobs") else None,
        prompt_logprobs=proto.prompt_logprobs if proto.HasField("prompt_logprobs") else None,
        structured=structured_from_proto(proto.structured) if proto.HasField("structured") else None,
    )


def structured_to_proto(structured: StructuredOutput | None) -> pb.StructuredOutput | None:
    return None if structured is None else pb.StructuredOutput(kind=structured.kind, text=structured.text)


def structured_from_proto(proto: pb.StructuredOutput) -> StructuredOutput:
    """Raises ProtocolError if its kind is unknown."""
    if proto.kind not in STRUCTURED_KINDS:
        raise ProtocolError(f"structured output of kind {proto.kind!r} is unknown; run the same version everywhere.")
    return StructuredOutput(proto.kind, proto.text)


def _ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    return column_to_bytes(np.array(token_ids, np.int32))


def _ids_from_bytes(data: bytes) -> tuple[int, ...]:
    return tuple(column_from_bytes(data).tolist())
