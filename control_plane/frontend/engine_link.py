"""The frontend's one stream to the engine: batches out, deliveries in, kept up for ever. Knows no text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

import grpc

from blockplane.control_plane.frontend.token_stream import Reader, TokenStream
from blockplane.protos import delivery_wire as wire
from blockplane.protos.access import access_of
from blockplane.protos.channel import RECONNECT_SECONDS, peer_options
from blockplane.protos.config import Config
from blockplane.protos.delivery import Delivery, FrontendBatch, Resumption, Submission
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import BlockplaneError, UnavailableError
from blockplane.protos.model import ModelInfo
from blockplane.protos.sampling import MAX_SAMPLES
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

if TYPE_CHECKING:
    # Stubs alone know the type of a stub whose channel is asynchronous.
    from blockplane.v1.engine_pb2_grpc import EngineAsyncStub

logger = logging.getLogger(__name__)

FrontendCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.AttachFrontendRequest, pb.AttachFrontendResponse]"


class EngineLink:
    """Attaches to the engine and attaches again when the stream is lost; open streams end UNAVAILABLE meanwhile."""

    def __init__(self, config: Config, on_model: Callable[[ModelInfo | None], Awaitable[None]]) -> None:
        """`on_model` hears which model is served, None = none; also whenever the engine goes away."""
        self._config = config
        self._on_model = on_model
        self._streams: dict[int, TokenStream] = {}
        self._is_idle = asyncio.Event()
        """Set while no stream is open."""
        self._is_idle.set()
        self._next_stream_id = 0
        self._attached = False
        self._stub: EngineAsyncStub | None = None
        self.metadata: tuple[tuple[str, str], ...] = ()
        """What a call of the engine shows."""
        # What the next batch takes along.
        self._submissions: list[Submission] = []
        self._aborted_stream_ids: list[int] = []
        self._aborts: list[tuple[str, str]] = []
        """Request ids, and whose they are."""
        self._resumptions: list[Resumption] = []
        self._parking: dict[int, bool] = {}
        """Streams that are to be parked, and those that are no longer."""
        self._has_news = asyncio.Event()

    @property
    def num_streams(self) -> int:
        """How many are open."""
        return len(self._streams)

    @property
    def is_attached(self) -> bool:
        return self._attached

    @property
    def engine(self) -> EngineAsyncStub:
        """What to ask the engine beside the stream with. Raises UnavailableError: there is no engine to ask."""
        if self._stub is None or not self._attached:
            raise _not_attached()
        return self._stub

    def open(self, submission: Submission, reader: Reader) -> list[TokenStream]:
        """Submit a request, under stream ids that the link draws in place of the submission's own.

        Returns:
            One stream for each sample, to be closed when the call is over. `reader` reads them all.

        Raises:
            UnavailableError: there is no engine to send it to.
        """
        streams = self._new_streams(submission.num_samples, reader)
        self._submissions.append(replace(submission, stream_id=streams[0].stream_id))
        self._has_news.set()
        return streams

    def resume(self, request_id: str, caller: str, reader: Reader) -> list[TokenStream]:
        """Ask for the rest of a request of an earlier stream.

        Returns:
            A stream for each sample that it may have. On as many as it has comes what was before; on the first comes
            the reason if it cannot be resumed. Each is to be closed, or left.

        Raises:
            UnavailableError: there is no engine to ask.
        """
        streams = self._new_streams(MAX_SAMPLES, reader)
        self._resumptions.append(Resumption(streams[0].stream_id, request_id, caller))
        self._has_news.set()
        return streams

    def _new_streams(self, number: int, reader: Reader) -> list[TokenStream]:
        if not self._attached:
            raise _not_attached()
        first_id, limit = self._next_stream_id, self._config.stream_buffer_tokens
        self._next_stream_id += number
        streams = [
            TokenStream(stream_id, reader, limit, self._set_parked)
            for stream_id in range(first_id, self._next_stream_id)
        ]
        self._streams.update((stream.stream_id, stream) for stream in streams)
        self._is_idle.clear()
        return streams

    def stop(self, stream: TokenStream) -> None:
        """End a sample whose client has all that it wants; the engine then tells its end on the stream."""
        if not stream.has_ended:
            self._aborted_stream_ids.append(stream.stream_id)
            self._has_news.set()

    def close(self, stream: TokenStream) -> None:
        """The call is over; if the sample is not, it is aborted."""
        if stream.stream_id in self._streams:
            self.stop(stream)
            self.leave(stream)

    def leave(self, stream: TokenStream) -> None:
        """Nobody reads the stream any more, but its sample may go on."""
        self._streams.pop(stream.stream_id, None)
        self._parking.pop(stream.stream_id, None)
        if not self._streams:
            self._is_idle.set()

    def abort(self, request_ids: list[str], caller: str = "") -> None:
        """Ask for the end of a caller's requests, whichever frontend they came through."""
        self._aborts += ((request_id, caller) for request_id in request_ids)
        self._has_news.set()

    async def wait_until_idle(self) -> None:
        """Wait until no stream is open."""
        await self._is_idle.wait()

    def end_streams(self, error: BlockplaneError) -> None:
        """End all open streams, here. What becomes of their requests the engine decides once we are gone."""
        for stream in self._streams.values():
            if not stream.has_ended:
                stream.end(error)

    def _set_parked(self, stream_id: int, is_parked: bool) -> None:
        # What the engine has not heard of yet needs no undoing.
        if self._parking.get(stream_id, is_parked) != is_parked:
            del self._parking[stream_id]
        else:
            self._parking[stream_id] = is_parked
            self._has_news.set()

    async def run(self) -> None:
        """Keep the stream up for ever. Raises BlockplaneError if the engine refuses this frontend for good."""
        address, options = self._config.engine_address, peer_options(self._config.worker_timeout_seconds)
        access, last_reason = access_of(self._config), ""
        while True:
            reason = ""
            self.metadata = access.metadata(address)
            async with access.aio_channel(address, options) as channel:
                try:
                    await self._run_attached(channel)
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise error_of_call(error) from None
                    reason = error.details() or ""
                finally:
                    was_attached = await self._lose()
            if was_attached:
                logger.warning("lost the engine at %s", address)
            elif reason != last_reason:
                logger.info("not attached to %s: %s; trying again", address, reason)
            last_reason = reason
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _run_attached(self, channel: grpc.aio.Channel) -> None:
        self._stub = EngineStub(channel)
        call = self._stub.AttachFrontend(metadata=self.metadata)
        await call.write(wire.frontend_batch_to_proto(FrontendBatch()))
        writer = asyncio.create_task(self._write_batches(call))
        try:
            async for message in call:
                delivery = wire.delivery_from_proto(message)
                self._deliver(delivery)
                if delivery.serving is not None:
                    self._attached = True
                    await self._on_model(delivery.serving.model)
        finally:
            writer.cancel()

    async def _write_batches(self, call: FrontendCall) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            batch = FrontendBatch(
                tuple(self._submissions),
                tuple(self._aborted_stream_ids),
                tuple(request_id for request_id, _ in self._aborts),
                tuple(stream_id for stream_id, is_parked in self._parking.items() if is_parked),
                tuple(stream_id for stream_id, is_parked in self._parking.items() if not is_parked),
                tuple(self._resumptions),
                tuple(caller for _, caller in self._aborts) if any(caller for _, caller in self._aborts) else (),
            )
            self._forget_news()
            await call.write(wire.frontend_batch_to_proto(batch))

    def _deliver(self, delivery: Delivery) -> None:
        for resumed in delivery.resumed:
            if (stream := self._streams.get(resumed.stream_id)) is not None:
                stream.put_resumed(resumed)
        self._deliver_tokens(delivery)
        for told in delivery.prompt_logprobs:
            if (stream := self._streams.get(told.stream_id)) is not None:
                stream.put_prompt_logprobs(told.logprobs)
        for ending in delivery.endings:
            if (stream := self._streams.get(ending.stream_id)) is not None:
                stream.end(ending.outcome, ending.num_cached_tokens)

    def _deliver_tokens(self, delivery: Delivery) -> None:
        token_ids = delivery.token_ids.tolist()
        start, now = 0, time.monotonic()
        stream_ids = delivery.stream_ids.tolist()
        counts = [1] * len(stream_ids) if delivery.num_tokens is None else delivery.num_tokens.tolist()
        logprobs = repeat(None) if delivery.logprobs is None else delivery.logprobs.split(counts)
        for stream_id, num_tokens, of_tokens in zip(stream_ids, counts, logprobs, strict=False):
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.put(token_ids[start : start + num_tokens], of_tokens)
                if stream.stopwatch is not None:
                    stream.stopwatch.took(now)
            start += num_tokens

    async def _lose(self) -> bool:
        """The engine is away, and with it every request that this frontend had there. Says whether it was attached."""
        was_attached, self._attached = self._attached, False
        for stream in self._streams.values():
            if not stream.has_ended:
                stream.end(UnavailableError("the engine went away; send the request again."))
        self._forget_news()
        if was_attached:
            await self._on_model(None)
        return was_attached

    def _forget_news(self) -> None:
        self._submissions, self._aborted_stream_ids, self._aborts = [], [], []
        self._resumptions, self._parking = [], {}


def _not_attached() -> UnavailableError:
    return UnavailableError("the frontend is not attached to the engine; retry once health is SERVING.")
