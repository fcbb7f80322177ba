"""How a server's port is opened: with TLS, or in plaintext where that may be. Knows no service."""

import logging
import ssl

import grpc

from blockplane.protos.access import is_local, is_socket_file, read_file
from blockplane.protos.config import Config
from blockplane.protos.errors import BlockplaneError, ConfigurationError

logger = logging.getLogger(__name__)


def open_port(server: grpc.aio.Server, address: str, config: Config) -> int:
    """Have the server listen there once it starts.

    Returns:
        The port, which is the address's own unless that is 0: then any that is free.

    Raises:
        ConfigurationError: the address cannot be had, the certificate cannot be read, or others than this machine would
            reach the port in plaintext and the settings do not say that they may.
    """
    try:
        if config.tls_certificate and not is_socket_file(address):
            return server.add_secure_port(address, _credentials(config))
        if not is_local(address) and config.plaintext != "anywhere":
            raise ConfigurationError(
                f"{address} is open to other machines, in plaintext; set tls_certificate and tls_key, or plaintext to"
                " anywhere where the network is your own."
            )
        return server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigurationError(f"cannot listen on {address}: it is taken or not ours; choose another.") from None


def _credentials(config: Config) -> grpc.ServerCredentials:
    """Read anew at every handshake: a certificate that was renewed needs no restart."""
    newest = _certificate_configuration(config)

    def read_again() -> "grpc.ServerCertificateConfiguration":
        nonlocal newest
        try:
            newest = _certificate_configuration(config)
        except BlockplaneError as error:
            logger.error("going on with the certificate of before: %s", error)
        return newest

    return grpc.dynamic_ssl_server_credentials(newest, read_again, bool(config.tls_client_ca))


def _certificate_configuration(config: Config) -> "grpc.ServerCertificateConfiguration":
    """Raises ConfigurationError where a file cannot be read, or certificate and key are no pair."""
    pair = read_file("tls_key", config.tls_key), read_file("tls_certificate", config.tls_certificate)
    try:
        # gRPC itself would find out only as callers connect.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_certificate, config.tls_key)
    except ssl.SSLError as error:
        reason = f"{config.tls_certificate} and {config.tls_key} are no certificate and its key: {error.reason}"
        raise ConfigurationError(f"{reason}; check tls_certificate and tls_key.") from None
    roots = read_file("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration([pair], roots)
