"""Steps as a timeline: which slice of which track each of their stations is. Knows neither files nor connections."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from blockplane.client.engine_values import Counts, GroupSteps, Nanoseconds

STATIONS = (
    ("schedule", "scheduled", "planned"),
    ("wire out", "planned", "received"),
    ("queued at worker", "received", "began"),
    ("inputs", "began", "prepared"),
    ("forward", "prepared", "computed"),
    ("sampling", "computed", "sampled"),
    ("result", "sampled", "sent"),
    ("wire back", "sent", "answered"),
    ("settle", "answered", "settled"),
    ("delivery", "settled", "delivered"),
)
"""Tracks in their order, each with what begins and what ends its slices."""
UNTOLD = ("worker", "planned", "answered")
"""In place of what lies between, of steps whose worker does not tell."""
TRACKS = tuple(name for name, _, _ in (*STATIONS, UNTOLD))


class Slice(NamedTuple):
    """A step at one of its stations: nanoseconds since the epoch of Unix, and the step's place in its columns."""

    track: str
    begin: int
    end: int
    place: int


class Counter(NamedTuple):
    """A number that goes from step to step: of each step, when it was planned."""

    name: str
    unit: str
    times: Nanoseconds
    values: Counts


def slices_of(steps: GroupSteps) -> Iterator[Slice]:
    """Track after track, each in time; a station that has not come or is not told has no slice."""
    is_untold = steps.received == 0
    for name, begin_name, end_name in (*STATIONS, UNTOLD):
        begin, end = getattr(steps, begin_name), getattr(steps, end_name)
        is_there = is_untold if name == UNTOLD[0] else (begin > 0) & (end > 0)
        for index in np.flatnonzero(is_there).tolist():
            yield Slice(name, int(begin[index]), int(end[index]), index)


def counters_of(steps: GroupSteps) -> tuple[Counter, ...]:
    num_tokens = steps.num_prefill_tokens + steps.num_decode_tokens
    return (
        Counter("tokens", "tokens", steps.planned, num_tokens),
        Counter("padding", "tokens", steps.planned, steps.num_bucket_tokens - num_tokens),
        Counter("plan", "bytes", steps.planned, steps.num_plan_bytes),
    )


def arguments_of(steps: GroupSteps, index: int) -> Mapping[str, int]:
    """What is told of a step beside its times."""
    return {
        "step": int(steps.steps[index]),
        "prefill tokens": int(steps.num_prefill_tokens[index]),
        "decode tokens": int(steps.num_decode_tokens[index]),
        "bucket tokens": int(steps.num_bucket_tokens[index]),
        "plan bytes": int(steps.num_plan_bytes[index]),
    }


class Lanes:
    """Slices of one track laid side by side where they overlap, as two plans in flight do on the wire."""

    def __init__(self) -> None:
        self._ends: list[int] = []

    def lane(self, begin: int, end: int) -> int:
        """The first lane that is free from `begin` on; it is taken until `end`."""
        for number, taken_until in enumerate(self._ends):
            if taken_until <= begin:
                self._ends[number] = end
                return number
        self._ends.append(end)
        return len(self._ends) - 1
