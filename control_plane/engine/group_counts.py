"""What was counted at one worker group's number, whichever workers had it one after the other. Knows no steps."""

from dataclasses import dataclass, field

from blockplane.protos.histogram import REQUEST_SECONDS, Histogram
from blockplane.protos.statistics import Statistics

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
"""Close where an accelerator's steps lie."""


@dataclass(slots=True)
class GroupCounts:
    """Of the time since the engine started; nothing in it ever goes down.

    Attributes:
        past: of schedulers, in the engine itself of those that are gone for good.
        queue_seconds: from each request's coming to its first row.
        num_output_tokens: tokens that requests got.
        step_seconds: as `Statistics` says of them, each step's.
    """

    past: Statistics
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    num_output_tokens: int = 0
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
