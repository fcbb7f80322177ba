"""The client's gRPC edge: `blockplane.v1.Inference`. Leads requests in and messages out; schedules nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc

from blockplane.control_plane.frontend.calls import Calls, tell
from blockplane.control_plane.frontend.delta import Delta
from blockplane.control_plane.frontend.requests import submission_of, text_params_of
from blockplane.control_plane.frontend.responses import response_of
from blockplane.control_plane.frontend.resume import resumed_samples, resumed_streams
from blockplane.control_plane.frontend.token_stream import Reader
from blockplane.protos.authentication import caller_of
from blockplane.protos.errors import BlockplaneError
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceServicer


class InferenceService(InferenceServicer):
    """Serves clients of our own protocol. Its errors end a call as its server's `FaultReports` has it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    # A call is written to, not yielded from: a write that its client does not take can be given up.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await self._calls.stream(partial(self._generate, request, context))

    async def Resume(  # type: ignore[override]
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await self._calls.stream(partial(self._resume, request, context))

    async def _generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any], reader: Reader
    ) -> None:
        """One request's way: prompt to ids, ids to the engine, tokens to text deltas, until all samples have ended."""
        model, text = self._calls.require_room()
        submission = await self._calls.understood(
            len(request.text),
            lambda: submission_of(request, model, text, context.time_remaining(), caller_of(context)),
        )
        async with self._calls.submitted(submission, text, text_params_of(request), reader) as samples:
            failure = await tell(samples, reader, partial(_write, context, submission.request_id))
        if failure is not None:
            raise failure

    async def _resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any], reader: Reader
    ) -> None:
        """The rest of a request: first what its client lacks of what there is, then what comes."""
        _, text = self._calls.require_served()
        link, write = self._calls.link, partial(_write, context, request.request_id)
        caller = caller_of(context)
        streams = await resumed_streams(link, request.request_id, caller, reader)
        try:
            samples, deltas = resumed_samples(streams, request.from_tokens, text, link.stop)
        except BlockplaneError:
            # Whoever knows better what has arrived may still resume it.
            for stream in streams:
                link.leave(stream)
            raise
        num_tokens = sum(len(stream.resumed.token_ids) for stream in streams if stream.resumed is not None)
        with self._calls.quotas.held(caller, num_tokens, is_admitted=True):
            try:
                for index, delta in deltas:
                    await write(index, delta)
                failure = await tell(samples, reader, write)
            finally:
                for stream in streams:
                    link.close(stream)
        if failure is not None:
            raise failure

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        self._calls.link.abort(list(request.request_ids), caller_of(context))
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        model, text = self._calls.require_served()
        return pb.GetModelInfoResponse(
            name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
            chat_template=model.chat_template,
            bos_token=None if model.bos_token_id is None else text.name_of(model.bos_token_id),
            eos_token=text.name_of(model.eos_token_ids[0]) if model.eos_token_ids else None,
        )


async def _write(context: grpc.aio.ServicerContext[Any, Any], request_id: str, index: int, delta: Delta) -> None:
    if (response := response_of(request_id, index, delta)) is not None:
        await context.write(response)
