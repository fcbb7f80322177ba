"""Ends a process that waits for ranks which will not come any more: nothing else gets it out. Knows no collectives.

A collective cannot be broken off from outside. Once the engine has ended this rank's stream the group is lost, and a
wait that goes on all the same is for a rank that neither answers nor breaks its connections: its machine is off the
network, or it was stopped. Whoever started the process starts it anew. Nor does a thread that waits so run what a
signal asks for.
"""

import logging
import os
import time
from collections.abc import Callable
from threading import Event, Thread

from blockplane.data_plane.ranks.process_ranks import Wait

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long a wait may go on once the stream has ended, or the process was told to."""
EXIT_BLOCKED = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong with the settings, and another try may succeed."""


def _exit() -> None:
    os._exit(EXIT_BLOCKED)


class Watchdog:
    """Watches the main thread until it is stopped, during one attach."""

    def __init__(
        self,
        waits: Callable[[], Wait | None],
        has_ended: Event,
        is_told: Event,
        seconds: float = GRACE_SECONDS,
        end_process: Callable[[], None] = _exit,
    ) -> None:
        """
        Args:
            waits: for what the main thread waits now, and since when; None = it does not.
            has_ended: set when the stream has. is_told: set when a signal has come.
        """
        self._waits, self._seconds, self._end_process = waits, seconds, end_process
        self._has_ended, self._is_told = has_ended, is_told
        self._is_over = Event()
        Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        ended: float | None = None
        while not self._is_over.wait(self._seconds / 20):
            if ended is None and (self._has_ended.is_set() or self._is_told.is_set()):
                ended = time.monotonic()
            wait = self._waits()
            if ended is None or wait is None or time.monotonic() - max(wait.since, ended) < self._seconds:
                continue
            logger.critical(
                "%s %.0f s ago, and this rank still waits in %s for others that are gone; ending the process with"
                " status %d, to be started anew",
                "the stream ended" if self._has_ended.is_set() else "a signal came",
                time.monotonic() - ended,
                wait.what,
                EXIT_BLOCKED,
            )
            self._end_process()
            return
