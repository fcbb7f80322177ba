"""The frontend's one stream to the engine: batches out, deliveries in, kept up for ever. Knows no text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple, TypeAlias

import grpc

from blockplane.protos import delivery_wire as wire
from blockplane.protos.channel import PEER_OPTIONS, RECONNECT_SECONDS
from blockplane.protos.delivery import Delivery, FrontendBatch, Submission
from blockplane.protos.errors import BlockplaneError, UnavailableError, error_of_status
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs import Logprobs, join
from blockplane.protos.model import ModelInfo
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

logger = logging.getLogger(__name__)

FrontendCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.AttachFrontendRequest, pb.AttachFrontendResponse]"


class News(NamedTuple):
    """What a stream has got since it was last looked at; `outcome` is None while it goes on.

    `logprobs` are those of `token_ids`, `prompt_logprobs` those of the prompt's next tokens, from its second on; None =
    nothing is told.
    """

    token_ids: list[int]
    outcome: FinishReason | BlockplaneError | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class TokenStream:
    """Tokens of one sample on their way to its client. Filled by the link, emptied by the call; coalesces between."""

    def __init__(self, stream_id: int, filled: asyncio.Event) -> None:
        """`filled` is set whenever something comes; a request's samples share it, so that one wait is for them all."""
        self.stream_id = stream_id
        self.num_cached_tokens = 0
        """Known at the end: tokens of the prompt that were not computed."""
        self._filled = filled
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._outcome: FinishReason | BlockplaneError | None = None

    @property
    def has_ended(self) -> bool:
        return self._outcome is not None

    def put(self, token_ids: list[int], logprobs: Logprobs | None = None) -> None:
        self._token_ids += token_ids
        # Beside streams that are told of, others get columns without entries.
        if logprobs is not None and logprobs.token_ids.size:
            self._logprobs.append(logprobs)
        self._filled.set()

    def put_prompt_logprobs(self, logprobs: Logprobs) -> None:
        self._prompt_logprobs.append(logprobs)
        self._filled.set()

    def end(self, outcome: FinishReason | BlockplaneError, num_cached_tokens: int = 0) -> None:
        self._outcome, self.num_cached_tokens = outcome, num_cached_tokens
        self._filled.set()

    def take(self) -> News:
        token_ids, self._token_ids = self._token_ids, []
        logprobs, prompt_logprobs = None, None
        if self._logprobs:
            logprobs, self._logprobs = join(self._logprobs), []
        if self._prompt_logprobs:
            prompt_logprobs, self._prompt_logprobs = join(self._prompt_logprobs), []
        return News(token_ids, self._outcome, logprobs, prompt_logprobs)


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

    def open(self, submission: Submission, filled: asyncio.Event) -> list[TokenStream]:
        """Submit a request, under stream ids that the link draws in place of the submission's own.

        Returns:
            One stream for each sample, to be closed when the call is over. All of them set `filled`.

        Raises:
            UnavailableError: there is no engine to send it to.
        """
        if not self._attached:
            raise UnavailableError("the frontend is not attached to the engine; retry once health is SERVING.")
        first_id = self._next_stream_id
        self._next_stream_id += submission.num_samples
        streams = [TokenStream(stream_id, filled) for stream_id in range(first_id, self._next_stream_id)]
        self._streams.update((stream.stream_id, stream) for stream in streams)
        self._submissions.append(replace(submission, stream_id=first_id))
        self._has_news.set()
        return streams

    def stop(self, stream: TokenStream) -> None:
        """End a sample whose client has all that it wants; the engine then tells its end on the stream."""
        if not stream.has_ended:
            self._aborted_stream_ids.append(stream.stream_id)
            self._has_news.set()

    def close(self, stream: TokenStream) -> None:
        """The call is over; if the sample is not, it is aborted."""
        if self._streams.pop(stream.stream_id, None) is not None:
            self.stop(stream)

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
        stream_ids = delivery.stream_ids.tolist()
        counts = [1] * len(stream_ids) if delivery.num_tokens is None else delivery.num_tokens.tolist()
        logprobs = repeat(None) if delivery.logprobs is None else delivery.logprobs.split(counts)
        for stream_id, num_tokens, of_tokens in zip(stream_ids, counts, logprobs, strict=False):
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.put(token_ids[start : start + num_tokens], of_tokens)
            start += num_tokens
        for told in delivery.prompt_logprobs:
            if (stream := self._streams.get(told.stream_id)) is not None:
                stream.put_prompt_logprobs(told.logprobs)
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
