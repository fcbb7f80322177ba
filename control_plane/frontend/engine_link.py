"""The frontend's one stream to the engine: batches out, deliveries in, kept up for ever. Knows no text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import repeat
from typing import TypeAlias

import grpc

from blockplane.protos import delivery_wire as wire
from blockplane.protos.channel import PEER_OPTIONS, RECONNECT_SECONDS
from blockplane.protos.delivery import Delivery, FrontendBatch, Submission
from blockplane.protos.errors import BlockplaneError, UnavailableError, error_of_status
from blockplane.protos.finish import FinishReason
from blockplane.protos.model import ModelInfo
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

logger = logging.getLogger(__name__)

FrontendCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.AttachFrontendRequest, pb.AttachFrontendResponse]"


class TokenStream:
    """Tokens of one request on their way to its client. Filled by the link, emptied by the call; coalesces between."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._outcome: FinishReason | BlockplaneError | None = None
        self.num_cached_tokens = 0
        """Known at the end: tokens of the prompt that were not computed."""
        self._filled = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._outcome is not None

    def put(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self._filled.set()

    def end(self, outcome: FinishReason | BlockplaneError, num_cached_tokens: int = 0) -> None:
        self._outcome, self.num_cached_tokens = outcome, num_cached_tokens
        self._filled.set()

    async def take(self) -> tuple[list[int], FinishReason | None]:
        """Wait for something new: the new token ids, and the finish reason once they are the last.

        Raises:
            BlockplaneError: what ended the request early, once all its tokens are taken.
        """
        await self._filled.wait()
        self._filled.clear()
        token_ids, self._token_ids = self._token_ids, []
        if isinstance(self._outcome, BlockplaneError):
            if not token_ids:
                raise self._outcome
            self._filled.set()
            return token_ids, None
        return token_ids, self._outcome

    async def wait_for_end(self) -> None:
        while not self.has_ended:
            self._filled.clear()
            await self._filled.wait()


class EngineLink:
    """Attaches to the engine and attaches again when the stream is lost; open streams end UNAVAILABLE meanwhile."""

    def __init__(self, engine_address: str, on_model: Callable[[ModelInfo | None], Awaitable[None]]) -> None:
        """`on_model` hears which model is served, None = none; also whenever the engine goes away."""
        self._engine_address = engine_address
        self._on_model = on_model
        self._streams: dict[int, TokenStream] = {}
        self._next_stream_id = 0
        self._attached = False
        # What the next batch takes along.
        self._submissions: list[Submission] = []
        self._aborted_stream_ids: list[int] = []
        self._aborted_request_ids: list[str] = []
        self._has_news = asyncio.Event()

    def open(self, submission: Submission) -> tuple[int, TokenStream]:
        """Submit a request, under a stream id that the link draws in place of the submission's own.

        Returns:
            The stream's id, to be closed with, and the stream.

        Raises:
            UnavailableError: there is no engine to send it to.
        """
        if not self._attached:
            raise UnavailableError("the frontend is not attached to the engine; retry once health is SERVING.")
        stream_id, stream = self._next_stream_id, TokenStream()
        self._next_stream_id += 1
        self._streams[stream_id] = stream
        self._submissions.append(replace(submission, stream_id=stream_id))
        self._has_news.set()
        return stream_id, stream

    async def stop(self, stream_id: int) -> None:
        """End a request whose client has all that it wants, and wait until the engine says what the end tells."""
        stream = self._streams[stream_id]
        if not stream.has_ended:
            self._abort_stream(stream_id)
            await stream.wait_for_end()

    def close(self, stream_id: int) -> None:
        """The call is over; if the request is not, it is aborted."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None and not stream.has_ended:
            self._abort_stream(stream_id)

    def _abort_stream(self, stream_id: int) -> None:
        self._aborted_stream_ids.append(stream_id)
        self._has_news.set()

    def abort(self, request_ids: list[str]) -> None:
        """Ask for the end of requests, whichever frontend they came through."""
        self._aborted_request_ids += request_ids
        self._has_news.set()

    async def run(self) -> None:
        """Keep the stream up for ever. Raises BlockplaneError if the engine refuses this frontend for good."""
        while True:
            async with grpc.aio.insecure_channel(self._engine_address, options=PEER_OPTIONS) as channel:
                try:
                    await self._run_attached(channel)
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise error_of_status(error.code(), error.details() or "") from None
                finally:
                    was_attached = await self._lose()
            if was_attached:
                logger.warning("lost the engine at %s", self._engine_address)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _run_attached(self, channel: grpc.aio.Channel) -> None:
        call = EngineStub(channel).AttachFrontend()
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
                tuple(self._submissions), tuple(self._aborted_stream_ids), tuple(self._aborted_request_ids)
            )
            self._submissions, self._aborted_stream_ids, self._aborted_request_ids = [], [], []
            await call.write(wire.frontend_batch_to_proto(batch))

    def _deliver(self, delivery: Delivery) -> None:
        token_ids = delivery.token_ids.tolist()
        start = 0
        counts = repeat(1) if delivery.num_tokens is None else delivery.num_tokens.tolist()
        for stream_id, num_tokens in zip(delivery.stream_ids.tolist(), counts, strict=False):
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.put(token_ids[start : start + num_tokens])
            start += num_tokens
        for ending in delivery.endings:
            if (stream := self._streams.get(ending.stream_id)) is not None:
                stream.end(ending.outcome, ending.num_cached_tokens)

    async def _lose(self) -> bool:
        """The engine is away, and with it every request that this frontend had there. Says whether it was attached."""
        was_attached, self._attached = self._attached, False
        for stream in self._streams.values():
            if not stream.has_ended:
                stream.end(UnavailableError("the engine went away; send the request again."))
        self._submissions, self._aborted_stream_ids, self._aborted_request_ids = [], [], []
        if was_attached:
            await self._on_model(None)
        return was_attached
