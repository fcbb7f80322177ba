"""What a server tells of itself: reflection, and channelz for admins; knows no service of ours."""

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection

from blockplane.protos.access import is_local
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError


def add_introspection(server: grpc.aio.Server, services: Sequence[str], address: str, config: Config) -> None:
    """Serve what the settings turn on; `services` are the names of those that reflection is to tell of.

    Raises:
        ConfigurationError: channelz is not installed, or would tell anybody on the network.
    """
    if config.reflection == "on":
        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)
    if config.channelz == "on":
        _add_channelz(server, address, config)


def _add_channelz(server: grpc.aio.Server, address: str, config: Config) -> None:
    if not config.tokens and not is_local(address):
        raise ConfigurationError(
            f"channelz would tell everybody who reaches {address} of its calls; set tokens, so that only admins can"
            " ask, or turn it off."
        )
    try:
        from grpc_channelz.v1 import channelz
    except ImportError:
        raise ConfigurationError("channelz is on and not installed; pip install 'blockplane[channelz]'.") from None
    channelz.add_channelz_servicer(server)
