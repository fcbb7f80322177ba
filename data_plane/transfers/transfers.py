"""A worker's part in moving KV blocks, as its settings have it: what it serves, by what means it reads, what it is for.

Knows no streams and no blocks.
"""

from blockplane.data_plane.transfers.blocks import MovableBlocks
from blockplane.data_plane.transfers.counts import TransferCounts
from blockplane.data_plane.transfers.fetches import Fetches
from blockplane.data_plane.transfers.reading import BlockReader, GrpcBlockReader
from blockplane.data_plane.transfers.server import BlockServer
from blockplane.protos.access import access_of
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError

_DEFAULTS = Config()


class Transfers:
    """Stands from the worker's beginning to its end; each attach has a beginning and an end within.

    Attributes:
        role: as the hello has it.
        address: where others read this worker's blocks; empty = nowhere.
        counts: what moved.
    """

    def __init__(self, config: Config = _DEFAULTS) -> None:
        """Listen, where the settings say so.

        Raises:
            ConfigurationError: the address cannot be had as the settings have it, or the transport is not there.
        """
        if config.role == "prefill" and not config.transfer_address:
            raise ConfigurationError(
                "role is prefill and transfer_address is empty: nobody could go on with what is computed here; set it"
                " to host:port, such as 0.0.0.0:0."
            )
        self.role, self.counts = config.role, TransferCounts()
        self._readers = {reader.name: reader for reader in _readers(config)}
        self._server = BlockServer(config, self.counts.served) if config.transfer_address else None
        self.address = "" if self._server is None else self._server.address

    @property
    def transports(self) -> tuple[str, ...]:
        """By what means it can read, the best first."""
        return tuple(self._readers)

    def attach(self) -> Fetches:
        """What takes the fetches of an attach, before there is anything to fetch into."""
        return Fetches(self._readers, self.counts.fetched)

    def begin(self, fetches: Fetches, blocks: MovableBlocks) -> None:
        """The attach has these blocks now: they may be read, and written."""
        if self._server is not None:
            self._server.offer(blocks)
        fetches.begin(blocks)

    def end(self, fetches: Fetches) -> None:
        """The attach is over: once this returns none of its blocks is read or written any more."""
        if self._server is not None:
            self._server.withdraw()
        fetches.end()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for reader in self._readers.values():
            reader.close()


def _readers(config: Config) -> tuple[BlockReader, ...]:
    if config.transport == "nixl":
        raise ConfigurationError("transport is nixl, which this version does not speak; choose grpc.")
    return (GrpcBlockReader(access_of(config)),)
