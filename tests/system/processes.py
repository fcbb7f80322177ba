"""Real processes for the tests: engine, frontend and workers on this machine, each with a log of its own."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import grpc

from blockplane.client.client import Client
from blockplane.protos.errors import UnavailableError
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

PROGRAMS = {
    "engine": ("-m", "blockplane.control_plane.engine"),
    "frontend": ("-m", "blockplane.control_plane.frontend"),
    "worker": ("-m", "blockplane.data_plane"),
    "unruly worker": (str(Path(__file__).with_name("unruly_worker.py")),),
    "paced worker": (str(Path(__file__).parents[2] / "benchmarks" / "paced_worker.py"),),
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class System:
    """Processes that share one configuration. Every one of them is gone when the system is closed."""

    def __init__(self, *flags: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="blockplane-test-")
        self.address = f"127.0.0.1:{free_port()}"
        self.engine_address = f"unix:{self._folder.name}/engine.sock"
        self._flags = [
            "--model",
            "synthetic",
            "--address",
            self.address,
            "--engine-address",
            self.engine_address,
            *flags,
        ]
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(
        self, kind: str, *flags: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[bytes]:
        log = open(f"{self._folder.name}/{kind}.log", "ab")  # noqa: SIM115 - the process owns it
        process = subprocess.Popen(
            [sys.executable, *PROGRAMS[kind], *self._flags, *flags],
            stderr=log,
            stdout=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self._processes.append((kind, process))
        return process

    def processes(self, kind: str) -> list[subprocess.Popen[bytes]]:
        """All processes of this kind that were started, dead ones too, oldest first."""
        return [process for started, process in self._processes if started == kind]

    def log(self, kind: str) -> str:
        return Path(f"{self._folder.name}/{kind}.log").read_text()

    def client(self) -> Client:
        return Client(self.address)

    def statistics(self) -> pb.GetStatisticsResponse:
        with grpc.insecure_channel(self.engine_address) as channel:
            return EngineStub(channel).GetStatistics(pb.GetStatisticsRequest())

    def wait_until_serving(self) -> None:
        """Fails with what all processes have logged last if it does not come to that."""
        try:
            with self.client() as client:
                client.wait_until_serving(timeout=100)
        except UnavailableError as error:
            ends = [f"{kind}, {process.poll()}:\n{self.log(kind)[-1000:]}" for kind, process in self._processes]
            raise AssertionError("\n".join([str(error), *ends])) from None

    def close(self) -> None:
        for _, process in reversed(self._processes):
            process.kill()
            process.wait()
        self._folder.cleanup()


@contextmanager
def running_system(*flags: str) -> Iterator[System]:
    """Engine, frontend and one synthetic worker, serving."""
    system = System(*flags)
    try:
        for kind in ("engine", "frontend", "worker"):
            system.start(kind)
        system.wait_until_serving()
        yield system
    finally:
        system.close()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Poll until `condition` holds; fail naming `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.02)
