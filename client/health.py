"""Whether a process on this machine is well, for whoever probes its container; asks no other machine.

    python3 -m blockplane.client.health [engine | frontend | worker] [settings]

ends with 0 if it is; with 1, and a sentence, if it is not.
"""

import argparse
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from blockplane.client.processes import MODULES
from blockplane.protos.access import access_of
from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.config import Config, add_settings, load_config
from blockplane.protos.errors import BlockplaneError, ConfigurationError, UnavailableError
from blockplane.protos.process import EXIT_FAILED

PROCESSES = ("engine", "frontend", "worker")

_TIMEOUT_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m blockplane.client.health", description="Tells by its exit status whether a process is well."
    )
    parser.add_argument("process", nargs="?", choices=PROCESSES, help="which one (default: the one that runs here)")
    add_settings(parser)
    flags = parser.parse_args(arguments)
    try:
        _CHECKS[flags.process or _running_process()](load_config(vars(flags)))
    except BlockplaneError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return 0


def check_port(address: str, config: Config) -> None:
    """Ask by grpc.health.v1, which needs no token.

    Raises:
        UnavailableError: it is not SERVING, or does not answer.
        ConfigurationError: a file of the settings cannot be read.
    """
    with access_of(config).channel(address, PEER_OPTIONS) as channel:
        try:
            check = HealthStub(channel).Check  # type: ignore[attr-defined] # the published stubs lack it
            answer = check(health_pb2.HealthCheckRequest(), _TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise UnavailableError(f"{address} does not answer: {error.details()}.") from None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if status != "SERVING":
        raise UnavailableError(f"{address} is {status}.")


def check_worker(config: Config) -> None:
    """Ask on the port of its metrics, the only one that it has.

    Raises:
        UnavailableError: it is not attached to an engine, or does not answer.
        ConfigurationError: there is no such port, or a file of the settings cannot be read.
    """
    if not config.metrics_address:
        raise ConfigurationError("metrics_address is empty, and a worker listens nowhere else; set it.")
    scheme = "https" if config.tls_certificate else "http"
    url = f"{scheme}://{on_this_machine(config.metrics_address)}/ready"
    # No proxy that the environment names.
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=_tls_context(config)))
    try:
        opener.open(url, timeout=_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise UnavailableError(f"{url} does not say that the worker is attached: {error}.") from None


def on_this_machine(address: str) -> str:
    """Where a process that listens at `address` is dialled from beside it."""
    host, colon, port = address.rpartition(":")
    return f"127.0.0.1{colon}{port}" if host in ("0.0.0.0", "[::]") else address  # noqa: S104 - it binds nothing


_CHECKS: Mapping[str, Callable[[Config], None]] = {
    "engine": lambda config: check_port(on_this_machine(config.engine_address), config),
    "frontend": lambda config: check_port(on_this_machine(config.address), config),
    "worker": check_worker,
}


def _tls_context(config: Config) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca if config.tls_ca not in ("", "system") else None)
        if config.tls_certificate:
            context.load_cert_chain(config.tls_certificate, config.tls_key)
    except OSError as error:
        raise ConfigurationError(f"tls_ca, tls_certificate or tls_key cannot be read: {error}.") from None
    return context


def _running_process() -> str:
    """Which of our processes runs here, by the command lines that Linux tells of.

    Raises:
        UnavailableError: none does.
    """
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        # It may have ended meanwhile.
        with suppress(OSError):
            words = command_line.read_bytes().decode(errors="replace").split("\0")
            for name, module in MODULES.items():
                if module in words:
                    return name
    raise UnavailableError("neither engine nor frontend nor worker runs here.")


if __name__ == "__main__":
    sys.exit(main())
