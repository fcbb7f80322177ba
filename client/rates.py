"""What an engine's counts say of the time between two looks at them; pure, knows no connection."""

from collections.abc import Mapping
from dataclasses import dataclass

from blockplane.client.engine_values import WorkerStatus
from blockplane.protos.statistics import EngineStatistics, Statistics


@dataclass(frozen=True, slots=True)
class Look:
    """How an engine stood at a moment, in seconds of any clock."""

    seconds: float
    statistics: EngineStatistics
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the time between two looks; None where nothing happened, or nobody tells.

    Attributes:
        tokens_per_second: computed tokens, of prompts and of outputs.
        admitted_per_second: requests that got a row.
        hit_rate: share of the admitted prompts' tokens that were cached.
        padding: share of the steps' tokens that only filled their buckets.
        step_seconds: mean of a step.
        plan_bytes: mean of a step's plan.
        idle_share: of the time, in which nothing was in flight though requests ran.
        acceptance: share of the guessed tokens that were right.
    """

    tokens_per_second: float | None = None
    admitted_per_second: float | None = None
    hit_rate: float | None = None
    padding: float | None = None
    step_seconds: float | None = None
    plan_bytes: float | None = None
    idle_share: float | None = None
    acceptance: float | None = None


def rates(before: Statistics | None, after: Statistics, seconds: float) -> Rates:
    """What happened from `before` to `after`, so many seconds later. Counts that began anew tell nothing."""
    if before is None or seconds <= 0 or after.num_admitted < before.num_admitted or after.num_steps < before.num_steps:
        return Rates()
    num_steps = after.num_steps - before.num_steps
    num_computed = after.num_computed_tokens - before.num_computed_tokens
    occupied = _ratio(num_computed, after.num_bucket_tokens - before.num_bucket_tokens)
    is_told = after.num_steps > 0
    return Rates(
        tokens_per_second=num_computed / seconds if is_told else None,
        admitted_per_second=(after.num_admitted - before.num_admitted) / seconds,
        hit_rate=_ratio(
            after.num_cached_tokens - before.num_cached_tokens, after.num_prompt_tokens - before.num_prompt_tokens
        ),
        padding=None if occupied is None else 1 - occupied,
        step_seconds=_ratio(after.step_seconds - before.step_seconds, num_steps),
        plan_bytes=_ratio(after.num_plan_bytes - before.num_plan_bytes, num_steps),
        idle_share=min(1.0, (after.idle_seconds - before.idle_seconds) / seconds) if is_told else None,
        acceptance=_ratio(
            after.num_accepted_tokens - before.num_accepted_tokens, after.num_draft_tokens - before.num_draft_tokens
        ),
    )


def group_rates(before: Look, after: Look) -> Mapping[int, Rates]:
    """Of each worker group that has told of itself by now."""
    return {
        number: rates(before.statistics.groups.get(number), statistics, after.seconds - before.seconds)
        for number, statistics in after.statistics.groups.items()
    }


def total_rates(before: Look, after: Look) -> Rates:
    """Of all groups together."""
    return rates(before.statistics.total, after.statistics.total, after.seconds - before.seconds)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
