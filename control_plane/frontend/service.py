"""The client's gRPC edge: `blockplane.v1.Inference`. Validates, translates text and protobuf; schedules nothing."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import numpy as np

from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.output import Output
from blockplane.control_plane.frontend.stop_texts import check_stop_texts
from blockplane.control_plane.frontend.text import Text
from blockplane.protos.delivery import Submission
from blockplane.protos.delivery_wire import FINISH_REASON_TO_PROTO
from blockplane.protos.errors import BlockplaneError, CapacityError, InvalidRequestError, UnavailableError
from blockplane.protos.finish import FinishReason
from blockplane.protos.model import ModelInfo
from blockplane.protos.sampling import SamplingParams, check_sampling_params, check_token_ids
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceServicer

MAX_PRIORITY = 1000
"""So far from 0, either way, a priority may be."""

_FOREVER_SECONDS = 365 * 24 * 3600.0
"""Callers without a deadline may send one that lies as far away as their language can say."""

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
        """One request's way: prompt to ids, ids to the engine, its tokens to text deltas, until its end."""
        model, text = self._require_served()
        submission = _submission(request, model, text, context.time_remaining())
        continuation = text.continuation(submission.prompt_token_ids.tolist())
        output = Output(continuation, request.sampling_params.stop)
        stream_id, stream = self._link.open(submission)
        try:
            reason: FinishReason | None = None
            while reason is None:
                token_ids, reason = await stream.take()
                token_ids, delta = output.push(token_ids)
                if reason is not None:
                    delta += output.finish()
                if output.has_stopped:
                    reason = "stop"
                    await self._link.stop(stream_id)
                response = pb.GenerateResponse(request_id=submission.request_id, token_ids=token_ids, text=delta)
                if reason is not None:
                    response.finish_reason = FINISH_REASON_TO_PROTO[reason]
                    response.usage.num_prompt_tokens = len(submission.prompt_token_ids)
                    response.usage.num_output_tokens = output.num_tokens
                    response.usage.num_cached_tokens = stream.num_cached_tokens
                yield response
        finally:
            self._link.close(stream_id)

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


def _submission(request: pb.GenerateRequest, model: ModelInfo, text: Text, seconds_left: float | None) -> Submission:
    """The request as the engine takes it, on no stream yet. Raises InvalidRequestError naming the field at fault."""
    check_stop_texts(request.sampling_params.stop)
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequestError(f"priority is {request.priority}; choose {-MAX_PRIORITY} (first) to {MAX_PRIORITY}.")
    return Submission(
        stream_id=0,
        request_id=request.request_id or secrets.token_hex(8),
        prompt_token_ids=np.array(_prompt_token_ids(request, model, text), np.int32),
        params=_sampling_params(request.sampling_params, model),
        priority=request.priority,
        timeout_seconds=None if seconds_left is None or seconds_left > _FOREVER_SECONDS else seconds_left,
        cache_salt=request.cache_salt,
        skip_prefix_cache=request.skip_prefix_cache,
    )


def _prompt_token_ids(request: pb.GenerateRequest, model: ModelInfo, text: Text) -> list[int]:
    """The prompt as ids that the model has. Raises InvalidRequestError if there is none, or an id is out of range."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("the request has no prompt; set text or token_ids.")
    token_ids = text.encode(request.text) if kind == "text" else list(request.token_ids.ids)
    if not token_ids:
        raise InvalidRequestError(f"the prompt's {kind} holds no token; send at least one.")
    check_token_ids("prompt", token_ids, model.vocab_size)
    return token_ids


def _sampling_params(proto: pb.SamplingParams, model: ModelInfo) -> SamplingParams:
    """The request's parameters, checked, with the model's defaults where it sets none."""
    params = SamplingParams(
        # Where no number is given, the end is the model's: max_model_len, which the engine watches.
        max_tokens=proto.max_tokens if proto.HasField("max_tokens") else model.max_model_len,
        temperature=proto.temperature if proto.HasField("temperature") else model.defaults.temperature,
        seed=proto.seed if proto.HasField("seed") else None,
        stop_token_ids=tuple(proto.stop_token_ids),
        ignore_eos=proto.ignore_eos,
    )
    check_sampling_params(params, model.vocab_size)
    return params
