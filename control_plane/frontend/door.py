"""Refusals at the door: what the engine has just refused to all, calls are told without asking it. Knows no call."""

import time
from collections.abc import Callable

from blockplane.protos.errors import QueueFullError

SHUT_SECONDS = 0.02
"""So long a full queue is taken to be full still: places are lost only where more than the queue holds are served in
that time, and the engine is asked fifty times a second however many call."""


class Door:
    """Open, or shut for a moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sentence: str = ""
        self._retry_after_seconds: float | None = None
        self._opens = 0.0

    def shut(self, refusal: QueueFullError) -> None:
        """The engine has just refused a request so."""
        self._sentence, self._retry_after_seconds = str(refusal), refusal.retry_after_seconds
        self._opens = self._clock() + SHUT_SECONDS

    def check(self) -> None:
        """Raise what the engine said last where that was a moment ago."""
        if self._clock() < self._opens:
            raise QueueFullError(self._sentence, self._retry_after_seconds)
