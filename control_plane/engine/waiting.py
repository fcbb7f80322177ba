"""Requests without a row, in the order in which they are served, and how many may wait. Knows no blocks and no rows."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count

from blockplane.control_plane.engine.request import Request
from blockplane.protos.errors import CapacityError, QueueFullError
from blockplane.protos.histogram import Histogram

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 60.0


class WaitingQueue:
    """A bounded queue. A request's rank is when it came, put off by `priority_seconds` for each step of its priority.

    So who waits gains on all that come later, and no priority is overtaken for ever; the order among those that wait
    never changes, and ranks decide who is preempted too.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, priority_seconds: float, queue_seconds: Histogram | None = None
    ) -> None:
        """`queue_seconds` gets how long each request waited for its first row; None = nobody asks."""
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._priority_seconds = priority_seconds
        self._queue_seconds = queue_seconds
        self._requests: list[Request] = []
        self._numbers = count()
        self.num_tokens = self.num_to_compute = 0
        """Known tokens of all that wait, and those that are left to compute."""
        # How fast the queue has been served lately: when it last was, and the mean time between two.
        self._last_served: float | None = None
        self._seconds_per_request = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self, num_requests: int) -> list[Request]:
        """So many in order; the queue may be changed while they are gone through."""
        return self._requests[:num_requests]

    def check_room(self, num_requests: int, num_tokens: int) -> None:
        """Raise CapacityError, with a hint when to come again, unless so many more may wait; where not even one may,
        QueueFullError.
        """
        if len(self) + num_requests > self._max_requests:
            kind = QueueFullError if len(self) >= self._max_requests else CapacityError
            raise self._refusal(f"{len(self)} requests wait and {self._max_requests} may", num_requests, kind)
        # A request longer than the bound waits alone rather than never.
        if self._requests and self.num_tokens + num_tokens > self._max_tokens:
            excess = self.num_tokens + num_tokens - self._max_tokens
            num_in_the_way = -(-excess * len(self) // self.num_tokens)
            raise self._refusal(f"{self.num_tokens} tokens wait and {self._max_tokens} may", num_in_the_way)

    def rank(self, priority: int, now: float) -> tuple[float, int]:
        """The place of a request of that priority that comes now; ties go by order of asking."""
        return now + priority * self._priority_seconds, next(self._numbers)

    def put(self, request: Request) -> None:
        if not self._requests:
            # An empty queue is not a slow one.
            self._last_served = None
        insort(self._requests, request, key=_rank)
        self.num_tokens += request.num_tokens
        self.num_to_compute += request.num_to_compute

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.rank, key=_rank)
        while self._requests[index] is not request:
            index += 1
        del self._requests[index]
        self.num_tokens -= request.num_tokens
        self.num_to_compute -= request.num_to_compute

    def take_all(self) -> list[Request]:
        """Remove all."""
        requests, self._requests, self.num_tokens, self.num_to_compute = self._requests, [], 0, 0
        return requests

    def append_token(self, request: Request, token_id: int) -> None:
        """Give a request that waits a token which was computed before it lost its row."""
        self.num_to_compute -= request.num_to_compute
        request.append(token_id)
        self.num_tokens += 1
        self.num_to_compute += request.num_to_compute

    def serve(self, request: Request, now: float) -> None:
        """Remove a request since it gets a row."""
        self.remove(request)
        if self._queue_seconds is not None and request.num_cached_tokens is None:
            came_at = request.rank[0] - request.priority * self._priority_seconds
            self._queue_seconds.observe(now - came_at)
        if self._last_served is not None:
            # A mean over about the last ten.
            self._seconds_per_request += (now - self._last_served - self._seconds_per_request) / 10
        self._last_served = now

    def _refusal(self, reason: str, num_in_the_way: int, kind: type[CapacityError] = CapacityError) -> CapacityError:
        seconds = num_in_the_way * self._seconds_per_request
        seconds = min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        return kind(f"{reason}; retry in {seconds:.1f} s.", retry_after_seconds=seconds)


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
