"""Who reads which journaled sample at the moment, in columns by slot. Knows neither journal nor outboxes.

In the scheduler's columns a journaled request stands for good with `JOURNAL` as its owner and its slot as its stream,
so that whoever reads it may change, or go, without anybody there hearing of it.
"""

import numpy as np
from numpy.typing import NDArray

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.protos.plan import Int32Array

JOURNAL = -1
NOBODY = -1


class Slots:
    """One slot for each sample from its acceptance until its end is delivered; they are used again."""

    def __init__(self) -> None:
        self._requests: list[Request | None] = []
        self._free: list[int] = []
        self._slots: dict[int, int] = {}
        """By the samples' numbers in the journal."""
        self._numbers = np.zeros(0, np.int64)
        self._owners: Int32Array = np.zeros(0, np.int32)
        self._stream_ids: Int32Array = np.zeros(0, np.int32)

    def put(self, request: Request, sample_number: int) -> None:
        """Give a request a slot; nobody reads it yet."""
        slot = self._free.pop() if self._free else self._append()
        self._requests[slot] = request
        self._slots[sample_number] = slot
        self._numbers[slot], self._owners[slot] = sample_number, NOBODY
        request.owner, request.stream_id = JOURNAL, slot

    def remove(self, request: Request) -> None:
        slot = request.stream_id
        del self._slots[int(self._numbers[slot])]
        self._requests[slot], self._owners[slot] = None, NOBODY
        self._free.append(slot)

    def requests(self) -> list[Request]:
        return [request for request in self._requests if request is not None]

    def request(self, sample_number: int) -> Request:
        request = self._requests[self._slots[sample_number]]
        assert request is not None
        return request

    def number(self, request: Request) -> int:
        return int(self._numbers[request.stream_id])

    def reader(self, request: Request) -> tuple[int, int] | None:
        """The owner and the stream that a request's tokens go to; None = nobody reads it."""
        slot = request.stream_id
        owner = int(self._owners[slot])
        return None if owner == NOBODY else (owner, int(self._stream_ids[slot]))

    def set_reader(self, request: Request, reader: tuple[int, int] | None) -> None:
        self._owners[request.stream_id], self._stream_ids[request.stream_id] = reader or (NOBODY, 0)

    def numbers(self, outputs: StepOutputs) -> NDArray[np.int64]:
        """Per new token its sample's number."""
        return self._numbers[outputs.stream_ids]

    def addressed(self, outputs: StepOutputs) -> StepOutputs:
        """The same with whoever reads the tokens now in place of the slots."""
        slots = outputs.stream_ids
        return outputs._replace(owners=self._owners[slots], stream_ids=self._stream_ids[slots])

    def _append(self) -> int:
        slot = len(self._requests)
        self._requests.append(None)
        if slot == len(self._numbers):
            size = max(64, 2 * slot)
            self._numbers = np.resize(self._numbers, size)
            self._owners, self._stream_ids = np.resize(self._owners, size), np.resize(self._stream_ids, size)
        return slot
