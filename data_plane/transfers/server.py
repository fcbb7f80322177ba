"""Lets other workers read this one's KV blocks, over gRPC, from a thread of its own. Knows no engine and no plans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any

import grpc

from blockplane.data_plane.own_address import reachable_address
from blockplane.data_plane.transfers.blocks import Bytes, MovableBlocks
from blockplane.data_plane.transfers.counts import Moved
from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.columns import column_from_bytes
from blockplane.protos.config import Config
from blockplane.protos.errors import BlocksGoneError
from blockplane.protos.listening import closed_server
from blockplane.protos.plan import Int32Array
from blockplane.protos.ports import open_port
from blockplane.v1 import transfer_pb2 as pb
from blockplane.v1.transfer_pb2_grpc import BlockTransferServicer, add_BlockTransferServicer_to_server

PIECE_BYTES = 2 << 20
"""Of one message, about: whole blocks where they are smaller. A reading has a few pieces in memory, never all."""


class BlockServer(BlockTransferServicer):
    """Listens at `transfer_address` from its making to `close`, and serves the blocks of the attach that offers them.

    Attributes:
        address: host:port for others to dial.
    """

    def __init__(self, config: Config, counts: Moved) -> None:
        """Raises ConfigurationError as `open_port` and `Tokens` do."""
        self._counts = counts
        self._offered: MovableBlocks | None = None
        self._lock = Lock()
        """Held while contents are copied: none is read any more once `withdraw` has had it."""
        opened: Future[int] = Future()
        self._loop, self._is_closed = asyncio.new_event_loop(), asyncio.Event()
        self._thread = Thread(target=self._run, args=(config, opened), name="block server", daemon=True)
        self._thread.start()
        host = config.transfer_address.rpartition(":")[0]
        self.address = reachable_address(host, opened.result(), config.engine_address)

    def offer(self, blocks: MovableBlocks) -> None:
        """Serve these from now on, to whoever names their epoch."""
        with self._lock:
            self._offered = blocks

    def withdraw(self) -> None:
        """Serve nothing any more: readings end, and what was offered is held here no longer."""
        with self._lock:
            self._offered = None

    def close(self) -> None:
        self.withdraw()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._is_closed.set)
        self._thread.join()

    def _run(self, config: Config, opened: Future[int]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(config, opened))

    async def _serve(self, config: Config, opened: Future[int]) -> None:
        try:
            server = closed_server(PEER_OPTIONS, config)
            add_BlockTransferServicer_to_server(self, server)
            port = open_port(server, config.transfer_address, config)
            await server.start()
        except Exception as error:
            opened.set_exception(error)
            return
        opened.set_result(port)
        await self._is_closed.wait()
        await server.stop(None)

    async def ReadBlocks(  # noqa: N802
        self, request: pb.ReadBlocksRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ReadBlocksResponse]:
        began, block_ids, is_whole = time.perf_counter(), column_from_bytes(request.block_ids), False
        self._check(request, block_ids)
        try:
            for some_ids in _portions(block_ids, request.block_bytes):
                contents = self._contents(request.epoch, some_ids).reshape(-1)
                for start in range(0, contents.size, PIECE_BYTES):
                    # Comes back once gRPC has taken it, which is as fast as the reader reads.
                    yield pb.ReadBlocksResponse(data=contents[start : start + PIECE_BYTES].tobytes())
                self._counts.add(blocks=len(some_ids), num_bytes=contents.size)
            is_whole = True
        finally:
            self._counts.add(seconds=time.perf_counter() - began, failures=not is_whole)

    def _check(self, request: pb.ReadBlocksRequest, block_ids: Int32Array) -> None:
        with self._lock:
            offered = self._offered_in(request.epoch)
            offered.check_ids(block_ids)
            if request.block_bytes != offered.block_bytes:
                raise BlocksGoneError(
                    f"a block has {offered.block_bytes} bytes here and {request.block_bytes} where it is to go; blocks"
                    " move between workers of one model, one block_size and one kv_cache_dtype only."
                )

    def _contents(self, epoch: int, block_ids: Int32Array) -> Bytes:
        with self._lock:
            return self._offered_in(epoch).contents(block_ids)

    def _offered_in(self, epoch: int) -> MovableBlocks:
        if self._offered is None or self._offered.epoch != epoch:
            raise BlocksGoneError(
                "this worker's blocks hold something else by now: it has attached anew, or is about to; compute what"
                " they held anew."
            )
        return self._offered


def _portions(block_ids: Int32Array, block_bytes: int) -> Iterator[Int32Array]:
    """As many blocks at a time as fill a piece, at least one."""
    num_blocks = max(1, PIECE_BYTES // block_bytes)
    for start in range(0, len(block_ids), num_blocks):
        yield block_ids[start : start + num_blocks]
