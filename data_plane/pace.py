"""How long a worker computes and how long it waits, on its own clock. Knows no steps' contents."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Pace:
    """Totals over all steps since the process started.

    Attributes:
        busy_seconds: from a plan's arrival to its answer.
        idle_seconds: from a step's answer to the arrival of the next plan, within an attach: also where there was
            nothing to do.
        num_steps: answered.
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self.num_steps = 0
        self._last_end: float | None = None

    def begin_attach(self) -> None:
        """What passes until the first step is no step's gap."""
        self._last_end = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the work on one plan; one that fails is not counted."""
        start = time.perf_counter()
        idle = 0.0 if self._last_end is None else start - self._last_end
        yield
        self._last_end = time.perf_counter()
        self.idle_seconds += idle
        self.busy_seconds += self._last_end - start
        self.num_steps += 1
        logger.debug("a step of %.6f s after %.6f s without one", self._last_end - start, idle)
