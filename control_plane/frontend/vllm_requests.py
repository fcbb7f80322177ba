"""What a request of the public vLLM engine protocol means in our own, and what of it is refused. Knows no streams."""

from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.protos.errors import InvalidRequestError, UnsupportedError, invalid_parameter
from blockplane.protos.model import ModelInfo
from blockplane.protos.sampling import MAX_LOGPROBS, MAX_SAMPLES
from blockplane.v1 import inference_pb2 as pb

_SERVED = {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
_UNSERVED_SAMPLING = {"structural_tag"}
_AS_THEY_ARE = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
)
_WHERE_NOT_ZERO = ("top_p", "repetition_penalty")
"""Without presence in the protocol, where their zero says that they are absent."""
_WHERE_PRESENT = ("temperature", "max_tokens")
_STRUCTURED = ("json_schema", "json_object", "regex", "grammar")


def request_of(request: vllm.GenerateRequest, model: ModelInfo) -> pb.GenerateRequest:
    """The same request to our own service, which checks what both protocols have.

    Raises:
        UnsupportedError: it has a field that we do not serve; the message names it.
        InvalidRequestError: a field has a value that only this protocol can carry.
    """
    _refuse_unserved(request)
    num_samples = request.sampling_params.n
    if num_samples > MAX_SAMPLES:
        raise invalid_parameter("n", f"n is {num_samples}; choose 1 to {MAX_SAMPLES}.")
    ours = pb.GenerateRequest(
        request_id=request.request_id,
        sampling_params=_sampling_params(request.sampling_params, model),
        num_samples=num_samples,
        whole_output=not request.stream,
    )
    kind = request.WhichOneof("input")
    if kind == "text":
        ours.text = request.text
    elif kind == "tokenized":
        # What it was made of, original_text, says nothing that the ids do not.
        ours.token_ids.ids.extend(request.tokenized.input_ids)
        if not ours.token_ids.ids:
            raise InvalidRequestError("tokenized holds no input_ids; send at least one.", "tokenized.input_ids")
    else:
        raise InvalidRequestError("the request has no input; set tokenized or text.", "input")
    return ours


def _refuse_unserved(request: vllm.GenerateRequest) -> None:
    names = {field.name for field, _ in request.ListFields()} - _SERVED
    names |= {field.name for field, _ in request.sampling_params.ListFields()} & _UNSERVED_SAMPLING
    if names:
        raise UnsupportedError(f"{', '.join(sorted(names))}: Blockplane does not serve that; leave it out.")
    if request.data_parallel_rank:
        rank = request.data_parallel_rank
        raise UnsupportedError(
            f"data_parallel_rank is {rank}; Blockplane chooses among its workers itself: leave it out."
        )


def _sampling_params(params: vllm.SamplingParams, model: ModelInfo) -> pb.SamplingParams:
    given: dict[str, Any] = {name: getattr(params, name) for name in _AS_THEY_ARE}
    given |= {name: value for name in _WHERE_NOT_ZERO if (value := getattr(params, name))}
    given |= {name: getattr(params, name) for name in _WHERE_PRESENT if params.HasField(name)}
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            given[name] = _num_logprobs(name, getattr(params, name))
    if params.HasField("seed"):
        # Ours has no sign.
        given["seed"] = params.seed % 2**64
    if params.HasField("truncate_prompt_tokens"):
        given["truncate_prompt_tokens"] = _num_kept(params.truncate_prompt_tokens, model)
    return pb.SamplingParams(**given, **_structured(params))


def _num_logprobs(name: str, value: int) -> int:
    if value < 0:
        raise invalid_parameter(name, f"{name} is {value}; choose 0 (only the token's own) to {MAX_LOGPROBS}.")
    return value


def _num_kept(value: int, model: ModelInfo) -> int:
    """-1 = as many as leave room for one more."""
    if value < -1:
        raise invalid_parameter(
            "truncate_prompt_tokens", f"truncate_prompt_tokens is {value}; choose a number, or -1 for all that fit."
        )
    return model.max_model_len - 1 if value == -1 else value


def _structured(params: vllm.SamplingParams) -> dict[str, Any]:
    kind = params.WhichOneof("constraint")
    if kind == "choice":
        return {"choice": pb.Choice(texts=params.choice.choices)}
    return {kind: getattr(params, kind)} if kind in _STRUCTURED else {}
