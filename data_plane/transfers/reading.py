"""How a worker reads the contents of another's KV blocks: the interface, and the way that works everywhere, by gRPC.

Knows nothing of what becomes of the contents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import grpc

from blockplane.protos.access import Access
from blockplane.protos.channel import PEER_OPTIONS, ChannelOptions
from blockplane.protos.columns import column_to_bytes
from blockplane.protos.error_details import error_of_call
from blockplane.protos.plan import Int32Array
from blockplane.v1 import transfer_pb2 as pb
from blockplane.v1.transfer_pb2_grpc import BlockTransferStub

# What a new channel shares with one that failed is also how long that was to wait.
_OPTIONS: ChannelOptions = [*PEER_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Blocks of another worker.

    Attributes:
        address: as its hello names it. epoch: of its attach in which the ids mean what the engine believes.
        block_bytes: of each block, as this worker has them.
    """

    address: str
    epoch: int
    block_ids: Int32Array
    block_bytes: int


class Reading(Protocol):
    """Contents on their way."""

    def __iter__(self) -> Iterator[bytes]:
        """Pieces of any length that follow each other; more or fewer bytes than were asked for may come.

        Raises:
            BlockplaneError: they do not come, or not all of them, or not in time.
        """
        ...

    def cancel(self) -> None:
        """End it: whoever waits for a piece gets an error instead. Any thread may."""
        ...


class BlockReader(Protocol):
    """One means of transport; `name` is how hellos and fetches call it."""

    @property
    def name(self) -> str: ...

    def read(self, source: BlockSource, timeout_seconds: float) -> Reading:
        """Begin to read. Raises BlockplaneError where there is no beginning."""
        ...

    def close(self) -> None: ...


class GrpcBlockReader:
    """Reads by the other worker's `BlockTransfer`, over one connection to each address."""

    name = "grpc"

    def __init__(self, access: Access) -> None:
        self._access = access
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = Lock()

    def read(self, source: BlockSource, timeout_seconds: float) -> "GrpcReading":
        """Raises ConfigurationError where what `access` names cannot be read, or its token may not go there."""
        channel, metadata = self._channel(source.address), self._access.metadata(source.address)
        request = pb.ReadBlocksRequest(
            epoch=source.epoch, block_ids=column_to_bytes(source.block_ids), block_bytes=source.block_bytes
        )
        call = BlockTransferStub(channel).ReadBlocks(request, timeout=timeout_seconds, metadata=metadata)
        return GrpcReading(call, lambda: self._forget(source.address, channel))

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = self._access.channel(address, _OPTIONS)
            return self._channels[address]

    def _forget(self, address: str, channel: grpc.Channel) -> None:
        """Dial anew the next time: a channel that failed waits longer and longer, with the certificate of before."""
        with self._lock:
            if self._channels.get(address) is channel:
                del self._channels[address]


class GrpcReading:
    """One call; `on_broken` hears when its connection is no good."""

    def __init__(self, call: Any, on_broken: Callable[[], None]) -> None:
        self._call, self._on_broken = call, on_broken

    def __iter__(self) -> Iterator[bytes]:
        try:
            for response in self._call:
                yield response.data
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.UNAVAILABLE:
                self._on_broken()
            raise error_of_call(failure) from None

    def cancel(self) -> None:
        self._call.cancel()
