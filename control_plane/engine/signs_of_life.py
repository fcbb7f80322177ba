"""Whether somebody who says so from time to time still lives. Knows neither workers nor what they say."""

from collections.abc import Callable

from blockplane.protos.errors import UnavailableError


class SignsOfLife:
    """Of one process.

    Attributes:
        are_due: whether it gives any while it has nothing to say; False = silence means nothing.
    """

    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        """`timeout_seconds`: how long it may be silent. `clock` counts seconds as the event loop does."""
        self.are_due = True
        self._timeout_seconds, self._clock = timeout_seconds, clock
        self._heard_at = self._check_due = clock()

    def heard(self) -> None:
        """It has sent something."""
        self._heard_at = self._clock()

    def check(self, name: str) -> tuple[float, float]:
        """`name`: whose they are.

        Returns:
            the seconds after which it is to be asked again, and those in which nobody asked though it was due.

        Raises:
            UnavailableError: it has been silent for too long.
        """
        now = self._clock()
        overslept = now - self._check_due
        if overslept <= self._timeout_seconds / 2:
            overslept = 0.0
        else:
            # Who has slept knows nothing of what others did meanwhile.
            self._heard_at = now
        silence = now - self._heard_at
        seconds = self._timeout_seconds / 4
        if self.are_due:
            if silence >= self._timeout_seconds:
                raise UnavailableError(f"{name} gave no sign of life for {silence:.1f} s.")
            seconds = min(seconds, self._timeout_seconds - silence)
        self._check_due = now + seconds
        return seconds, overslept
