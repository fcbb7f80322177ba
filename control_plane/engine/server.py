"""The engine's gRPC edge: one stream per attached process, protobuf in and out. Decides nothing; drives the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos import delivery_wire, kv_events_wire, wire
from blockplane.protos.errors import BlockplaneError, ProtocolError, UnavailableError
from blockplane.protos.plan import Configure
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineServicer

logger = logging.getLogger(__name__)


class EngineServer(EngineServicer):
    """Serves `blockplane.v1.Engine`: everything attaches here, and a lost peer is a closed stream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def AttachWorker(
        self,
        request_iterator: AsyncIterator[pb.AttachWorkerRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.AttachWorkerResponse]:
        try:
            hello = (await _expect(request_iterator, "hello")).hello
            _check_version("worker", hello.protocol_version)
            model = wire.model_info_from_proto(hello.model)
            layers = [wire.layer_from_proto(layer) for layer in hello.layers]
            rules = wire.bucket_rules_from_proto(hello.bucket_rules)
            configure = self._engine.configure_worker(model, layers, hello.available_memory, rules)
        except BlockplaneError as error:
            # A standby asks again and again, and says so itself.
            level = logging.DEBUG if isinstance(error, UnavailableError) else logging.WARNING
            logger.log(level, "refused a worker: %s", error)
            await context.abort(error.status, str(error))
        try:
            yield pb.AttachWorkerResponse(configure=wire.configure_to_proto(configure))
            ready = await _expect(request_iterator, "ready")
            _check_ready(configure, ready.ready)
            self._engine.worker_ready(model)
            logger.info("worker ready: %s, %d blocks of %d", model.name, configure.num_blocks, configure.block_size)
            async with aclosing(self._drive_steps(request_iterator)) as responses:
                async for response in responses:
                    yield response
        except BlockplaneError as error:
            level = logging.INFO if isinstance(error, UnavailableError) else logging.ERROR
            logger.log(level, "a worker's stream ended: %s", error)
            await context.abort(error.status, str(error))
        finally:
            self._engine.detach_worker()

    async def _drive_steps(
        self, request_iterator: AsyncIterator[pb.AttachWorkerRequest]
    ) -> AsyncGenerator[pb.AttachWorkerResponse, None]:
        """Plan, send, and only then deliver what the last step gave; then take the answer."""
        engine = self._engine
        while True:
            engine.work.clear()
            plan = engine.next_plan()
            if plan is not None:
                yield pb.AttachWorkerResponse(plan=wire.plan_to_proto(plan))
            engine.flush()
            if plan is None:
                await engine.work.wait()
                continue
            message = await _expect(request_iterator, "result")
            engine.take_result(wire.result_from_proto(message.result))

    async def AttachFrontend(
        self,
        request_iterator: AsyncIterator[pb.AttachFrontendRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.AttachFrontendResponse]:
        owner = self._engine.attach_frontend()
        outbox = self._engine.outbox(owner)
        reader = asyncio.create_task(self._read_frontend(owner, request_iterator))
        try:
            while True:
                yield delivery_wire.delivery_to_proto(await outbox.take())
        except BlockplaneError as error:
            await context.abort(error.status, str(error))
        finally:
            reader.cancel()
            self._engine.detach_frontend(owner)

    async def _read_frontend(self, owner: int, batches: AsyncIterator[pb.AttachFrontendRequest]) -> None:
        """Hand a frontend's batches to the engine; what ends the reading ends the stream, with the reason."""
        error: BlockplaneError = UnavailableError("the frontend closed its side of the stream.")
        try:
            async for batch in batches:
                _check_version("frontend", batch.protocol_version)
                self._engine.take_batch(owner, delivery_wire.frontend_batch_from_proto(batch))
        except BlockplaneError as protocol_error:
            error = protocol_error
        self._engine.outbox(owner).close(error)

    async def WatchKVEvents(
        self,
        request: pb.WatchKVEventsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.WatchKVEventsResponse]:
        watcher = self._engine.watch()
        try:
            while True:
                yield kv_events_wire.kv_event_batch_to_proto(await watcher.take())
        except BlockplaneError as error:
            await context.abort(error.status, str(error))
        finally:
            self._engine.unwatch(watcher)

    async def ResetPrefixCache(
        self,
        request: pb.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ResetPrefixCacheResponse:
        try:
            self._engine.reset_prefix_cache()
        except BlockplaneError as error:
            await context.abort(error.status, str(error))
        return pb.ResetPrefixCacheResponse()

    async def GetStatistics(
        self,
        request: pb.GetStatisticsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.GetStatisticsResponse:
        try:
            return wire.statistics_to_proto(self._engine.statistics())
        except BlockplaneError as error:
            await context.abort(error.status, str(error))


def _check_version(peer: str, version: int) -> None:
    if version != wire.PROTOCOL_VERSION:
        raise ProtocolError(
            f"the {peer} speaks protocol {version} and the engine {wire.PROTOCOL_VERSION};"
            " run the same version of Blockplane on both."
        )


async def _expect(messages: AsyncIterator[pb.AttachWorkerRequest], kind: str) -> pb.AttachWorkerRequest:
    """The next message, which must be of the kind that the protocol has here."""
    message = await anext(messages, None)
    if message is None:
        raise UnavailableError("the worker closed its side of the stream.")
    if message.WhichOneof("message") != kind:
        raise ProtocolError(f"expected a {kind} from the worker, got {message.WhichOneof('message')}.")
    return message


def _check_ready(configure: Configure, ready: pb.WorkerReady) -> None:
    """Refuse a worker that built something else than it was told; the message names both sides' values."""
    differences = []
    for name in _MANIFEST:
        told, built = getattr(configure, name), getattr(ready, name)
        if isinstance(told, tuple):
            told, built = list(told), list(built)
        if told != built:
            differences.append(f"{name} {told}, and it built {built}")
    if differences:
        raise ProtocolError(
            f"told the worker to build {'; '.join(differences)}; run the same version of Blockplane on both."
        )


_MANIFEST = (
    "num_blocks",
    "num_batched_tokens_buckets",
    "num_seqs_buckets",
    "decode_context_length_buckets",
    "kv_segment_size",
    "num_draft_tokens",
)
"""What a worker built, in the names of both messages."""
