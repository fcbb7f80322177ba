"""What a frontend asks the engine beside its stream: how it stands, what is cached, to forget it. Knows no client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import BlockplaneError, UnavailableError
from blockplane.protos.kv_events import KVEventBatch
from blockplane.protos.kv_events_wire import kv_event_batch_from_proto
from blockplane.v1 import engine_pb2 as pb

if TYPE_CHECKING:
    # Stubs alone know the type of a stub whose channel is asynchronous.
    from blockplane.v1.engine_pb2_grpc import EngineAsyncStub


async def statistics(link: EngineLink) -> pb.GetStatisticsResponse:
    """Raises UnavailableError where there is no engine, as all of these do."""
    with _engine_errors():
        return await link.engine.GetStatistics(pb.GetStatisticsRequest(), metadata=link.metadata)


async def reset_prefix_cache(link: EngineLink) -> None:
    """Let no block be found that was cached before. Raises UnavailableError, too, where no worker is attached."""
    with _engine_errors():
        await link.engine.ResetPrefixCache(pb.ResetPrefixCacheRequest(), metadata=link.metadata)


def kv_event_batches(link: EngineLink) -> AsyncGenerator[KVEventBatch, None]:
    """What is cached, group by group, and from then on what changes.

    It raises UnavailableError once the engine goes away, and CapacityError if it is read too slowly.
    """
    return _batches(link.engine, link.metadata)


async def _batches(
    engine: EngineAsyncStub, metadata: tuple[tuple[str, str], ...]
) -> AsyncGenerator[KVEventBatch, None]:
    with _engine_errors():
        call = engine.WatchKVEvents(pb.WatchKVEventsRequest(), metadata=metadata)
        try:
            async for batch in call:
                yield kv_event_batch_from_proto(batch)
        finally:
            call.cancel()
    raise _went_away()


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise _error(failure) from None
    except asyncio.CancelledError:
        # A call that falls with its channel looks cancelled, though nobody cancelled us.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _went_away() from None


def _error(failure: grpc.aio.AioRpcError) -> BlockplaneError:
    details = failure.details() or ""
    # The engine speaks in sentences; other words are gRPC's own account of a connection.
    if failure.code() is grpc.StatusCode.UNAVAILABLE and not details.endswith("."):
        return _went_away()
    return error_of_call(failure)


def _went_away() -> UnavailableError:
    return UnavailableError("the engine went away; retry once health is SERVING.")
