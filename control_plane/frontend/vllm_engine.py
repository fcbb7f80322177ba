"""The public vLLM engine protocol's edge: `vllm.grpc.engine.VllmEngine`, which gateways speak. Schedules nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import NoReturn

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from blockplane.control_plane.frontend import engine_queries, vllm_info
from blockplane.control_plane.frontend.calls import Calls, Context, tell
from blockplane.control_plane.frontend.delta import Delta
from blockplane.control_plane.frontend.requests import submission_of, text_params_of
from blockplane.control_plane.frontend.token_stream import Reader
from blockplane.control_plane.frontend.vllm_kv_events import Subscription
from blockplane.control_plane.frontend.vllm_requests import request_of
from blockplane.control_plane.frontend.vllm_responses import Responses
from blockplane.control_plane.frontend.vllm_tokenizer import archive_chunks, tokenizer_archive
from blockplane.protos.authentication import caller_of
from blockplane.protos.config import Config
from blockplane.protos.errors import (
    AbortedError,
    BlockplaneError,
    CapacityError,
    CursorError,
    DataLossError,
    UnsupportedError,
)
from blockplane.protos.model import ModelInfo


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc] # the published stubs are untyped
    """Serves gateways, and whoever else speaks to vLLM by gRPC, over the same calls as our own service.

    Its errors end a call as its server's `FaultReports` has it.
    """

    def __init__(self, calls: Calls, config: Config) -> None:
        self._calls, self._config = calls, config
        self._started_at = time.monotonic()
        self._archive: tuple[ModelInfo, bytes] | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    # A call is written to, not yielded from: a write that its client does not take can be given up.
    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        await self._calls.stream(partial(self._generate, request, context))

    async def _generate(self, request: vllm.GenerateRequest, context: Context, reader: Reader) -> None:
        """One request's way: to a request of our own protocol, to the engine, tokens to messages, until all have ended.

        Nothing is sent before the first token, so that a refusal is the call's status and may be tried elsewhere.
        """
        model, text = self._calls.require_room()
        ours = request_of(request, model)
        submission = await self._calls.understood(
            len(ours.text), lambda: submission_of(ours, model, text, context.time_remaining(), caller_of(context))
        )
        write = partial(_write, context, Responses(submission, is_stream=request.stream))
        # Its clients make text of the ids themselves.
        params = text_params_of(ours, is_told=False)
        async with self._calls.submitted(submission, text, params, reader) as samples:
            failure = await tell(samples, reader, write)
        if failure is not None and not isinstance(failure, AbortedError):
            raise failure

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        self._calls.link.abort(list(request.request_ids), caller_of(context))
        return vllm.AbortResponse()

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        _refuse("Embed")

    # -- what there is -------------------------------------------------------------------------------------------------

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """A refusal until there is a model: a gateway that is answered asks for the model once and never again."""
        try:
            self._calls.require_served()
        except BlockplaneError as error:
            if not self._calls.has_served:
                raise
            return vllm.HealthCheckResponse(healthy=False, message=str(error))
        return vllm.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        model, _ = self._calls.require_served()
        return vllm_info.model_info(model)

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        uptime_seconds = time.monotonic() - self._started_at
        return vllm_info.server_info(self._config, self._calls.link.num_streams, uptime_seconds)

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        statistics = await engine_queries.statistics(self._calls.link)
        return vllm_info.loads(statistics, self._config.num_seqs_buckets[-1])

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        model, text = self._calls.require_served()
        if self._archive is None or self._archive[0] != model:
            self._archive = (model, await asyncio.to_thread(tokenizer_archive, model, text))
        for chunk in archive_chunks(self._archive[1]):
            yield chunk

    # -- the prefix cache ----------------------------------------------------------------------------------------------

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        try:
            await self._relay(request, context)
        except CapacityError as error:
            raise DataLossError(str(error)) from None

    async def _relay(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        """Begins with all that is cached, under numbers of its own, so that no subscription can go on for another."""
        if request.start_sequence_number:
            raise CursorError(
                "batches are not kept once they are sent; subscribe from 0, to begin with what is cached."
            )
        subscription = Subscription()
        async with aclosing(engine_queries.kv_event_batches(self._calls.link)) as batches:
            await context.write(subscription.begin())
            async for batch in batches:
                for part in subscription.batches(batch):
                    await context.write(part)

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        """At once, whatever runs: requests keep the blocks that they have, and others find none of them."""
        await engine_queries.reset_prefix_cache(self._calls.link)
        return common.FlushCacheResponse(success=True, message="No block that was cached before is found any more.")

    # -- profiles ------------------------------------------------------------------------------------------------------

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> common.ProfileResponse:
        _refuse("StartProfile")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> common.ProfileResponse:
        _refuse("StopProfile")


async def _write(context: Context, responses: Responses, index: int, delta: Delta) -> None:
    for response in responses.of(index, delta):
        await context.write(response)


def _refuse(method: str) -> NoReturn:
    raise UnsupportedError(f"{method} is not served by Blockplane; do without it.")
