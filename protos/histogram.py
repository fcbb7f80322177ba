"""A histogram as Prometheus has them: how many observations lie below each of some bounds. Knows no names."""

from bisect import bisect_left
from collections.abc import Sequence

REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""vLLM's bounds for times that are a whole request's (vllm/v1/metrics/loggers.py)."""


class Histogram:
    """Of non-negative values. One thread observes, any may read: there is never less in it than a moment before.

    Attributes:
        bounds: ascending; what is equal to a bound lies below it.
        counts: of observations between each bound and the one before it, and, last, above all of them.
        sum: of all observations.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
