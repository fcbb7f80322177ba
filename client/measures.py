"""What a run of requests amounts to: latencies by percentile, throughput, failures. Pure; knows no server."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockplane.client.load import Outcome

PERCENTILES = (50, 90, 99)

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of some seconds. `percentiles` are by PERCENTILES, between two values in proportion."""

    mean: float
    percentiles: tuple[float, ...]
    largest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run; distributions are None where there is nothing to tell of.

    Attributes:
        seconds: from the beginning to the last end.
        failures, sentences: by gRPC status, how many requests failed, and what the first of them was told.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: of the requests that succeeded.
        time_to_first_token: from when a request was due to its first token.
        inter_token: between a sample's consecutive tokens; those that came together share the time before them.
        end_to_end: from when a request was due to its end.
        lateness: of the sending behind what was due; what these clients, not the server, are behind.
    """

    seconds: float
    num_succeeded: int
    failures: Mapping[str, int]
    sentences: Mapping[str, str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token: Distribution | None
    inter_token: Distribution | None
    end_to_end: Distribution | None
    lateness: Distribution | None

    @property
    def requests_per_second(self) -> float:
        return self.num_succeeded / self.seconds if self.seconds else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Latencies are those of requests that succeeded."""
    good = [outcome for outcome in outcomes if outcome.failure is None]
    failed = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    usages = [outcome.usage for outcome in good if outcome.usage is not None]
    return Summary(
        seconds=max((outcome.ended for outcome in outcomes), default=0.0),
        num_succeeded=len(good),
        failures=dict(Counter(status for status, _ in failed)),
        sentences=dict(reversed(failed)),
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        time_to_first_token=_distribution(first_token_seconds(good)),
        inter_token=_distribution(inter_token_seconds(good)),
        end_to_end=_distribution(outcome.ended - outcome.due for outcome in good),
        lateness=_distribution(outcome.sent - outcome.due for outcome in outcomes),
    )


def first_token_seconds(outcomes: Iterable[Outcome]) -> list[float]:
    """Of each that has a token."""
    return [outcome.arrivals[0].seconds - outcome.due for outcome in outcomes if outcome.arrivals]


def inter_token_seconds(outcomes: Iterable[Outcome]) -> list[float]:
    """One for each token behind the first ones of a sample; k that came together count a kth of the wait each."""
    gaps: list[float] = []
    for outcome in outcomes:
        last: dict[int, float] = {}
        for arrival in outcome.arrivals:
            before = last.get(arrival.sample_index)
            if before is not None:
                gaps += [(arrival.seconds - before) / arrival.num_tokens] * arrival.num_tokens
            last[arrival.sample_index] = arrival.seconds
    return gaps


def tokens_per_second(outcomes: Iterable[Outcome], bin_seconds: float) -> tuple[Seconds, Seconds]:
    """How fast output tokens came: the beginning of each bin, float64 [n], and its tokens a second, float64 [n]."""
    arrivals = [arrival for outcome in outcomes for arrival in outcome.arrivals]
    bins = np.array([int(arrival.seconds / bin_seconds) for arrival in arrivals], np.int64)
    counts = np.bincount(bins, weights=[arrival.num_tokens for arrival in arrivals])
    return np.arange(len(counts), dtype=np.float64) * bin_seconds, counts / bin_seconds


def _distribution(seconds: Iterable[float]) -> Distribution | None:
    values = np.fromiter(seconds, np.float64)
    if not values.size:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    return Distribution(float(values.mean()), tuple(map(float, percentiles)), float(values.max()))
