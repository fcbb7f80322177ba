"""Rotary position embedding: its tables and its rotation; knows neither layers nor checkpoints."""

import math

import torch
from torch import Tensor

from blockplane.data_plane.models.config import RopeConfig


def linear_divisors(head_dim: int, factor: float) -> tuple[float, ...]:
    """Position interpolation: every frequency is divided alike (Chen et al. 2023, arXiv 2306.15595)."""
    return (factor,) * (head_dim // 2)


def llama3_divisors(
    head_dim: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> tuple[float, ...]:
    """Llama 3.1's scaling: long waves are divided by `factor`, short ones kept, those between interpolated.

    A wave that turns t times within `original_max_positions` is long below `low_freq_factor` turns and short above
    `high_freq_factor`; between them the divided and the kept frequency are mixed linearly in t.
    """
    divisors = []
    for pair in range(head_dim // 2):
        turns = original_max_positions * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(divisors)


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Tabulate the rotation of every position.

    Returns:
        float32 [num_positions, 2, 1, head_dim]: cosines, then sines with the first half negated, as `rotate` takes
        them; the third axis broadcasts over heads.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.divisors is not None:
        frequencies /= torch.tensor(rope.divisors, dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)[:, :, None]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of [num_tokens, num_heads, head_dim] by [num_tokens, 1, head_dim] tables.

    Su et al. 2021 (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, swapped, sin)
