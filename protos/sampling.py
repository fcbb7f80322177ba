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

    Attributes:
        max_tokens: output tokens at most; at least 1.
        temperature: 0 = greedy.
        seed: 64 bits; None until the engine accepts the request and draws one.
        stop_token_ids: ids that end the text, besides the model's end-of-text ids.
        ignore_eos: go on past the model's end-of-text ids.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


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
