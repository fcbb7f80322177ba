"""When requests are overdue, and the alarm for the next one; knows not what becomes of them."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from blockplane.control_plane.engine.request import Request


class Deadlines:
    """Times until which requests must have ended, the earliest first. Those that end sooner are forgotten."""

    def __init__(self, clock: Callable[[], float], overdue: Callable[[Request], None]) -> None:
        """`overdue` is called with each live request whose time has come. `clock`: as the engine has it."""
        self._clock, self._overdue = clock, overdue
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._alarm: asyncio.TimerHandle | None = None

    def set(self, request: Request, time: float) -> None:
        """Nothing comes of it before the next `arm`."""
        heapq.heappush(self._heap, (time, next(self._numbers), request))

    def arm(self) -> None:
        """Have the alarm go off when the next request is overdue."""
        if self._alarm is not None:
            self._alarm.cancel()
        if (earliest := self._earliest()) is not None:
            delay = max(0.0, earliest - self._clock())
            self._alarm = asyncio.get_running_loop().call_later(delay, self._end_overdue)

    def _earliest(self) -> float | None:
        """When the next live request is overdue; None = never."""
        while self._heap and self._heap[0][2].ended:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _end_overdue(self) -> None:
        now = self._clock()
        while (time := self._earliest()) is not None and time <= now:
            self._overdue(heapq.heappop(self._heap)[2])
        self.arm()
