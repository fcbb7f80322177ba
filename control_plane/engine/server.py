"""The engine's gRPC edge: one stream per attached process, protobuf in and out. Decides nothing; drives the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.worker_driver import WorkerDriver
from blockplane.protos import delivery_wire, kv_events_wire, wire
from blockplane.protos.errors import BlockplaneError, ProtocolError, UnavailableError
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineServicer

logger = logging.getLogger(__name__)


class EngineServer(EngineServicer):
    """Serves `blockplane.v1.Engine`: everything attaches here, and a lost peer is a closed stream.

    Its errors end a call as its server's `FaultReports` has it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def AttachWorker(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.AttachWorkerRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        try:
            group = self._engine.attach_worker(await _read_hello(request_iterator))
            group.peer = context.peer()
        except BlockplaneError as error:
            logger.warning("refused a worker: %s", error)
            raise
        try:
            await WorkerDriver(self._engine, group, request_iterator, context).run()
            logger.info("worker %d has left", group.number)
        except BlockplaneError as error:
            level = logging.INFO if isinstance(error, UnavailableError) else logging.ERROR
            logger.log(level, "worker %d is lost: %s", group.number, error)
            raise
        except asyncio.CancelledError:
            logger.info("worker %d is lost: its connection broke, or this engine ended it.", group.number)
            raise
        finally:
            self._engine.detach_worker(group)

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
        finally:
            self._engine.unwatch(watcher)

    async def ResetPrefixCache(
        self,
        request: pb.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ResetPrefixCacheResponse:
        self._engine.reset_prefix_cache()
        return pb.ResetPrefixCacheResponse()

    async def GetStatistics(
        self,
        request: pb.GetStatisticsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.GetStatisticsResponse:
        return wire.statistics_to_proto(self._engine.statistics())


async def _read_hello(messages: AsyncIterator[pb.AttachWorkerRequest]) -> Hello:
    message = await anext(messages, None)
    if message is None:
        raise UnavailableError("the worker closed its side of the stream.")
    if message.WhichOneof("message") != "hello":
        raise ProtocolError(f"expected a hello from the worker, got {message.WhichOneof('message')}.")
    hello = message.hello
    _check_version("worker", hello.protocol_version)
    return Hello(
        protocol_version=hello.protocol_version,
        model=wire.model_info_from_proto(hello.model),
        layers=tuple(wire.layer_from_proto(layer) for layer in hello.layers),
        available_memory=hello.available_memory,
        rules=wire.bucket_rules_from_proto(hello.bucket_rules),
        model_fingerprint=hello.model_fingerprint,
        boot_id=hello.boot_id,
        last_epoch=hello.last_epoch,
        enforces_structure=hello.enforces_structure,
        reloads_weights=hello.reloads_weights,
        weight_epoch=hello.weight_epoch,
    )


def _check_version(peer: str, version: int) -> None:
    if not wire.OLDEST_PROTOCOL_VERSION <= version <= wire.PROTOCOL_VERSION:
        raise ProtocolError(
            f"the {peer} speaks protocol {version} and the engine {wire.OLDEST_PROTOCOL_VERSION} to"
            f" {wire.PROTOCOL_VERSION}; run the same version of Blockplane on both."
        )
