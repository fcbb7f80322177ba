"""How the two cores of a logical core take turns and meet; knows neither kernels nor memory.

One core runs at a time, until it waits for the other or ends. So a run repeats exactly, and two cores that wait for
different things are seen at once, without a clock.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Hashable

from nki_machine.errors import RuleError


class Channels:
    """Turns and messages of two cores.

    Args:
        first_core: runs first. A kernel that lacks a barrier may give another result when the other core does.
    """

    def __init__(self, first_core: int = 0) -> None:
        self._condition = threading.Condition()
        self._turn = first_core
        self._ended: set[int] = set()
        self._sent: defaultdict[tuple[Hashable, int], deque[object]] = defaultdict(deque)

    def begin(self, core: int) -> None:
        """Waits for the core's first turn."""
        with self._condition:
            self._await_turn(core)

    def end(self, core: int) -> None:
        """Gives the turn away for good, whether the core is done or has failed."""
        with self._condition:
            self._ended.add(core)
            self._pass_turn(core)

    def exchange(self, core: int, channel: Hashable, value: object) -> object:
        """Sends `value` to the other core and returns what that sends on the same channel, the n-th for the n-th.

        Raises:
            RuleError: the other core has ended, or waits for something else.
        """
        other = 1 - core
        with self._condition:
            self._sent[channel, core].append(value)
            if not self._sent[channel, other] and other not in self._ended:
                self._pass_turn(core)
                self._await_turn(core)
            if not self._sent[channel, other]:
                why = "has ended" if other in self._ended else "waits for something else"
                raise RuleError(
                    f"{channel}: core {core} waits for core {other}, which {why}: a deadlock. Both cores must meet as "
                    "often and in the same order."
                )
            return self._sent[channel, other].popleft()

    def _pass_turn(self, core: int) -> None:
        self._turn = 1 - core
        self._condition.notify_all()

    def _await_turn(self, core: int) -> None:
        self._condition.wait_for(lambda: self._turn == core)
