"""What measured runs amount to, as tables; pure, knows neither systems nor clocks nor what is enough."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from blockplane.client.alignment import aligned
from blockplane.client.load import Outcome
from blockplane.client.measures import first_token_seconds, inter_token_seconds, summarize

LONG_PROMPT = "w4-long"
"""The id of the request of W4 beside which the others decode."""


@dataclass(frozen=True, slots=True)
class Start:
    """Of one start of one system. `peak_bytes`: of all its processes, from its beginning to its end."""

    system: str
    repetition: int
    seconds_to_ready: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Used:
    """What a run used, as `Figures` has it; `busy_seconds`: of all cores."""

    peak_bytes: int
    cpu_seconds: Mapping[str, float]
    client_seconds: float
    busy_seconds: float
    outside_share: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run of one workload on one system; seconds and bytes, None where there is no such thing.

    Attributes:
        seconds: from the first request to the last end.
        first_..., between_...: to the first token, and between tokens, by percentile.
        decoding_p99: between tokens of those that decode while the long prompt computes. long_first: its first token.
        peak_bytes: of all its processes, during the run.
        cpu_seconds: by process.
        client_seconds: CPU seconds of the clients. other_cores: that everything else kept busy; much of it, and the
            run says little.
        outside_share: of all the system's CPU seconds, what is not the model's forward.
    """

    system: str
    workload: str
    repetition: int
    seconds: float
    output_tokens_per_second: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float
    decoding_p99: float | None
    long_first: float | None
    num_cached_tokens: int
    peak_bytes: int
    cpu_seconds: Mapping[str, float]
    client_seconds: float
    other_cores: float
    outside_share: float | None = None

    @property
    def total_cpu_seconds(self) -> float:
        return sum(self.cpu_seconds.values())


def figures_of(system: str, workload: str, repetition: int, outcomes: Sequence[Outcome], used: Used) -> Figures:
    """Raises RuntimeError if a request failed: who answers less is no faster."""
    for outcome in outcomes:
        if outcome.failure is not None:
            raise RuntimeError(f"{system} failed {outcome.name} of {workload}: {outcome.failure[1]}")
    summary = summarize(outcomes)
    first, between = first_token_seconds(outcomes), inter_token_seconds(outcomes)
    waits, long_first = beside_long_prompt(outcomes) or (None, None)
    others = used.busy_seconds - sum(used.cpu_seconds.values()) - used.client_seconds
    return Figures(
        system=system,
        workload=workload,
        repetition=repetition,
        seconds=summary.seconds,
        output_tokens_per_second=summary.output_tokens_per_second,
        first_p50=_percentile(first, 50),
        first_p99=_percentile(first, 99),
        between_p50=_percentile(between, 50),
        between_p99=_percentile(between, 99),
        decoding_p99=_percentile(waits, 99) if waits else None,
        long_first=long_first,
        num_cached_tokens=summary.num_cached_tokens,
        peak_bytes=used.peak_bytes,
        cpu_seconds=used.cpu_seconds,
        client_seconds=used.client_seconds,
        other_cores=max(0.0, others / summary.seconds),
        outside_share=used.outside_share,
    )


def beside_long_prompt(outcomes: Sequence[Outcome]) -> tuple[list[float], float] | None:
    """The others' seconds between tokens while the long prompt computes, and those to its own first token.

    A wait counts if any of it lies between the sending of the long prompt and its first token; tokens that come
    together share theirs. None = there is no long prompt.
    """
    long = next((outcome for outcome in outcomes if outcome.name == LONG_PROMPT), None)
    if long is None:
        return None
    begin, end = long.sent, long.arrivals[0].seconds
    waits: list[float] = []
    for outcome in outcomes:
        if outcome is not long:
            for before, after in zip(outcome.arrivals, outcome.arrivals[1:], strict=False):
                if after.seconds > begin and before.seconds < end:
                    waits += [(after.seconds - before.seconds) / after.num_tokens] * after.num_tokens
    return waits, end - long.due


def _percentile(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) if seconds else 0.0


def median_of(repeated: Sequence[Figures]) -> Figures:
    """Each figure's median over the runs of one workload on one system; the first one's repetition."""
    first = repeated[0]
    values = {}
    for each in fields(Figures):
        column = [getattr(run, each.name) for run in repeated]
        is_number = each.name != "repetition" and all(isinstance(value, (int, float)) for value in column)
        values[each.name] = statistics.median(column) if is_number else column[0]
    names = first.cpu_seconds
    values["cpu_seconds"] = {
        name: statistics.median(run.cpu_seconds.get(name, 0.0) for run in repeated) for name in names
    }
    return Figures(**values)


def grouped(figures: Sequence[Figures]) -> dict[tuple[str, str], list[Figures]]:
    """By workload and system, in the order in which these first come."""
    groups: dict[tuple[str, str], list[Figures]] = {}
    for each in figures:
        groups.setdefault((each.workload, each.system), []).append(each)
    return groups


def table(figures: Sequence[Figures]) -> list[str]:
    """A line for each workload and system: medians over repetitions. Empty if there is no figure."""
    heads = (
        "tokens/s",
        "first p50",
        "p99 s",
        "between p50",
        "p99 ms",
        "total s",
        "peak GB",
        "CPU s",
        "outside",
        "others",
    )
    rows = [_row(median_of(runs)) for _, runs in sorted(grouped(figures).items())]
    return aligned([["", "", *heads], *rows]) if rows else []


def _row(each: Figures) -> list[str]:
    return [
        each.workload,
        each.system,
        f"{each.output_tokens_per_second:.1f}",
        f"{each.first_p50:.3f}",
        f"{each.first_p99:.3f}",
        f"{1000 * each.between_p50:.1f}",
        f"{1000 * each.between_p99:.1f}",
        f"{each.seconds:.2f}",
        f"{each.peak_bytes / 1e9:.2f}",
        f"{each.total_cpu_seconds:.2f}",
        "" if each.outside_share is None else f"{each.outside_share:.1%}",
        f"{each.other_cores:.2f}",
    ]


def cpu_table(figures: Sequence[Figures]) -> list[str]:
    """A line for each workload and system: CPU seconds of each process."""
    return [
        f"{workload} {system}: " + ", ".join(f"{name} {used:.2f}" for name, used in median_of(runs).cpu_seconds.items())
        for (workload, system), runs in sorted(grouped(figures).items())
    ]


def long_prompt_table(figures: Sequence[Figures]) -> list[str]:
    """Beside a long prompt: the waits of those that decode, and its own."""
    rows = [
        [each.system, f"{1000 * each.decoding_p99:.0f}", f"{each.long_first:.2f}"]
        for each in (median_of(runs) for _, runs in sorted(grouped(figures).items()))
        if each.decoding_p99 is not None and each.long_first is not None
    ]
    heads = ["W4", "between tokens beside the long prompt, p99 ms", "the long prompt's first token, s"]
    return aligned([heads, *rows]) if rows else []


def start_table(starts: Sequence[Start]) -> list[str]:
    """A line for each system: how long until it is ready, first and in the median, and its most memory."""
    rows = [["", "ready after s, first", "median", "peak GB"]]
    for system in dict.fromkeys(start.system for start in starts):
        own = [start for start in starts if start.system == system]
        seconds = [start.seconds_to_ready for start in own]
        peak = statistics.median(start.peak_bytes for start in own)
        rows.append([system, f"{seconds[0]:.1f}", f"{statistics.median(seconds):.1f}", f"{peak / 1e9:.2f}"])
    return aligned(rows)
