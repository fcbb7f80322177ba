"""Draws the next token of every row at once; knows neither requests nor where logits come from.

A row's noise is one number in [0, 1), a function of its seed and of the position that is sampled, and nothing else: its
batch-mates, its place in the batch and its past in this process change nothing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.protos.plan import Int32Array

NOT_FINITE = -1
"""Stands for the token of a row whose logits hold a NaN or an infinity."""


def sample(
    logits: Tensor, temperature: NDArray[np.float32], seed: NDArray[np.uint64], positions: NDArray[np.int32]
) -> Int32Array:
    """Choose one token per row.

    Args:
        logits: float32 [num_rows, vocab_size].
        temperature: float32 [num_rows]; 0 = greedy, the lowest id among equals.
        seed: uint64 [num_rows].
        positions: int32 [num_rows], the position that the new token takes in its sequence.

    Returns:
        int32 [num_rows]: token ids, or NOT_FINITE.
    """
    token_ids = torch.argmax(logits, dim=-1)
    random_rows = np.flatnonzero(temperature)
    if random_rows.size:
        rows = torch.from_numpy(random_rows)
        noise = torch.from_numpy(uniform_noise(seed[random_rows], positions[random_rows]))
        scaled = logits[rows].double() / torch.from_numpy(temperature[random_rows])[:, None]
        token_ids[rows] = _invert(torch.softmax(scaled, dim=-1), noise)
    # One sum over a row is finite only if every entry is, short of an overflow that no sane logits reach.
    token_ids[~torch.isfinite(logits.sum(dim=-1))] = NOT_FINITE
    return token_ids.numpy().astype(np.int32)


def uniform_noise(seed: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64 [num_rows] in [0, 1): the SplitMix64 stream of each seed at each position (Steele, Lea, Flood 2014)."""
    state = seed + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    noise: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return noise


def _invert(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Inverse transform: the first token whose cumulative probability exceeds the noise. int64 [num_rows].

    The noise is scaled by the actual total, so that rounding in the sum never points past the last token.
    """
    cumulative = probabilities.cumsum(dim=-1)
    targets = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp_max(probabilities.shape[-1] - 1)
