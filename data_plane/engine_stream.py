"""The worker's end of one stream: what goes out, in order, and heartbeats where nothing does. Knows no steps."""

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Event, Thread, Timer
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

from blockplane.protos.errors import ProtocolError
from blockplane.v1 import engine_pb2 as pb

_ATTACH_WORKER = f"/{pb.DESCRIPTOR.services_by_name['Engine'].full_name}/AttachWorker"
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Received: TypeAlias = tuple[pb.AttachWorkerResponse, int, bytes]
"""A message, when it had come, in nanoseconds of `time.monotonic_ns`, and the bytes that it came as."""
TakeFetch: TypeAlias = Callable[[pb.FetchBlocks, Callable[[pb.AttachWorkerRequest], None]], None]

FIRST_HEARTBEAT_SECONDS = 0.3
"""How often, until the engine has said."""
IDLE_SECONDS = 0.5
"""How late a signal may be heard: one that comes just before a wait begins does not end the wait."""
HEARTBEAT = pb.AttachWorkerRequest(heartbeat=pb.Heartbeat())
LEAVING = pb.AttachWorkerRequest(leaving=pb.Leaving())


class EngineStream:
    """One attach, from its first message to its end; iterating gives what the engine sends.

    gRPC takes what goes out in a thread of its own, which lives through steps and builds: they leave Python's lock.

    Attributes:
        has_ended: set once nothing comes any more, though some may still be to be taken.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        first: pb.AttachWorkerRequest,
        metadata: Metadata = (),
        take_fetch: TakeFetch | None = None,
    ) -> None:
        """`take_fetch`: gets each fetch as it comes, whatever the steps are at, and what sends its answer."""
        self.has_ended = Event()
        self._outgoing: SimpleQueue[pb.AttachWorkerRequest | None] = SimpleQueue()
        self._heartbeat_seconds: float | None = FIRST_HEARTBEAT_SECONDS
        self.send(first)
        # Answers are bytes, which are read here: gRPC would call what is no message of ours a failure of the stream.
        attach: grpc.StreamStreamMultiCallable[pb.AttachWorkerRequest, bytes]
        attach = channel.stream_stream(_ATTACH_WORKER, pb.AttachWorkerRequest.SerializeToString)
        self._call = attach(self._requests(), metadata=metadata)
        self._take_fetch = take_fetch
        self._incoming: SimpleQueue[Received | Exception | None] = SimpleQueue()
        Thread(target=self._read, name="engine stream", daemon=True).start()

    def __iter__(self) -> Iterator[Received]:
        """Each message.

        Raises:
            grpc.RpcError: the stream breaks, or the engine ends it with an error.
            ProtocolError: what the engine sends is no message.
        """
        for received in self.with_idle_moments():
            if received is not None:
                yield received

    def with_idle_moments(self) -> Iterator[Received | None]:
        """The same, and None wherever nothing comes for IDLE_SECONDS."""
        while True:
            try:
                item = self._incoming.get(timeout=IDLE_SECONDS)
            except Empty:
                yield None
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    def _read(self) -> None:
        """Have what comes ready before it is asked for: gRPC would begin to look for it only then."""
        try:
            for data in self._call:
                self._take(data, time.monotonic_ns())
        except grpc.RpcError as error:
            self._incoming.put(error)
        self._incoming.put(None)
        self.has_ended.set()

    def _take(self, data: bytes, now: int) -> None:
        try:
            message = pb.AttachWorkerResponse.FromString(data)
        except DecodeError:
            self._incoming.put(ProtocolError("the engine sent what is no message; run the same version on both."))
            return
        if self._take_fetch is not None and message.HasField("fetch"):
            self._take_fetch(message.fetch, self.send)
        else:
            self._incoming.put((message, now, data))

    def send(self, message: pb.AttachWorkerRequest) -> None:
        """Have a message sent behind all that were; safe in a signal handler."""
        self._outgoing.put(message)

    def set_heartbeat(self, milliseconds: int) -> None:
        """Give a sign of life as often, from now on; 0 = none."""
        self._heartbeat_seconds = milliseconds / 1000 or None
        if milliseconds:
            # Whoever waits for something to send does so for as long as was said before.
            self.send(HEARTBEAT)

    def end_with(self, last: pb.AttachWorkerRequest, seconds: float) -> grpc.RpcError | None:
        """Send a last message, and wait until the engine has ended the stream for it, or for so long.

        Returns:
            What the engine ended it with; None = with nothing, or it has not.
        """
        self.send(last)
        self._outgoing.put(None)
        timer = Timer(seconds, self._call.cancel)
        timer.daemon = True
        timer.start()
        reason = None
        while (item := self._incoming.get()) is not None:
            if isinstance(item, grpc.RpcError) and item.code() is not grpc.StatusCode.CANCELLED:
                reason = item
        timer.cancel()
        return reason

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()

    def _requests(self) -> Iterator[pb.AttachWorkerRequest]:
        while True:
            try:
                message = self._outgoing.get(timeout=self._heartbeat_seconds)
            except Empty:
                if self._heartbeat_seconds is None:
                    continue
                message = HEARTBEAT
            if message is None:
                return
            yield message
