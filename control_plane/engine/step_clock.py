"""How long a worker may take for a step before it counts as lost, learnt from how long it took. Knows no clock.

A step may take MARGIN times what the slowest of late took for as many tokens, and never less than a floor: a busy host
is slow by a factor, a dead one for ever. Whoever was lost by its limit gets twice as long the next time, so that a slow
host is not mistaken for a dead one for ever.
"""

MARGIN = 10.0
MAX_FACTOR = 64.0
FIRST_STEP_SECONDS = 120.0
"""Before anything is learnt: a first step may touch memory that nobody has touched yet."""
_FORGETTING = 0.99
"""With each step, the slowest one before it and the factor of a loss count a hundredth less."""


class StepClock:
    """Limits for one worker's steps, in seconds; it outlives the worker's attaches."""

    def __init__(self, floor_seconds: float) -> None:
        self._floor_seconds = floor_seconds
        self._factor = 1.0
        self._seconds, self._num_tokens = 0.0, 1
        """Of the slowest step of late."""

    def took(self, seconds: float, num_tokens: int) -> None:
        """A step of so many tokens was answered after so long."""
        self._factor = max(1.0, self._factor * _FORGETTING)
        self._seconds *= _FORGETTING
        if seconds >= self._seconds:
            self._seconds, self._num_tokens = seconds, max(1, num_tokens)

    def lost(self) -> None:
        """A step was not answered within its limit."""
        self._factor = min(2 * self._factor, MAX_FACTOR)

    def limit(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens may take."""
        if not self._seconds:
            return max(FIRST_STEP_SECONDS, self._floor_seconds) * self._factor
        expected = self._seconds * max(1.0, num_tokens / self._num_tokens)
        return max(MARGIN * expected, self._floor_seconds) * self._factor
