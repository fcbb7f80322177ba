"""What a client gets back, as frozen values, and how they are read off the wire; knows no connection."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockplane.protos.delivery_wire import FINISH_REASON_FROM_PROTO
from blockplane.protos.errors import ProtocolError
from blockplane.protos.finish import FinishReason
from blockplane.protos.structured import StructuredOutput, check_structured_output
from blockplane.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole continuation; the prompt's include the BOS token that the server put before it.

    `num_cached_tokens` of the prompt were found in the server's prefix cache and not computed.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was to the model, as a natural logarithm, and which ids were the likeliest in its place."""

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a continuation gained since the last one; `finish_reason` and `usage` are None in all but its last.

    Attributes:
        sample_index: which of the continuations that were asked for, from 0.
        logprobs: one for each of `token_ids`; None where none are asked for, or no token came.
        prompt_logprobs: of the prompt's next tokens, from its second on; None but in those deltas of the first sample
            that tell them, before its first token.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage | None
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client may know of the model.

    Attributes:
        bos_token_id: None where text prompts get none.
        chat_template: Jinja that makes a prompt of a chat, in which the BOS and EOS tokens are spelled so; None where
            the model has none.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None


def delta_from_proto(response: pb.GenerateResponse) -> Delta:
    """Raises ProtocolError if the finish reason is none that is known here."""
    reason, usage = response.finish_reason, response.usage
    has_ended = reason != pb.FINISH_REASON_UNSPECIFIED
    if has_ended and reason not in FINISH_REASON_FROM_PROTO:
        raise ProtocolError(f"unknown finish reason {reason}; run the same version of client and server.")
    return Delta(
        tuple(response.token_ids),
        response.text,
        FINISH_REASON_FROM_PROTO[reason] if has_ended else None,
        Usage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens) if has_ended else None,
        sample_index=response.sample_index,
        logprobs=_logprobs_from_proto(response.logprobs),
        prompt_logprobs=_logprobs_from_proto(response.prompt_logprobs),
    )


def _logprobs_from_proto(logprobs: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...] | None:
    told = (
        TokenLogprobs(token.token_id, token.logprob, tuple(token.top_token_ids), tuple(token.top_logprobs))
        for token in logprobs
    )
    return tuple(told) or None


def structured_fields(structured: StructuredOutput | None) -> dict[str, Any]:
    """The one field of a request's sampling parameters that says what the output's text must be; none for any text.

    Raises InvalidRequestError if it is none.
    """
    if structured is None:
        return {}
    check_structured_output(structured)
    match structured.kind:
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": pb.Choice(texts=json.loads(structured.text))}
        case kind:
            return {kind: structured.text}


def served_model_from_proto(response: pb.GetModelInfoResponse) -> ServedModel:
    return ServedModel(
        name=response.name,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        eos_token_ids=tuple(response.eos_token_ids),
        bos_token_id=response.bos_token_id if response.HasField("bos_token_id") else None,
        chat_template=response.chat_template if response.HasField("chat_template") else None,
        bos_token=response.bos_token if response.HasField("bos_token") else None,
        eos_token=response.eos_token if response.HasField("eos_token") else None,
    )
