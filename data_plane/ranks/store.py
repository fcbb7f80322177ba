"""Where the ranks of a group find each other: a store that rank 0 opens, and a machine's own address. Knows no group.

What ranks send each other is not encrypted, so that it stays on this machine unless the settings say otherwise.
"""

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from blockplane.data_plane.own_address import host_towards, joined
from blockplane.protos.access import is_local
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError, UnavailableError


def own_host(config: Config) -> str:
    """The address by which other ranks reach this one: `rendezvous_host`, else the one that the engine sees.

    Raises:
        ConfigurationError: others than this machine would read what goes there in plaintext.
    """
    host = config.rendezvous_host or host_towards(config.engine_address)
    if not is_local(f"{host}:0") and config.plaintext != "anywhere":
        raise ConfigurationError(
            f"the ranks of group {config.group} would send each other activations and tokens at {host} in plaintext;"
            " set plaintext to anywhere where the network is your own, or rendezvous_host to 127.0.0.1 where all of"
            " them are on this machine."
        )
    return host


class OwnStore:
    """Rank 0's, on a port of its own that is free, as long as its process lives.

    Attributes:
        address: host:port of it.
        store: what it holds.
    """

    def __init__(self, host: str) -> None:
        """Raises ConfigurationError where `host` is not this machine's."""
        try:
            family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host} for the other ranks: {error.strerror}; set rendezvous_host to an address of"
                " this machine."
            ) from None
        port: int = listener.getsockname()[1]
        self.address = joined(host, port)
        # Told the socket, it listens on this address alone and not on all of the machine's.
        self.store: Store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def other_store(address: str, own_host: str, seconds: float) -> Store:
    """Rank 0's, seen from another.

    Raises:
        ConfigurationError: no other machine reaches that address.
        UnavailableError: nobody answered there within so long.
    """
    if is_local(address) and not is_local(f"{own_host}:0"):
        raise ConfigurationError(
            f"rank 0 is to be met at {address}, which only its own machine reaches, and this rank is at {own_host};"
            " set rendezvous_host of rank 0 to an address that other machines reach."
        )
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=seconds)
    try:
        return TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise UnavailableError(f"rank 0 does not answer at {address}: {str(error).splitlines()[0]}") from None
