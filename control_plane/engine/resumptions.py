"""Requests of earlier streams on their way to new ones. Knows neither the journal's file nor groups."""

from collections.abc import Callable, Collection, MutableMapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from blockplane.control_plane.engine.deliveries import Deliveries
from blockplane.control_plane.engine.journaling import Found, FoundRequest, Journaling
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.slots import Slots
from blockplane.protos.delivery import Ending, Resumption
from blockplane.protos.errors import AbortedError, BlockplaneError, NotFoundError

Stream: TypeAlias = tuple[int, int]
"""A frontend's number and its own for the stream."""


class Resumptions:
    """From a frontend's question to the stream that has the rest."""

    def __init__(
        self,
        journaling: Journaling | None,
        deliveries: Deliveries,
        streams: MutableMapping[Stream, Request],
        unpark: Callable[[Request], None],
        fail: Callable[[Request, BlockplaneError], None],
    ) -> None:
        """Without a journal nothing can be resumed.

        `streams` are the engine's own, of live requests; `unpark` lets a request go on, `fail` ends it.
        """
        self._journaling, self._deliveries, self._streams = journaling, deliveries, streams
        self._unpark, self._fail = unpark, fail
        self._asked: dict[Stream, bool] = {}
        """Who waits for an answer; False = not any more."""

    def ask(self, owner: int, asked: Resumption) -> None:
        if self._journaling is None:
            error = NotFoundError("this engine keeps no journal, so no request outlives its stream; send it anew.")
            self._deliveries.refuse(owner, (asked.stream_id,), error)
            return
        self._asked[owner, asked.stream_id] = True
        self._journaling.find(
            asked.request_id, asked.caller, partial(self._answer, owner, asked.stream_id, asked.request_id)
        )

    def cancel(self, owner: int, stream_ids: Collection[int]) -> None:
        """The calls that asked are over: what they asked for ends, as if they had had their answer."""
        for stream_id in stream_ids:
            if (owner, stream_id) in self._asked:
                self._asked[owner, stream_id] = False

    def leave(self, owner: int) -> None:
        """A frontend is gone: what it read goes on without it."""
        for request in self._slots.requests():
            reader = self._slots.reader(request)
            if reader is not None and reader[0] == owner:
                self._move(request, None)

    def _answer(self, owner: int, stream_id: int, request_id: str, found: Found) -> None:
        is_awaited = self._asked.pop((owner, stream_id))
        if owner not in self._deliveries:
            return
        if isinstance(found, FoundRequest):
            if is_awaited:
                self._hand_over(owner, stream_id, found)
            else:
                self._end(found)
        else:
            # Not a word on whether somebody else has one.
            unknown = f"there is no request {request_id!r} of this caller; it may have ended too long ago."
            self._deliveries.refuse(owner, (stream_id,), found or NotFoundError(unknown))
        self._deliveries.flush()

    def _hand_over(self, owner: int, first_id: int, found: FoundRequest) -> None:
        outbox = self._deliveries[owner]
        for stream_id, (resumed, rest) in enumerate(zip(found.resumed, found.rest, strict=True), first_id):
            outbox.put_resumed(replace(resumed, stream_id=stream_id))
            if isinstance(rest, Ending):
                outbox.put_ending(replace(rest, stream_id=stream_id))
            else:
                self._move(rest, (owner, stream_id))

    def _end(self, found: FoundRequest) -> None:
        for rest in found.rest:
            if isinstance(rest, Request) and not rest.ended:
                self._fail(rest, AbortedError("its frontend asked for the stream's end."))

    @property
    def _slots(self) -> Slots:
        assert self._journaling is not None
        return self._journaling.slots

    def _move(self, request: Request, reader: Stream | None) -> None:
        """Have another stream, or none, get what a request has from now on."""
        if (before := self._slots.reader(request)) is not None:
            self._streams.pop(before, None)
            owner, stream_id = before
            if reader is not None:
                # Not UNAVAILABLE: whoever reads it must not resume it in turn.
                taken = AbortedError("another call has resumed the request; this one ends.")
                self._deliveries.refuse(owner, (stream_id,), taken)
        self._slots.set_reader(request, reader)
        if not request.ended:
            if reader is not None:
                self._streams[reader] = request
            self._unpark(request)
