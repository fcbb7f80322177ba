"""A server of any of our processes: its port, its errors, and whom it lets in; knows no service and no signal."""

import grpc

from blockplane.protos.authentication import Authentication
from blockplane.protos.channel import PEER_OPTIONS, ChannelOptions
from blockplane.protos.config import Config
from blockplane.protos.faults import FaultReports
from blockplane.protos.ports import open_port
from blockplane.protos.tokens import Tokens
from blockplane.protos.tracing import Tracing

_DEFAULTS = Config()


def listening_server(
    address: str, options: ChannelOptions = PEER_OPTIONS, config: Config = _DEFAULTS
) -> grpc.aio.Server:
    """A server bound to `address`, not started yet. Raises ConfigurationError as `open_port` and `Tokens` do."""
    server = closed_server(options, config)
    open_port(server, address, config)
    return server


def closed_server(options: ChannelOptions = PEER_OPTIONS, config: Config = _DEFAULTS) -> grpc.aio.Server:
    """The same without a port. Raises ConfigurationError as `Tokens` does."""
    # The first of them sees how the others end a call.
    interceptors: list[grpc.aio.ServerInterceptor] = [FaultReports(), Tracing()]
    if config.tokens:
        interceptors.append(Authentication(Tokens(config.tokens)))
    return grpc.aio.server(options=options, interceptors=interceptors)
