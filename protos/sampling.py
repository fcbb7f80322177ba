"""Sampling parameters and their limits, checked alike at every door; knows nothing of how a token is drawn."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from blockplane.protos.errors import InvalidRequestError, invalid_parameter
from blockplane.protos.structured import StructuredOutput, check_structured_output

MAX_TEMPERATURE = 100.0
MAX_SAMPLES = 64
"""Continuations that may be asked for of one prompt."""
MAX_TOP_K = 2**31 - 1
MAX_PENALTY = 2.0
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 300
MAX_BAD_WORD_LEN = 64
"""Ids of one bad word."""

_ABOVE_0 = math.nextafter(0, 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is continued.

    Logits are changed in this order: ids that are not allowed, logit bias, penalties, temperature, then top-k, top-p
    and min-p on what the temperature made of them; greedy rows take the best of what the first three leave. Of equally
    likely ids the lower one goes first. A request to which no id is left ends as if its logits were not finite.

    Attributes:
        max_tokens: output tokens at most; at least 1.
        temperature: 0 = greedy.
        seed: 64 bits; None until the engine accepts the request and draws one.
        stop_token_ids: ids that end the text, besides the model's end-of-text ids.
        ignore_eos: go on past the model's end-of-text ids.
        min_tokens: output tokens before which neither an end of text nor a stop id may come.
        top_k: draw from the k likeliest; 0 = from all.
        top_p: draw from the likeliest that together have this probability; 1 = from all.
        min_p: draw from those with at least this share of the likeliest one's probability; 0 = from all.
        presence_penalty: taken from the logit of every id that the output holds.
        frequency_penalty: taken from it once for each time.
        repetition_penalty: divides the positive and multiplies the negative logits of ids in prompt or output; 1 = none
            (Keskar et al. 2019, arXiv 1909.05858).
        logit_bias: (id, number added to its logit) pairs.
        allowed_token_ids: only these may come; None = all.
        bad_words: id sequences that may not be completed, wherever in prompt or output they begin.
        logprobs: how many of the likeliest ids to tell at each output token, beside its own log-probability; None =
            tell nothing, 0 = only its own. Of the model's distribution, before any of the above.
        prompt_logprobs: the same for each prompt token but the first.
        structured: what the output's text must be: only ids with which it still can be may come, an end-of-text id only
            where it is. They count among the ids that are not allowed. None = any text.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError naming the first field that is out of range."""
    if params.max_tokens < 1:
        raise invalid_parameter("max_tokens", f"max_tokens is {params.max_tokens}; ask for at least 1 token.")
    if params.seed is not None and not 0 <= params.seed < 2**64:
        raise invalid_parameter("seed", f"seed is {params.seed}; choose an unsigned 64-bit number.")
    _check_range("min_tokens", params.min_tokens, 0, params.max_tokens, f"0 to max_tokens, {params.max_tokens}")
    _check_range("temperature", params.temperature, 0, MAX_TEMPERATURE, f"0 (greedy) to {MAX_TEMPERATURE:g}")
    _check_range("top_k", params.top_k, 0, MAX_TOP_K, f"0 (all) to {MAX_TOP_K}")
    _check_range("top_p", params.top_p, _ABOVE_0, 1, "a number above 0, up to 1 (all)")
    _check_range("min_p", params.min_p, 0, 1, "0 (all) to 1")
    for field in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(params, field)
        _check_range(field, penalty, -MAX_PENALTY, MAX_PENALTY, f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}")
    repetition = params.repetition_penalty
    choice = f"a number above 0, up to {MAX_PENALTY:g}; 1 is none"
    _check_range("repetition_penalty", repetition, _ABOVE_0, MAX_PENALTY, choice)
    check_token_ids("sampling_params.stop_token_ids", params.stop_token_ids, vocab_size)
    _check_logit_bias(params.logit_bias, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise invalid_parameter(
                "allowed_token_ids", "allowed_token_ids is empty, so that nothing may come; leave it out for all ids."
            )
        check_token_ids("sampling_params.allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_bad_words(params.bad_words, vocab_size)
    for field in ("logprobs", "prompt_logprobs"):
        if (num_logprobs := getattr(params, field)) is not None:
            _check_range(field, num_logprobs, 0, MAX_LOGPROBS, f"0 (only the token's own) to {MAX_LOGPROBS}")
    _check_structured(params.structured, params.ignore_eos)


def _check_structured(structured: StructuredOutput | None, ignore_eos: bool) -> None:
    if structured is None:
        return
    check_structured_output(structured)
    if ignore_eos:
        raise invalid_parameter(
            "ignore_eos",
            f"ignore_eos is set beside {structured.kind}, whose output ends with an end of text; leave one of them"
            " out.",
        )


def _check_range(field: str, value: float, low: float, high: float, choice: str) -> None:
    # A NaN lies nowhere.
    if not low <= value <= high:
        raise invalid_parameter(field, f"{field} is {value}; choose {choice}.")


def _check_logit_bias(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise invalid_parameter(
            "logit_bias", f"logit_bias has {len(logit_bias)} entries; send at most {MAX_LOGIT_BIASES}."
        )
    token_ids = [token_id for token_id, _ in logit_bias]
    check_token_ids("sampling_params.logit_bias", token_ids, vocab_size)
    if len(set(token_ids)) < len(token_ids):
        raise invalid_parameter("logit_bias", "logit_bias names an id twice; send one number for each.")
    for token_id, bias in logit_bias:
        if not abs(bias) <= MAX_LOGIT_BIAS:
            limits = f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise invalid_parameter("logit_bias", f"logit_bias of id {token_id} is {bias}; choose {limits}.")


def _check_bad_words(bad_words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    if len(bad_words) > MAX_BAD_WORDS:
        raise invalid_parameter("bad_words", f"bad_words has {len(bad_words)} entries; send at most {MAX_BAD_WORDS}.")
    for word in bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_LEN:
            raise invalid_parameter(
                "bad_words", f"bad_words has one of {len(word)} ids; send 1 to {MAX_BAD_WORD_LEN} for each."
            )
        check_token_ids("sampling_params.bad_words", word, vocab_size)


def check_token_ids(field: str, token_ids: ArrayLike, vocab_size: int) -> None:
    """Raise InvalidRequestError naming the first id that lies outside 0 .. vocab_size - 1; `field` is a path."""
    ids = np.asarray(token_ids, np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InvalidRequestError(
            f"{field.rpartition('.')[2]} holds {outside[0]}; this model's token ids run from 0 to {vocab_size - 1}.",
            field,
        )
