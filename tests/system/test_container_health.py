"""The health check of the image, on real processes: what it says of each, when."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from processes import System, free_port, wait_for


class Watched:
    """A system whose worker has a port for its metrics, and the health check of each of its processes."""

    def __init__(self) -> None:
        self._metrics_address = f"127.0.0.1:{free_port()}"
        self.system = System("--max-model-len=256")

    def start(self, kind: str) -> None:
        self.system.start(kind, *[f"--metrics-address={self._metrics_address}"] * (kind == "worker"))

    def check(self, kind: str) -> tuple[int, str]:
        """Exit status and what it said."""
        flags = [
            f"--address={self.system.address}",
            f"--engine-address={self.system.engine_address}",
            f"--metrics-address={self._metrics_address}",
        ]
        command = [sys.executable, "-m", "blockplane.client.health", kind, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stderr

    def is_well(self, kind: str) -> bool:
        return self.check(kind) == (0, "")


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    try:
        yield watched
    finally:
        watched.system.close()


@pytest.mark.slow
def test_each_process_is_well_once_it_can_do_its_part_and_no_longer(watched: Watched) -> None:
    status, sentence = watched.check("engine")
    assert status == 1
    assert "does not answer" in sentence
    watched.start("frontend")
    watched.start("worker")
    wait_for(lambda: watched.check("worker")[1].endswith("HTTP Error 503: Service Unavailable.\n"), "it has loaded")
    wait_for(lambda: "is NOT_SERVING" in watched.check("frontend")[1], "the frontend listens")
    watched.start("engine")
    for kind in ("engine", "worker", "frontend"):
        wait_for(lambda kind=kind: watched.is_well(kind), f"the {kind} is well")  # type: ignore[misc]
    engine = watched.system.processes("engine")[0]
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    for kind in ("engine", "worker", "frontend"):
        wait_for(lambda kind=kind: watched.check(kind)[0] == 1, f"the {kind} is not")  # type: ignore[misc]
