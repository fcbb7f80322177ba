"""How much of a frontend one caller may have at a time: requests, and tokens in them. Knows no call."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blockplane.protos.errors import CapacityError

RETRY_SECONDS = 1.0
"""When a caller may look again: some request of its own has to end first, and nobody knows when."""


class Quotas:
    """Counts, for each caller, what is in flight; `""` is everybody without a name."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        """0 = no limit."""
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self.num_refused = 0
        self.num_requests: Counter[str] = Counter()
        self.num_tokens: Counter[str] = Counter()

    @contextmanager
    def held(self, caller: str, num_tokens: int, *, is_admitted: bool = False) -> Iterator[None]:
        """Count a request of so many tokens until the block is left, however that is.

        Args:
            is_admitted: count it and refuse nothing: it was let in before, and is only read anew.

        Raises:
            CapacityError: the caller would have more than it may.
        """
        if not is_admitted:
            try:
                self._check(caller, num_tokens)
            except CapacityError:
                self.num_refused += 1
                raise
        self.num_requests[caller] += 1
        self.num_tokens[caller] += num_tokens
        try:
            yield
        finally:
            self.num_requests[caller] -= 1
            self.num_tokens[caller] -= num_tokens
            if not self.num_requests[caller]:
                del self.num_requests[caller], self.num_tokens[caller]

    def _check(self, caller: str, num_tokens: int) -> None:
        who = f"caller {caller!r}" if caller else "callers without a name"
        if self._max_tokens and num_tokens > self._max_tokens:
            raise CapacityError(
                f"the request may come to {num_tokens} tokens, and {who} may have {self._max_tokens} in flight; shorten"
                " the prompt or lower max_tokens or num_samples."
            )
        if self._max_requests and self.num_requests[caller] >= self._max_requests:
            raise CapacityError(
                f"{who} has {self._max_requests} requests in flight, which is all it may; wait for one to end.",
                RETRY_SECONDS,
            )
        if self._max_tokens and self.num_tokens[caller] + num_tokens > self._max_tokens:
            raise CapacityError(
                f"{who} has {self.num_tokens[caller]} tokens in flight and may have {self._max_tokens}, too few for"
                f" {num_tokens} more; wait for a request to end.",
                RETRY_SECONDS,
            )
