"""When requests are overdue; knows no clock and not what becomes of them."""

import heapq
from itertools import count

from blockplane.control_plane.engine.request import Request


class Deadlines:
    """Times until which requests must have ended, the earliest first. Those that end sooner are forgotten."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()

    def set(self, request: Request, time: float) -> None:
        heapq.heappush(self._heap, (time, next(self._numbers), request))

    @property
    def earliest(self) -> float | None:
        """When the next live request is overdue; None = never."""
        while self._heap and self._heap[0][2].ended:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_overdue(self, now: float) -> list[Request]:
        """The live requests whose time has come; they have no deadline any more."""
        overdue = []
        while (time := self.earliest) is not None and time <= now:
            overdue.append(heapq.heappop(self._heap)[2])
        return overdue
