"""The worker's end of one stream: what goes out, in order, and heartbeats where nothing does. Knows no steps."""

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from threading import Thread, Timer
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

from blockplane.protos.errors import ProtocolError
from blockplane.v1 import engine_pb2 as pb

_ATTACH_WORKER = f"/{pb.DESCRIPTOR.services_by_name['Engine'].full_name}/AttachWorker"
Metadata: TypeAlias = tuple[tuple[str, str], ...]

FIRST_HEARTBEAT_SECONDS = 1.0
"""How often, until the engine has said."""
_SIGNAL_SECONDS = 0.5
"""How late a signal may be heard: one that comes just before a wait begins does not end the wait."""
HEARTBEAT = pb.AttachWorkerRequest(heartbeat=pb.Heartbeat())
LEAVING = pb.AttachWorkerRequest(leaving=pb.Leaving())


class EngineStream:
    """One attach, from its hello to its end; iterating gives what the engine sends, and when it came.

    gRPC takes what goes out in a thread of its own, which lives through steps and builds: they leave Python's lock.
    """

    def __init__(self, channel: grpc.Channel, hello: pb.WorkerHello, metadata: Metadata = ()) -> None:
        self._outgoing: SimpleQueue[pb.AttachWorkerRequest | None] = SimpleQueue()
        self._heartbeat_seconds: float | None = FIRST_HEARTBEAT_SECONDS
        self.send(pb.AttachWorkerRequest(hello=hello))
        # Answers are bytes, which are read here: gRPC would call what is no message of ours a failure of the stream.
        attach: grpc.StreamStreamMultiCallable[pb.AttachWorkerRequest, bytes]
        attach = channel.stream_stream(_ATTACH_WORKER, pb.AttachWorkerRequest.SerializeToString)
        self._call = attach(self._requests(), metadata=metadata)
        self._incoming: SimpleQueue[tuple[pb.AttachWorkerResponse | Exception, int] | None] = SimpleQueue()
        Thread(target=self._read, name="engine stream", daemon=True).start()

    def __iter__(self) -> Iterator[tuple[pb.AttachWorkerResponse, int]]:
        """Each message, and when it had come: nanoseconds of `time.monotonic_ns`.

        Raises:
            grpc.RpcError: the stream breaks, or the engine ends it with an error.
            ProtocolError: what the engine sends is no message.
        """
        while True:
            try:
                item = self._incoming.get(timeout=_SIGNAL_SECONDS)
            except Empty:
                continue
            if item is None:
                return
            message, received = item
            if isinstance(message, Exception):
                raise message
            yield message, received

    def _read(self) -> None:
        """Have what comes ready before it is asked for: gRPC would begin to look for it only then."""
        try:
            for data in self._call:
                received = time.monotonic_ns()
                self._incoming.put((_decoded(data), received))
        except grpc.RpcError as error:
            self._incoming.put((error, time.monotonic_ns()))
        self._incoming.put(None)

    def send(self, message: pb.AttachWorkerRequest) -> None:
        """Have a message sent behind all that were; safe in a signal handler."""
        self._outgoing.put(message)

    def set_heartbeat(self, milliseconds: int) -> None:
        """Give a sign of life as often, from now on; 0 = none."""
        self._heartbeat_seconds = milliseconds / 1000 or None
        if milliseconds:
            # Whoever waits for something to send does so for as long as was said before.
            self.send(HEARTBEAT)

    def end_with(self, last: pb.AttachWorkerRequest, seconds: float) -> None:
        """Send a last message, and wait until the engine has ended the stream for it, or for so long."""
        self.send(last)
        self._outgoing.put(None)
        timer = Timer(seconds, self._call.cancel)
        timer.daemon = True
        timer.start()
        while self._incoming.get() is not None:
            pass
        timer.cancel()

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


def _decoded(data: bytes) -> pb.AttachWorkerResponse | ProtocolError:
    try:
        return pb.AttachWorkerResponse.FromString(data)
    except DecodeError:
        return ProtocolError("the engine sent what is no message; run the same version on both.")
