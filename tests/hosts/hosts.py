"""Real processes on separate hosts: engine and frontend on one, workers on others, each started anew when it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from network import Network
from processes import PROGRAMS, wait_for

from blockplane.client.admin import Admin
from blockplane.client.client import Client
from blockplane.client.engine_values import WorkerStatus
from blockplane.protos.errors import BlockplaneError

RESTART_SECONDS = 0.5
"""How long a supervisor waits before it starts what has ended; that of Docker begins with less and doubles it."""


class Supervised:
    """One process on one host, which is started again whenever it ends, until it is stopped."""

    def __init__(self, network: Network, host: int, command: Sequence[str], log: Path) -> None:
        self.host = host
        self.log_path = log
        self.statuses: list[int] = []
        self._network, self._command = network, command
        self._stopping = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)
        self._thread.start()

    @property
    def num_starts(self) -> int:
        return len(self.statuses) + 1

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> int:
        """Tell it to stop, and let it. Returns its exit status."""
        self._stopping.set()
        self._process.send_signal(signal.SIGTERM)
        self._thread.join()
        return self._process.wait()

    def close(self) -> None:
        self._stopping.set()
        self._process.kill()
        self._thread.join()

    def log(self) -> str:
        return self.log_path.read_text()

    def _start(self) -> subprocess.Popen[Any]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log_path.open("ab") as log:
            return self._network.start(self.host, self._command, stdout=log, stderr=log, env=environ)

    def _keep_alive(self) -> None:
        while True:
            status = self._process.wait()
            if self._stopping.wait(RESTART_SECONDS):
                return
            self.statuses.append(status)
            self._process = self._start()


class Hosts:
    """A system whose processes share one configuration, on as many hosts. All of it is gone when it is closed.

    Attributes:
        network: between the hosts, and this process.
        address, engine_address: of the frontend and the engine, both on host 0.
        workers: the process on each host that has one.
    """

    def __init__(self, num_hosts: int, *flags: str) -> None:
        """Engine and frontend start here; workers by `start_worker`. Skips the test where there can be no hosts."""
        self.network = Network(num_hosts)
        self._folder = tempfile.TemporaryDirectory(prefix="blockplane-hosts-")
        self.address, self.engine_address = (f"{self.network.addresses[0]}:{port}" for port in (50051, 50050))
        self._flags = [
            "--model=synthetic",
            "--plaintext=anywhere",
            "--num-threads=1",
            f"--address={self.address}",
            f"--engine-address={self.engine_address}",
            *flags,
        ]
        self.workers: dict[int, Supervised] = {}
        self.engine, self.frontend = self._start("engine", 0), self._start("frontend", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_ending: object) -> None:
        for process in self._processes():
            process.close()
        self.network.__exit__()
        self._folder.cleanup()

    def start_worker(self, host: int, *flags: str) -> Supervised:
        self.workers[host] = self._start("worker", host, f"--rendezvous-host={self.network.addresses[host]}", *flags)
        return self.workers[host]

    def start_group(self, name: str, hosts: Sequence[int], *flags: str) -> None:
        """A rank of the group on each host; where there is one host, a worker that is a group alone."""
        for rank, host in enumerate(hosts):
            self.start_worker(host, *([f"--group={name}", f"--rank={rank}"] if len(hosts) > 1 else []), *flags)

    def stop_worker(self, host: int) -> int:
        return self.workers.pop(host).stop()

    def client(self) -> Client:
        return Client(self.address)

    def admin(self) -> Admin:
        return Admin(self.engine_address)

    def groups(self) -> dict[int, WorkerStatus]:
        """The worker groups that serve or drain, by the first of the hosts on which they are."""
        hosts = {address: host for host, address in enumerate(self.network.addresses)}
        with self.admin() as admin:
            try:
                groups = admin.list_workers()
            except BlockplaneError:
                return {}
        return {hosts[group.peer.split(":")[1]]: group for group in groups if group.state in ("ready", "draining")}

    def wait_until_serving(self, *hosts: int, seconds: float = 100) -> float:
        """Until the groups whose first hosts these are serve, and no others. Returns how many seconds that took."""
        began = time.monotonic()
        wait_for(lambda: {*self.groups()} == {*hosts}, f"the groups on hosts {hosts} serve, and they alone", seconds)
        return time.monotonic() - began

    def logs(self) -> str:
        """What each process has logged last."""
        return "\n".join(f"--- {each.log_path.stem}\n{each.log()[-3000:]}" for each in self._processes())

    def _start(self, kind: str, host: int, *flags: str) -> Supervised:
        command = [sys.executable, *PROGRAMS[kind], *self._flags, *flags]
        return Supervised(self.network, host, command, Path(self._folder.name, f"{kind}-{host}.log"))

    def _processes(self) -> list[Supervised]:
        return [*self.workers.values(), self.frontend, self.engine]


@contextmanager
def running_hosts(num_hosts: int, *flags: str) -> Iterator[Hosts]:
    """Where the test fails, what they have logged is printed."""
    with Hosts(num_hosts, *flags) as hosts:
        try:
            yield hosts
        except BaseException:
            print(hosts.logs())
            raise
