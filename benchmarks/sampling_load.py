"""What a batch of rows costs in the sampler, beside the least that any sampler does. Knows neither rows nor requests.

The least is torch's arg max over the logits, which is the plain way to be greedy, and one more pass over them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from blockplane.data_plane.sampler import NO_LOGPROBS, SamplingBatch, sample

NUM_ROWS, VOCAB_SIZE = 64, 262_144
WAYS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top-k 64, top-p 0.95": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}
BUDGETS = {"top-k 64, top-p 0.95": 1.5}
"""By way, the ratio that it may have with torch's sampler, too."""


@dataclass(frozen=True, slots=True)
class SamplingFigure:
    """One way to sample: milliseconds, and their ratio to an arg max and one pass: medians of turns."""

    way: str
    milliseconds: float
    ratio: float
    budget: float | None = None

    @property
    def is_missed(self) -> bool:
        return self.budget is not None and self.ratio > self.budget


@torch.inference_mode()
def measure_sampling(
    num_turns: int, num_rows: int = NUM_ROWS, vocab_size: int = VOCAB_SIZE
) -> tuple[SamplingFigure, ...]:
    """Every way in turns, each turn with its own arg max and its own pass, so that a machine's pace cancels out."""
    # Spread as a model's logits are: a few ids hold most of the probability.
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    batches = {way: _batch(num_rows, **parameters) for way, parameters in WAYS.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-1, num_turns):
        least = _milliseconds(lambda: logits.argmax(dim=-1)) + _milliseconds(lambda: logits.sum(dim=-1))
        spent = {way: _milliseconds(lambda batch=batch: sample(logits, batch)) for way, batch in batches.items()}  # type: ignore[misc]
        if turn < 0:
            continue
        for way, milliseconds in spent.items():
            times[way].append(milliseconds)
            ratios[way].append(milliseconds / least)
    return tuple(
        SamplingFigure(way, statistics.median(times[way]), statistics.median(ratios[way]), BUDGETS.get(way))
        for way in WAYS
    )


def _batch(
    num_rows: int, temperature: float = 0.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingBatch:
    return SamplingBatch(
        seed=np.arange(num_rows, dtype=np.uint64),
        positions=np.full(num_rows, 1000, np.int32),
        temperature=np.full(num_rows, temperature),
        top_k=np.full(num_rows, top_k, np.int64),
        top_p=np.full(num_rows, top_p),
        min_p=np.full(num_rows, min_p),
        num_logprobs=np.full(num_rows, NO_LOGPROBS, np.int32),
    )


def _milliseconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)
