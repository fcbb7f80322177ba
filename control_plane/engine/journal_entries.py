"""What the journal holds, as frozen values; knows no file.

Requests and their samples have numbers of the journal's own: ids may come again, these never do.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockplane.protos.plan import Int32Array, no_rows
from blockplane.protos.sampling import MAX_SAMPLES


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request as it was accepted.

    Attributes:
        number: the journal's own for it, larger than all before.
        caller: whom it belongs to; empty = anybody.
        model: the name of the one that it was accepted for.
        submission: all that the engine needs to begin it again, the drawn seed included; opaque here.
        arrival, deadline: seconds of the Unix clock; no deadline = None.
    """

    number: int
    request_id: str
    caller: str
    model: str
    submission: bytes
    num_samples: int
    arrival: float
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class SampleEnding:
    """How a sample ended; `ending` is opaque here."""

    sample_number: int
    ending: bytes


def _no_samples() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """What one step adds: requests, then tokens, then ends. Per token its sample's number, int64, and its id, int32."""

    accepted: tuple[AcceptedRequest, ...] = ()
    sample_numbers: NDArray[np.int64] = field(default_factory=_no_samples)
    token_ids: Int32Array = field(default_factory=no_rows)
    endings: tuple[SampleEnding, ...] = ()


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """A request with what each of its samples has put out, int32, and how each ended; None = it has not."""

    accepted: AcceptedRequest
    output_token_ids: tuple[Int32Array, ...]
    endings: tuple[bytes | None, ...]


def sample_number(request_number: int, sample_index: int) -> int:
    """A sample's number in the journal."""
    return request_number * MAX_SAMPLES + sample_index
