"""Requests that may have killed a worker, and who of them may run when. Knows neither workers nor blocks.

A worker that is lost leaves steps unanswered; whoever was in them is a suspect until any token is answered for it. The
suspects run again in cohorts, one at a time and on one group only: half of those that were lost together, then, if
the group is lost again, half of that half. So of n requests one that kills workers is alone after log2(n) losses, and
ends with an error once it has been alone in MAX_LOSSES_ALONE losses: a worker may fall for other reasons too.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from blockplane.control_plane.engine.request import Request

MAX_LOSSES_ALONE = 3


class Suspects:
    """The cohorts in their order, the first of which runs."""

    def __init__(self) -> None:
        self._cohorts: deque[list[Request]] = deque()
        self._num_losses_alone: dict[Request, int] = {}
        """Of every suspect."""

    def __len__(self) -> int:
        return len(self._num_losses_alone)

    def __contains__(self, request: Request) -> bool:
        return request in self._num_losses_alone

    @property
    def cohort(self) -> Sequence[Request]:
        """Those that may run now."""
        return self._cohorts[0] if self._cohorts else ()

    def lost(self, unanswered: Iterable[Request]) -> list[Request]:
        """A worker was lost with these in its unanswered steps. Returns those that are found to have killed it."""
        unanswered = dict.fromkeys(unanswered)
        cohort = self._cohorts.popleft() if self._cohorts else []
        running = [request for request in cohort if request in unanswered]
        others = [request for request in unanswered if request not in self]
        self._num_losses_alone.update(dict.fromkeys(others, 0))
        # A step of one request needs no halves to tell who was in it.
        guilty = self._convict(running or (others if len(unanswered) == 1 else ()))
        # Who of the cohort had no step in flight has killed nobody this time, but is not cleared by that.
        rest = [request for request in cohort if request not in unanswered]
        again = [*_halves([request for request in running if request not in guilty]), rest]
        self._cohorts.extendleft(reversed([some for some in again if some]))
        self._cohorts.extend(_halves([request for request in others if request not in guilty]))
        return guilty

    def clear(self, answered: Collection[Request]) -> bool:
        """These got a token, or have ended. Returns whether the cohort that runs is another one now."""
        cleared = [request for request in answered if self._num_losses_alone.pop(request, None) is not None]
        if not cleared:
            return False
        first = self._cohorts[0]
        for cohort in self._cohorts:
            cohort[:] = [request for request in cohort if request in self]
        self._cohorts = deque(cohort for cohort in self._cohorts if cohort)
        return not self._cohorts or self._cohorts[0] is not first

    def _convict(self, alone: Sequence[Request]) -> list[Request]:
        """Count a loss against whoever was alone in it; returns it if that was one too many."""
        if len(alone) != 1:
            return []
        (request,) = alone
        self._num_losses_alone[request] += 1
        if self._num_losses_alone[request] < MAX_LOSSES_ALONE:
            return []
        del self._num_losses_alone[request]
        return [request]


def _halves(requests: Sequence[Request]) -> list[list[Request]]:
    middle = -(-len(requests) // 2)
    return [list(half) for half in (requests[:middle], requests[middle:]) if half]
