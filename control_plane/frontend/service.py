"""The client's gRPC edge: `blockplane.v1.Inference`. Leads requests in and tokens out; schedules nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.output import Output
from blockplane.control_plane.frontend.requests import submission_of
from blockplane.control_plane.frontend.sample import Sample
from blockplane.control_plane.frontend.text import Text
from blockplane.protos.errors import BlockplaneError, CapacityError, UnavailableError
from blockplane.protos.model import ModelInfo
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceServicer

_RETRY_PUSHBACK = "grpc-retry-pushback-ms"
"""gRPC's own word for when to call again (https://github.com/grpc/proposal, A6, "Pushback")."""


class InferenceService(InferenceServicer):
    """Serves clients over one link to the engine."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._served: tuple[ModelInfo, Text] | None = None

    def serve_model(self, served: tuple[ModelInfo, Text] | None) -> None:
        """Take requests for this model from now on; None = for none."""
        self._served = served

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            async with aclosing(self._generate(request, context)) as responses:
                async for response in responses:
                    yield response
        except BlockplaneError as error:
            await _end_with(error, context)

    async def _generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One request's way: prompt to ids, ids to the engine, tokens to text deltas, until all samples have ended."""
        model, text = self._require_served()
        submission = submission_of(request, model, text, context.time_remaining())
        prompt, stop_texts = submission.prompt_token_ids.tolist(), request.sampling_params.stop
        filled = asyncio.Event()
        streams = self._link.open(submission, filled)
        try:
            samples = [
                Sample(index, submission, stream, Output(text.continuation(prompt), stop_texts), self._link.stop)
                for index, stream in enumerate(streams)
            ]
            failure: BlockplaneError | None = None
            while samples:
                await filled.wait()
                filled.clear()
                for sample in samples:
                    if (response := sample.advance()) is not None:
                        yield response
                    failure = failure or sample.failure
                samples = [sample for sample in samples if not sample.has_ended]
        finally:
            for stream in streams:
                self._link.close(stream)
        if failure is not None:
            raise failure

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
        if self._served is None:
            raise UnavailableError("no worker is ready; retry once the service's health is SERVING.")
        return self._served


async def _end_with(error: BlockplaneError, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    """End the call with the error's status and sentence, and with when to call again where that is known."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, CapacityError) and error.retry_after_seconds is not None:
        metadata = ((_RETRY_PUSHBACK, str(math.ceil(1000 * error.retry_after_seconds))),)
    await context.abort(error.status, str(error), metadata)
