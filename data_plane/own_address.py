"""By which host others reach this machine, as far as its way to the engine tells. Opens nothing that stays open."""

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def host_towards(engine_address: str) -> str:
    """The local address that packets to the engine come from; that of the loopback where the engine is a socket file,
    or where no way leads there.
    """
    host, _, port = engine_address.rpartition(":")
    if not port.isdecimal():
        return LOOPBACK
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as towards:
            # No packet is sent: a datagram socket that is connected has only asked for its route.
            towards.connect(address)
            return str(towards.getsockname()[0])
    except OSError:
        return LOOPBACK


def reachable_address(host: str, port: int, engine_address: str) -> str:
    """host:port that others can dial where this process listens at `host`, which may stand for every address."""
    return joined(host_towards(engine_address) if _is_every_address(host) else host.strip("[]"), port)


def joined(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
