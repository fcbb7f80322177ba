"""How requests fared at a frontend: how long their tokens took, how many they were, how they ended. Knows no call."""

from collections import Counter
from collections.abc import Iterator
from itertools import count, takewhile

from blockplane.control_plane.frontend.delta import Usage
from blockplane.protos.errors import AbortedError, BlockplaneError
from blockplane.protos.finish import FinishReason
from blockplane.protos.histogram import REQUEST_SECONDS, Histogram

# The bounds are vLLM's (vllm/v1/metrics/loggers.py), so that quantiles of both can be compared.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REASONS = ("stop", "length", "cache_full", "abort", "error")


class RequestCounts:
    """Of all samples of one model since the frontend started; one that is resumed counts where it began.

    Attributes:
        first_token: seconds from a call's beginning to a sample's first token.
        between_tokens: seconds from one message of tokens to the next; each counts once, whatever it brings.
        whole, decode: seconds from a call's beginning, and from the first token, to the last, of those that ended well.
        num_prompt_tokens, num_output_tokens: of each of those.
        num_ended: by reason, one of REASONS; `abort`: somebody asked for it, or the client left.
    """

    def __init__(self, max_model_len: int) -> None:
        self.first_token, self.between_tokens = Histogram(FIRST_TOKEN_SECONDS), Histogram(TOKEN_SECONDS)
        self.whole, self.decode = Histogram(REQUEST_SECONDS), Histogram(REQUEST_SECONDS)
        lengths = tuple(_lengths(max_model_len))
        self.num_prompt_tokens, self.num_output_tokens = Histogram(lengths), Histogram(lengths)
        self.num_ended: Counter[str] = Counter(dict.fromkeys(REASONS, 0))


class Stopwatch:
    """One sample's. Seconds are those of `time.monotonic`."""

    __slots__ = ("_began_at", "_counts", "_first_at", "_has_ended", "_last_at")

    def __init__(self, counts: RequestCounts, began_at: float) -> None:
        """`began_at`: when the call came."""
        self._counts, self._began_at = counts, began_at
        self._first_at = self._last_at = 0.0
        """0 = no token has come."""
        self._has_ended = False

    def took(self, now: float) -> None:
        """A message of tokens has come."""
        if self._first_at:
            self._counts.between_tokens.observe(now - self._last_at)
        else:
            self._counts.first_token.observe(now - self._began_at)
            self._first_at = now
        self._last_at = now

    def ended(self, outcome: FinishReason | BlockplaneError, usage: Usage) -> None:
        """The sample's end, as its client is told of it."""
        counts, self._has_ended = self._counts, True
        if isinstance(outcome, BlockplaneError):
            counts.num_ended["abort" if isinstance(outcome, AbortedError) else "error"] += 1
            return
        counts.num_ended[outcome] += 1
        counts.num_prompt_tokens.observe(usage.num_prompt_tokens)
        counts.num_output_tokens.observe(usage.num_output_tokens)
        if self._first_at:
            counts.whole.observe(self._last_at - self._began_at)
            counts.decode.observe(self._last_at - self._first_at)

    def left(self) -> None:
        """The call is over, whether or not the sample is."""
        if not self._has_ended:
            self._counts.num_ended["abort"] += 1


def _lengths(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    lengths = (digit * 10**exponent for exponent in count() for digit in (1, 2, 5))
    return takewhile(lambda length: length <= most, lengths)
