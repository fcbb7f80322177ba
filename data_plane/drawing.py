"""Draws tokens by inverse transform: one number in [0, 1) for each row picks one of its tokens. Knows no requests.

This is torch's way, for any device; where logits lie on a CPU, `kernels.native.sampling` is its faster twin.

A row's noise is a function of its seed and of the position that is sampled, and nothing else: its batch-mates, its
place in the batch and its past in this process change nothing. Sums run in float64, one term after the other, so that
what others in the batch ask for does not change them either.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.data_plane.likeliest import Candidates, likeliest
from blockplane.protos.plan import IntArray

FEW_CANDIDATES = 256
"""So many of a row's likeliest tokens are tried first where it sets no top-k: they hold most texts' top-p."""
MANY_CANDIDATES = 1024
"""The largest top-k that a batch is tried with at once; beyond it few rows are worked on at a time."""

_ENTRIES_AT_ONCE = 2**18
"""Of whole vocabularies, so many float64 are held at a time, or one row's: what stays in a core's cache."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens each row draws from; [num_rows] columns.

    Attributes:
        top_k: int64, 1 .. vocab_size, or 0 = all.
        top_p, min_p: float64.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def of(self, rows: Tensor) -> "Truncation":
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def uniform_noise(seed: NDArray[np.uint64], positions: IntArray) -> NDArray[np.float64]:
    """float64 [num_rows] in [0, 1): the SplitMix64 stream of each seed at each position (Steele, Lea, Flood 2014)."""
    state = seed + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    noise: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return noise


def draw_from_all(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """Draw from the whole softmax.

    Args:
        logits: float32 [num_rows, vocab_size].
        temperature, noise: float64 [num_rows]; temperatures are above 0.

    Returns:
        int64 [num_rows].
    """
    every = torch.arange(len(logits), device=logits.device)
    return torch.cat(
        [
            _invert(_weights(logits[rows], temperature[rows]).cumsum(1), noise[rows])
            for rows in _pieces(every, logits.shape[1])
        ]
    )


def draw_from_likeliest(logits: Tensor, temperature: Tensor, noise: Tensor, truncation: Truncation) -> Tensor:
    """Draw from what top-k, top-p and min-p leave; arguments and result as of `draw_from_all`.

    A few of the likeliest tokens usually hold all that is left. Rows where they do not are drawn again with more of
    them, up to all, to the same result as if all rows had been sorted.
    """
    unsettled, num_candidates = torch.arange(len(logits), device=logits.device), _num_first(truncation.top_k)
    all_weight = _weights_of_all(logits, temperature, (truncation.top_k == 0) & (truncation.top_p < 1))
    token_ids = torch.empty_like(truncation.top_k)
    while unsettled.numel():
        left = []
        pieces = _pieces(unsettled, logits.shape[1]) if num_candidates > MANY_CANDIDATES else (unsettled,)
        for rows in pieces:
            part = logits if len(rows) == len(logits) else logits[rows]
            candidates = likeliest(part, num_candidates)
            token_ids[rows], is_settled = _draw_from_first(
                candidates, logits.shape[1], temperature[rows], noise[rows], truncation.of(rows), all_weight[rows]
            )
            left.append(rows[~is_settled])
        unsettled, num_candidates = torch.cat(left), num_candidates * 16
    return token_ids


def _num_first(top_k: Tensor) -> int:
    """How many candidates are tried first: enough for every top-k that is not out of the common."""
    reach = torch.where(top_k == 0, FEW_CANDIDATES, top_k)
    return int(torch.where(reach <= MANY_CANDIDATES, reach, FEW_CANDIDATES).max())


def _draw_from_first(
    candidates: Candidates,
    vocab_size: int,
    temperature: Tensor,
    noise: Tensor,
    truncation: Truncation,
    all_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw from what is left of each row's first candidates; int64 [num_rows], and bool: no other token is left.

    `all_weight`: float64 [num_rows], the whole vocabulary's, where top-p is a share of that.
    """
    num_candidates = candidates.logits.shape[1]
    top_k = torch.where(truncation.top_k == 0, vocab_size, truncation.top_k)
    weights = _weights(candidates.logits, temperature)
    cumulative = weights.cumsum(1)
    # Top-p is a share of what top-k leaves.
    in_top_k = top_k.clamp_max(num_candidates)[:, None]
    total = torch.where(truncation.top_k == 0, all_weight, cumulative.gather(1, in_top_k - 1).squeeze(1))
    needed = torch.where(truncation.top_p < 1, truncation.top_p * total, torch.inf)[:, None]
    # Each condition holds for a row's first tokens, up to somewhere.
    is_left = (
        (torch.arange(num_candidates, device=weights.device) < in_top_k)
        & (torch.nn.functional.pad(cumulative, (1, -1)) < needed)
        & (weights >= truncation.min_p[:, None])
    )
    num_left = is_left.sum(1).clamp_min(1)
    index = _invert(cumulative, noise, num_left)
    is_settled = (top_k <= num_candidates) | ((truncation.top_k == 0) & (num_left < num_candidates))
    return candidates.token_ids.gather(1, index[:, None]).squeeze(1), is_settled


def _pieces(rows: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    """Rows, [num_rows], in pieces that are worked on at once."""
    return torch.split(rows, max(1, _ENTRIES_AT_ONCE // vocab_size))


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """float64: each token's probability as a share of the likeliest one's."""
    # Unlike the quotients, the differences are finite at any temperature.
    weights = logits.double()
    weights -= logits.amax(1, keepdim=True)
    weights /= temperature[:, None]
    return weights.exp_()


def _weights_of_all(logits: Tensor, temperature: Tensor, asks: Tensor) -> Tensor:
    """float64 [num_rows]: the weight of its whole vocabulary for each row that asks, bool [num_rows]; else 0."""
    totals = torch.zeros_like(temperature)
    for rows in _pieces(torch.nonzero(asks).squeeze(1), logits.shape[1]):
        totals[rows] = _weights(logits[rows], temperature[rows]).cumsum(1)[:, -1]
    return totals


def _invert(cumulative: Tensor, noise: Tensor, num_left: Tensor | None = None) -> Tensor:
    """The first of each row's tokens, or of its first `num_left`, whose cumulative weight exceeds its share of their
    total: int64 [num_rows].

    The noise is scaled by the actual total, so that rounding never points past the last one.
    """
    last = torch.full_like(noise, cumulative.shape[1] - 1, dtype=torch.int64) if num_left is None else num_left - 1
    targets = noise[:, None] * cumulative.gather(1, last[:, None])
    return torch.minimum(torch.searchsorted(cumulative, targets, right=True).squeeze(1), last)
