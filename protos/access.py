"""How a process dials another: over TLS or in plaintext, and what it shows of itself; knows no service."""

import ipaddress
from dataclasses import dataclass, fields
from pathlib import Path

import grpc

from blockplane.protos.channel import ChannelOptions
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError

AUTHORIZATION = "authorization"
"""Metadata: `Bearer`, a space, and the caller's token (RFC 6750)."""


@dataclass(frozen=True, slots=True)
class Access:
    """The settings of the same names that have to do with dialling.

    Files are read whenever a channel is made, so that a process which dials again shows its newest certificate.
    """

    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    token: str = ""
    plaintext: str = "local"

    def channel(self, address: str, options: ChannelOptions) -> grpc.Channel:
        """Raises ConfigurationError where one of the files cannot be read."""
        credentials = self._credentials(address)
        if credentials is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, credentials, options)

    def aio_channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """The same for an event loop."""
        credentials = self._credentials(address)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What every call shows.

        Raises:
            ConfigurationError: the token cannot be read, or others could read it on its way.
        """
        if not self.token:
            return ()
        if not self.tls_ca and not is_local(address) and self.plaintext != "anywhere":
            raise ConfigurationError(
                f"the token would go to {address} in plaintext; set tls_ca, or plaintext to anywhere."
            )
        lines = read_file("token", self.token).decode(errors="replace").split()
        if len(lines) != 1:
            raise ConfigurationError(f"token names {self.token}, which holds {len(lines)} words; put one token there.")
        return ((AUTHORIZATION, f"Bearer {lines[0]}"),)

    def _credentials(self, address: str) -> grpc.ChannelCredentials | None:
        if not self.tls_ca or is_socket_file(address):
            return None
        roots = None if self.tls_ca == "system" else read_file("tls_ca", self.tls_ca)
        if not self.tls_certificate:
            return grpc.ssl_channel_credentials(roots)
        key = read_file("tls_key", self.tls_key)
        return grpc.ssl_channel_credentials(roots, key, read_file("tls_certificate", self.tls_certificate))


def access_of(config: Config) -> Access:
    return Access(**{each.name: getattr(config, each.name) for each in fields(Access)})


def is_socket_file(address: str) -> bool:
    """Whether the file system says who may connect: there TLS has nothing to add."""
    return address.startswith("unix:")


def is_local(address: str) -> bool:
    """Whether nothing that is sent there leaves this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_file(setting: str, path: str) -> bytes:
    """Raises ConfigurationError, which names the setting."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{setting} names {path}, which cannot be read: {error.strerror}.") from None
