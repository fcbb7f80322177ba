"""When a worker did what for one step; knows neither clocks nor steps."""

from struct import Struct
from typing import NamedTuple, Self

_MOST_MICROSECONDS = 2**32 - 1
_PACKED = Struct("<Q5I")


class StepTimes(NamedTuple):
    """On the worker's monotonic clock. They cross the wire packed, and stay so until somebody looks at them.

    Attributes:
        received: the plan had come; nanoseconds.
        began: microseconds from then until the step began, which waits for the one before it.
        prepared: until its inputs were ready, drafts among them.
        computed: until its logits were there. A device that computes beside the host has only taken the work by then,
            and its rest shows as sampling, which waits for it; where one graph does both, it is as `sampled`.
        sampled: until its tokens were on the host.
        sent: until its result was handed over to be sent.
    """

    received: int
    began: int
    prepared: int
    computed: int
    sampled: int
    sent: int

    @classmethod
    def of(cls, received: int, began: int, prepared: int, computed: int, sampled: int, sent: int) -> Self | None:
        """From nanoseconds of one clock; None = it took longer than can be told, which is over an hour."""
        if sent - received > 1000 * _MOST_MICROSECONDS:
            return None
        return cls(
            received,
            (began - received) // 1000,
            (prepared - received) // 1000,
            (computed - received) // 1000,
            (sampled - received) // 1000,
            (sent - received) // 1000,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """None = nothing is told, or nothing that could be understood."""
        return cls(*_PACKED.unpack(data)) if len(data) == _PACKED.size else None

    def to_bytes(self) -> bytes:
        return _PACKED.pack(*self)
