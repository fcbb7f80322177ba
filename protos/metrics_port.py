"""Where a process tells Prometheus of itself, over HTTP or HTTPS. Knows nothing of what it tells.

Every scrape has a thread of its own, and nobody waits for it: what goes wrong there goes into the log and no further.
"""

import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from threading import Thread
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from blockplane import __version__
from blockplane.protos.access import is_local
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.metric_families import MetricFamilies
from blockplane.protos.wire import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

Tell: TypeAlias = Callable[[], Iterable[Metric]]
"""Says how it stands; called by the threads of scrapes."""

_READ_SECONDS = 10.0
"""How long whoever connects may be silent, in its TLS handshake too."""


class MetricsPort:
    """Serves `metrics_address` from its beginning to the process's end, or until it is closed.

    It asks for no token: it tells counts and times, never whose requests they are or what is in them.
    """

    def __init__(self, config: Config, process: str) -> None:
        """Listen. `process`: what kind of process this is, for `build_info`.

        Raises:
            ConfigurationError: the address cannot be had, the certificate cannot be read, or others than this machine
                would reach the port in plaintext and the settings do not say that they may.
        """
        self._parts = _Parts(process)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._parts)
        ProcessCollector(registry=registry)
        self._server = _listening(config, registry)
        scheme = "https" if config.tls_certificate else "http"
        host = config.metrics_address.rpartition(":")[0]
        self.url = f"{scheme}://{host}:{self._server.server_port}/metrics"
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        logger.info("metrics on %s", self.url)

    def add(self, tell: Tell) -> None:
        """Tell this, too, from now on."""
        self._parts.tells.append(tell)

    def tell_ready(self, is_ready: Callable[[], bool]) -> None:
        """Answer `/ready` from now on, by 200 or 503, for whoever watches a process that listens nowhere else."""
        self._server.is_ready = is_ready

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Parts(Collector):
    """What the parts of a process tell; one that fails is left out, and counted."""

    def __init__(self, process: str) -> None:
        self.tells: list[Tell] = []
        self._process = process
        self._num_failures = 0

    def collect(self) -> Iterator[Metric]:
        for tell in self.tells:
            try:
                families = tuple(tell())
            except Exception:
                self._num_failures += 1
                logger.exception("a part of the metrics is left out of a scrape")
            else:
                yield from families
        own = MetricFamilies()
        own.counter("scrape_errors", "Parts of this process that failed to tell their metrics.", self._num_failures)
        facts = {"version": __version__, "protocol": str(PROTOCOL_VERSION), "process": self._process}
        own.info("build", "The version of Blockplane, and that of the protocol between its processes.", facts)
        yield from own


class _Handler(MetricsHandler):
    timeout = _READ_SECONDS

    def do_GET(self) -> None:  # noqa: N802 - its base class names it
        try:
            if self.path == "/ready":
                self._tell_ready()
            else:
                # Plain text for all: in OpenMetrics the library makes `_` of a sample's colon (client_python #1177), so
                # that no board would find its names.
                del self.headers["Accept"]
                super().do_GET()
        except OSError:
            # Whoever asked does not listen any more.
            self.close_connection = True
        except Exception:
            logger.exception("a scrape of the metrics has failed")
            self.send_error(500)

    def _tell_ready(self) -> None:
        assert isinstance(self.server, _Server)
        is_ready = self.server.is_ready
        self.send_response(404 if is_ready is None else 200 if is_ready() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    """Takes connections in plaintext, or by TLS with the certificate as its file has it at that moment."""

    # Two processes at one port would each answer some of the scrapes.
    allow_reuse_port = False

    def __init__(self, config: Config, registry: CollectorRegistry) -> None:
        """Raises OSError where the address cannot be had, ConfigurationError where the certificate cannot be read."""
        self.is_ready: Callable[[], bool] | None = None
        self._config = config
        self._context = _tls_context(config) if config.tls_certificate else None
        host, _, port = config.metrics_address.rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__((str(address[0]), int(address[1])), _Handler.factory(registry))

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for our name, and may wait for it.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._context is None:
            return connection, address
        try:
            self._context = _tls_context(self._config)
        except ConfigurationError as error:
            logger.error("going on with the certificate of before: %s", error)
        # The handshake is for the connection's own thread, where it has a limit.
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        logger.warning("a connection to the metrics has failed: %s", sys.exception())


def _listening(config: Config, registry: CollectorRegistry) -> _Server:
    address = config.metrics_address
    if not config.tls_certificate and not is_local(address) and config.plaintext != "anywhere":
        raise ConfigurationError(
            f"metrics_address {address} is open to other machines, in plaintext; set tls_certificate and tls_key, or"
            " plaintext to anywhere where the network is your own."
        )
    try:
        return _Server(config, registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on metrics_address {address}: {error.strerror}; choose another."
        ) from None


def _tls_context(config: Config) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key)
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigurationError(
            f"the metrics cannot use {config.tls_certificate}: {reason}; check tls_certificate, tls_key and"
            " tls_client_ca."
        ) from None
    return context
