"""Sampling parameters and their limits, checked alike at every door; knows nothing of how a token is drawn."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from blockplane.protos.errors import InvalidRequestError

MAX_TEMPERATURE = 100.0
MAX_SAMPLES = 64
"""Continuations that may be asked for of one prompt."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is continued.

    Logits are changed in this order: ids that are not allowed, logit bias, penalties, temperature, then top-k, top-p and
    min-p on what the temperature made of them; greedy rows take the best of what the first three leave.

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
        bad_words: id sequences that may not be completed.
        logprobs: how many of the likeliest ids to tell at each output token, beside its own log-probability; None = tell
            nothing, 0 = only its own. Of the model's distribution, before any of the above.
        prompt_logprobs: the same for each prompt token but the first.
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


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError naming the first field that is out of range."""
    if params.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {params.max_tokens}; ask for at least 1 token.")
    if not (math.isfinite(params.temperature) and 0 <= params.temperature <= MAX_TEMPERATURE):
        raise InvalidRequestError(f"temperature is {params.temperature}; choose 0 (greedy) to {MAX_TEMPERATURE:g}.")
    if params.seed is not None and not 0 <= params.seed < 2**64:
        raise InvalidRequestError(f"seed is {params.seed}; choose an unsigned 64-bit number.")
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def check_token_ids(field: str, token_ids: ArrayLike, vocab_size: int) -> None:
    """Raise InvalidRequestError naming `field` and the first id that lies outside 0 .. vocab_size - 1."""
    ids = np.asarray(token_ids, np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InvalidRequestError(f"{field} holds {outside[0]}; this model's token ids run from 0 to {vocab_size - 1}.")
