"""The client's gRPC edge: `blockplane.v1.Inference`. Leads requests in and tokens out; schedules nothing."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc

from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.output import Output
from blockplane.control_plane.frontend.requests import submission_of
from blockplane.control_plane.frontend.resume import resumed_samples, resumed_streams
from blockplane.control_plane.frontend.sample import Sample
from blockplane.control_plane.frontend.text import Text
from blockplane.control_plane.frontend.token_stream import Reader
from blockplane.protos.channel import CALLER, RETRY_PUSHBACK
from blockplane.protos.config import Config
from blockplane.protos.errors import BlockplaneError, CapacityError, RetryableError, UnavailableError
from blockplane.protos.model import ModelInfo
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceServicer

logger = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
"""When a caller whom a stopping frontend refuses may find another one in its place."""


class InferenceService(InferenceServicer):
    """Serves clients over one link to the engine."""

    def __init__(self, link: EngineLink, config: Config) -> None:
        self._link = link
        self._config = config
        self._is_draining = False
        self._served: tuple[ModelInfo, Text] | None = None

    def serve_model(self, served: tuple[ModelInfo, Text] | None) -> None:
        """Take requests for this model from now on; None = for none."""
        self._served = served

    async def drain(self) -> None:
        """Take no more calls, and wait for the ends of those that are open; what outlives the time, or us, is ended."""
        self._is_draining = True
        try:
            async with asyncio.timeout(self._config.drain_seconds):
                await self._link.wait_until_idle()
        except TimeoutError:
            logger.warning("ending what has not ended within drain_seconds, %d", self._config.drain_seconds)
        finally:
            self._link.end_streams(
                UnavailableError("the frontend stopped before the request's end; send it again.", RESTART_SECONDS)
            )

    # A call is written to, not yielded from: a write that its client does not take can be given up.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await self._stream(partial(self._generate, request, context), context)

    async def Resume(  # type: ignore[override]
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await self._stream(partial(self._resume, request, context), context)

    async def _stream(
        self, call: Callable[[Reader], Awaitable[None]], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Have a call stream, and end it with the error that it raises."""
        seconds = self._config.parked_seconds
        reader = Reader(seconds)
        try:
            async with reader:
                await call(reader)
        except TimeoutError:
            await _end_with(
                CapacityError(
                    f"nothing of the stream was read for {seconds} s while more than"
                    f" {self._config.stream_buffer_tokens} tokens waited; send the request again, and read faster."
                ),
                context,
            )
        except BlockplaneError as error:
            await _end_with(error, context)

    async def _generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any], reader: Reader
    ) -> None:
        """One request's way: prompt to ids, ids to the engine, tokens to text deltas, until all samples have ended."""
        model, text = self._require_served()
        submission = submission_of(request, model, text, context.time_remaining(), _caller_of(context))
        prompt, stop_texts = submission.prompt_token_ids.tolist(), request.sampling_params.stop
        streams = self._link.open(submission, reader)
        try:
            samples = [
                Sample(
                    submission.request_id,
                    index,
                    len(prompt),
                    stream,
                    Output(text.continuation(prompt), stop_texts),
                    self._link.stop,
                )
                for index, stream in enumerate(streams)
            ]
            await _tell(samples, context, reader)
        finally:
            for stream in streams:
                self._link.close(stream)

    async def _resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any], reader: Reader
    ) -> None:
        """The rest of a request: first what its client lacks of what there is, then what comes."""
        _, text = self._require_served()
        streams = await resumed_streams(self._link, request.request_id, _caller_of(context), reader)
        try:
            samples, responses = resumed_samples(
                request.request_id, streams, request.from_tokens, text, self._link.stop
            )
        except BlockplaneError:
            # Whoever knows better what has arrived may still resume it.
            for stream in streams:
                self._link.leave(stream)
            raise
        try:
            for response in responses:
                await context.write(response)
            await _tell(samples, context, reader)
        finally:
            for stream in streams:
                self._link.close(stream)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        self._link.abort(list(request.request_ids))
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        try:
            model, _ = self._require_served()
        except BlockplaneError as error:
            await _end_with(error, context)
        return pb.GetModelInfoResponse(
            name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
        )

    def _require_served(self) -> tuple[ModelInfo, Text]:
        if self._is_draining:
            raise UnavailableError("this frontend is stopping; call another one, or this one again.", RESTART_SECONDS)
        if self._served is None:
            raise UnavailableError("no worker is ready; retry once the service's health is SERVING.")
        return self._served


async def _tell(samples: list[Sample], context: grpc.aio.ServicerContext[Any, Any], reader: Reader) -> None:
    """Send what comes until all samples have ended. Raises the error of the first that failed, if one did."""
    failure: BlockplaneError | None = None
    while samples:
        await reader.filled.wait()
        reader.filled.clear()
        for sample in samples:
            if (response := sample.advance()) is not None:
                await context.write(response)
            failure = failure or sample.failure
        samples = [sample for sample in samples if not sample.has_ended]
    if failure is not None:
        raise failure


def _caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Whom the request belongs to; empty = anybody."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == CALLER), "")


async def _end_with(error: BlockplaneError, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    """End the call with the error's status and sentence, and with when to call again where that is known."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, RetryableError) and error.retry_after_seconds is not None:
        metadata = ((RETRY_PUSHBACK, str(math.ceil(1000 * error.retry_after_seconds))),)
    await context.abort(error.status, str(error), metadata)
