"""What each sampling parameter means, for one row in plain numpy float64; knows no batches, prefilters or state."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockplane.protos.sampling import SamplingParams

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Left:
    """The tokens that a row draws from, in the order of its inverse transform, and their weights.

    `margin`: how far, as a share, the nearest of all decisions was from going the other way.
    """

    token_ids: list[int]
    weights: Floats
    margin: float

    def draw(self, noise: float) -> tuple[int, float]:
        """The token for a number in [0, 1), and how far the number is from another token's."""
        cumulative = np.cumsum(self.weights) / self.weights.sum()
        index = min(int(np.searchsorted(cumulative, noise, side="right")), len(cumulative) - 1)
        edges = np.append(cumulative[:-1], [-1.0, 2.0])
        return self.token_ids[index], float(np.abs(edges - noise).min())

    def probabilities(self, vocab_size: int) -> Floats:
        probabilities = np.zeros(vocab_size)
        probabilities[self.token_ids] = self.weights / self.weights.sum()
        return probabilities


def changed_logits(
    logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int], eos: tuple[int, ...] = ()
) -> NDArray[np.float32]:
    """What allowed ids, bans, biases and penalties make of one row's logits."""
    changed = logits.copy()
    for token_id in range(len(changed)):
        if is_banned(token_id, params, prompt, output, eos):
            changed[token_id] = -np.inf
        changed[token_id] += np.float32(dict(params.logit_bias).get(token_id, 0.0))
        changed[token_id] = penalized(float(changed[token_id]), token_id, params, prompt, output)
    return changed


def is_banned(
    token_id: int, params: SamplingParams, prompt: list[int], output: list[int], eos: tuple[int, ...]
) -> bool:
    text = [*prompt, *output, token_id]
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    return (
        (params.allowed_token_ids is not None and token_id not in params.allowed_token_ids)
        or (len(output) < params.min_tokens and token_id in ends)
        or any(len(word) <= len(text) and tuple(text[-len(word) :]) == word for word in params.bad_words)
    )


def penalized(logit: float, token_id: int, params: SamplingParams, prompt: list[int], output: list[int]) -> float:
    if token_id in prompt or token_id in output:
        logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    logit -= params.frequency_penalty * output.count(token_id)
    return logit - params.presence_penalty * (token_id in output)


def left(logits: NDArray[np.float32], params: SamplingParams) -> Left:
    """What temperature, top-k, top-p and min-p leave of one row's changed logits; the temperature is above 0."""
    scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    weights, margins = np.exp(scaled), [1.0]
    if not params.top_k and params.top_p == 1 and not params.min_p:
        return Left(list(range(len(logits))), weights, 1.0)
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    order = order[: params.top_k or None]
    kept, mass, total = [], 0.0, weights[order].sum()
    for token_id in order:
        if params.top_p < 1:
            margins.append(abs(mass / total - params.top_p))
        margins.append(abs(weights[token_id] - params.min_p) if weights[token_id] < 1 else 1.0)
        if (params.top_p < 1 and mass >= params.top_p * total) or weights[token_id] < params.min_p:
            break
        kept.append(token_id)
        mass += weights[token_id]
    return Left(kept, weights[kept], min(margins))
