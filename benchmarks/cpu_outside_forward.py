"""How much of a Blockplane's CPU time is not the model's forward; pure, reads neither processes nor steps.

A worker's forward runs on its first thread and on threads that help it: those with HELPER_SHARE of the first one's
time. Two figures of one thing bound what the first thread does outside the forward, and the larger counts: its CPU time
without the forward's wall time, and the wall time of what a step does before and behind the forward. Sampling is not
the forward, and counts as if all helpers took part. All other threads and processes are outside the forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from processes_measured import ProcessTimes

from blockplane.client.engine_values import GroupSteps

HELPER_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Wall seconds of a worker's steps, all together, by what they were spent on."""

    num_steps: int
    inputs: float
    forward: float
    sampling: float
    result: float


def step_seconds(steps: GroupSteps, since: int) -> StepSeconds:
    """Of the steps that began at `since` or later, nanoseconds since the epoch of Unix."""
    is_counted = steps.began >= since

    def seconds(begin: str, end: str) -> float:
        return float((getattr(steps, end) - getattr(steps, begin))[is_counted].sum() / 1e9)

    return StepSeconds(
        num_steps=int(np.count_nonzero(is_counted)),
        inputs=seconds("began", "prepared"),
        forward=seconds("prepared", "computed"),
        sampling=seconds("computed", "sampled"),
        result=seconds("sampled", "sent"),
    )


def forward_seconds(threads: Sequence[float], first: float, steps: StepSeconds) -> float:
    """CPU seconds of a worker's forward.

    Args:
        threads: CPU seconds of its threads but the first. first: of that one.
    """
    helpers = [seconds for seconds in threads if seconds >= HELPER_SHARE * first]
    outside = max(first - steps.forward, steps.inputs + steps.sampling + steps.result)
    return first - outside + sum(helpers) - steps.sampling * len(helpers)


def outside_share(processes: Mapping[int, ProcessTimes], steps: StepSeconds) -> float:
    """The share of all CPU seconds, 0 to 1. `processes`: by their ids, one of them called worker."""
    ((pid, worker),) = ((pid, each) for pid, each in processes.items() if each.name == "worker")
    helpers = [seconds for thread, seconds in worker.threads.items() if thread != pid]
    total = sum(each.seconds for each in processes.values())
    return 1 - forward_seconds(helpers, worker.threads[pid], steps) / total
