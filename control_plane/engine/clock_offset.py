"""How far another host's clock is from ours, from what went to it and back. Knows no steps.

A round trip bounds the offset from both sides: nothing arrives before it was sent, on either way. Half way between lies
the NTP estimate, with half the time on the wire as its error (RFC 5905, section 8), so that the fastest trips say most.
"""

import numpy as np
from numpy.typing import NDArray

DRIFT = 2e-4
"""By which two clocks may part: what quartz does, and what NTP does about it. A trip's word counts less with time."""

Nanoseconds = NDArray[np.int64]


def clock_offsets(sent: Nanoseconds, received: Nanoseconds, replied: Nanoseconds, answered: Nanoseconds) -> Nanoseconds:
    """Nanoseconds by which the other clock is ahead of ours at each of some round trips, in their order.

    Each is the estimate of that trip whose error is least by then, moved into the bounds of the trip itself: so nothing
    is said to have arrived before it was sent, unless the clocks' paces differ by more than the whole trip.

    Args:
        sent, answered: of each trip, int64 [num_trips], on our clock; ascending.
        received, replied: on the other clock, when it arrived there and when the answer left.
    """
    least, most = replied - answered, received - sent
    errors = np.maximum(most - least, 0) / 2
    distances = (answered - answered[:1]) * DRIFT
    from_before = _least_so_far(errors - distances)
    from_after = len(errors) - 1 - _least_so_far((errors + distances)[::-1])[::-1]
    # Each of the two is the best of its side; the error that it has here decides between them.
    here = np.arange(len(errors))
    of_before, of_after = (errors[at] + np.abs(distances[at] - distances[here]) for at in (from_before, from_after))
    best = np.where(of_before <= of_after, from_before, from_after)
    middle = least + (most - least) // 2
    offsets: Nanoseconds = np.clip(middle[best], least, most)
    return offsets


def _least_so_far(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """For each entry, where the least of those up to it stands, the latest of equal ones."""
    at = np.where(values <= np.minimum.accumulate(values), np.arange(len(values)), 0)
    latest: NDArray[np.intp] = np.maximum.accumulate(at)
    return latest
