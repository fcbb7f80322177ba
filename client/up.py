"""`blockplane up`: a whole system on this machine, until it is told to stop; knows neither models nor requests."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from blockplane.client.client import Client
from blockplane.client.connect import ENGINE_SETTINGS, SETTINGS
from blockplane.client.processes import MODULES, Child, stop
from blockplane.protos.access import access_of
from blockplane.protos.config import Config, as_flags, load_config
from blockplane.protos.errors import BlockplaneError, ConfigurationError, UnavailableError
from blockplane.protos.threads import num_usable_cores

EXIT_INTERRUPTED = 130
"""What shells report of a command that SIGINT ended."""

POLL_SECONDS = 0.1

_METRICS_PORTS = ("engine", "frontend", "worker")
"""In the order of their ports; of several ranks the further ones follow."""
_GROUP = "up"
"""What the ranks call their group, where no setting does."""


def up(flags: Mapping[str, Any], command: Sequence[str]) -> int:
    """Run engine, frontend and worker, or all its ranks, until SIGINT or SIGTERM, or until `command` has ended, a
    sub-command of ours.

    Returns:
        The exit status: the command's, or 0 where there is none.

    Raises:
        ConfigurationError: the settings contradict themselves, or the address is taken.
        BlockplaneError: one of the processes ended; the message names it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="blockplane-") as folder:
            # Only this user can open the folder, hence the engine's socket in it.
            config = load_config(flags, defaults=Config(engine_address=f"unix:{folder}/engine.sock"))
            return _run(config, command)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED if command else 0


def _run(config: Config, command: Sequence[str]) -> int:
    _refuse_taken(config.address)
    with _children(config) as children:
        ready = f"blockplane ready on {config.address} (model {_wait_until_serving(config, children)})"
        print(ready, file=sys.stderr if command else sys.stdout, flush=True)
        if command:
            return _run_command(command, config, children)
        while True:
            _check(children)
            time.sleep(POLL_SECONDS)


@contextmanager
def _children(config: Config) -> Iterator[list[Child]]:
    children: list[Child] = []
    drain_seconds = float(config.drain_seconds)
    try:
        for name, called, own in _processes(config):
            with _signals_put_off():
                children.append(Child(name, as_flags(own), called))
        yield children
    except BlockplaneError:
        # What lacks one of its processes finishes nothing.
        drain_seconds = 0.0
        raise
    finally:
        stop(children, drain_seconds)


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt only at the end: nobody would stop a child that is half begun."""
    come: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: come.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if come:
            raise KeyboardInterrupt


def _processes(config: Config) -> Iterator[tuple[str, str, Config]]:
    """Each process in the order in which they stop: its key of MODULES, how it is called, and its configuration."""
    for name in MODULES:
        own = _with_own_metrics_port(config, name)
        if name == "worker" and config.tensor_parallel_size > 1:
            for rank in range(config.tensor_parallel_size):
                yield name, f"worker of rank {rank}", _of_rank(own, rank)
        else:
            yield name, name, own


def _with_own_metrics_port(config: Config, name: str) -> Config:
    """The engine has the one that is set, and frontend and worker the two behind it."""
    return replace(config, metrics_address=_ports_on(config.metrics_address, _METRICS_PORTS.index(name)))


def _of_rank(config: Config, rank: int) -> Config:
    """A worker's configuration as one of its group's ranks has it: ports and a share of the cores are its own."""
    return replace(
        config,
        group=config.group or _GROUP,
        rank=rank,
        metrics_address=_ports_on(config.metrics_address, rank),
        transfer_address=_ports_on(config.transfer_address, rank),
        num_threads=config.num_threads or max(1, num_usable_cores() // config.tensor_parallel_size),
    )


def _ports_on(address: str, offset: int) -> str:
    """host:port so many ports on; 0, any port, is everybody's."""
    host, _, port = address.rpartition(":")
    return address if not host or int(port) == 0 else f"{host}:{int(port) + offset}"


def _check(children: Sequence[Child]) -> None:
    for child in children:
        child.check()


def _wait_until_serving(config: Config, children: Sequence[Child]) -> str:
    """Wait without a limit, since loading takes as long as it takes. Returns the model's name."""
    with Client(config.address, access=access_of(config)) as client:
        while True:
            _check(children)
            try:
                client.wait_until_serving(timeout=5 * POLL_SECONDS)
                return client.model_info().name
            except UnavailableError:
                continue


def _run_command(command: Sequence[str], config: Config, children: Sequence[Child]) -> int:
    """Run a sub-command on our terminal, as long as the system lives. Returns its exit status."""
    settings = {f"BLOCKPLANE_{name.upper()}": getattr(config, name) for name in {*SETTINGS, *ENGINE_SETTINGS}}
    environ = os.environ | settings
    process = subprocess.Popen([sys.executable, "-m", "blockplane.client", *command], env=environ)  # noqa: S603
    try:
        while (status := process.poll()) is None:
            _check(children)
            time.sleep(POLL_SECONDS)
        return status
    finally:
        process.terminate()
        process.wait()


def _refuse_taken(address: str) -> None:
    """Raise ConfigurationError if anyone listens there: the health that we wait for must be our own frontend's."""
    host, _, port = address.rpartition(":")
    if port == "0":
        raise ConfigurationError(f"address is {address}; name a port, so that clients can find it.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except (OSError, ValueError):
        return
    raise ConfigurationError(f"cannot listen on {address}: another process does; stop it or choose another address.")
