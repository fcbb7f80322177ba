"""The engine's gRPC edge: one stream per attached process, protobuf in and out. Decides nothing; drives the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.hello_wire import check_version, hello_from_proto, join_from_proto
from blockplane.control_plane.engine.rank import Rank
from blockplane.control_plane.engine.rank_driver import RankDriver
from blockplane.control_plane.engine.rank_meeting import RankMeeting
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
            driver, meeting, rank = await self._welcome(request_iterator, context)
        except BlockplaneError as error:
            logger.warning("refused a worker: %s", error)
            raise
        ending: BlockplaneError | None = UnavailableError("its connection broke, or this engine ended it.")
        try:
            await driver.run()
            ending = None
        except BlockplaneError as error:
            ending = error
            raise
        finally:
            if self._engine.meetings.leave(meeting, rank, ending):
                _log_end(meeting, rank, ending)

    async def _welcome(
        self, messages: AsyncIterator[pb.AttachWorkerRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> tuple[RankDriver, RankMeeting, Rank]:
        """Find out by its first message what a worker is: one of several ranks, or a group by itself."""
        first, meetings = await anext(messages, None), self._engine.meetings
        if first is None:
            raise UnavailableError("the worker closed its side of the stream.")
        kind = first.WhichOneof("message")
        if kind == "join":
            meeting, rank = meetings.join(join_from_proto(first.join, context.peer()))
            driver = (RankDriver if rank.number else WorkerDriver)(self._engine, meeting, rank, messages, context)
        elif kind == "hello":
            hello = hello_from_proto(first.hello)
            meeting, rank = meetings.alone(hello.boot_id, context.peer())
            driver = WorkerDriver(self._engine, meeting, rank, messages, context)
            driver.say(hello)
        else:
            raise ProtocolError(f"expected a hello from the worker, got {kind}.")
        return driver, meeting, rank

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
                check_version("frontend", batch.protocol_version)
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


def _log_end(meeting: RankMeeting, rank: Rank, error: BlockplaneError | None) -> None:
    """A group is over by a rank's end."""
    who = f"group {meeting.name}" if meeting.group is None else f"worker {meeting.group.number}"
    if error is None:
        logger.info("%s has left", who)
        return
    level = logging.INFO if isinstance(error, UnavailableError) else logging.ERROR
    which = f"{meeting.describe(rank)}: " if meeting.name else ""
    logger.log(level, "%s is lost: %s%s", who, which, error)
