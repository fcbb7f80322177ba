"""A rolling upgrade from the protocol before this one: that code's own worker and frontend, from the history."""

import signal
import subprocess
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import pytest
from processes import System, wait_for
from readers import Readers

from blockplane.protos import wire
from blockplane.protos.errors import UnsupportedError
from blockplane.protos.structured import StructuredOutput

ROOT = Path(__file__).parents[2]
COLOURS = ["red", "green"]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment in which a process runs the last code that spoke OLDEST_PROTOCOL_VERSION."""
    commit = _last_commit_of(wire.OLDEST_PROTOCOL_VERSION)
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="tar")
    # The second keeps the working directory, which is this tree, from coming before the first.
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def _last_commit_of(version: int) -> str:
    line = f"PROTOCOL_VERSION = {version}"
    log = ["git", "log", "--format=%H", f"-S{line}\n", "--", "protos/wire.py"]
    commits = subprocess.run(log, cwd=ROOT, capture_output=True, text=True).stdout.split()
    # The newest of them took the line away.
    if len(commits) < 2:
        pytest.skip(f"the history does not reach back to the end of protocol {version}; fetch the whole of it")
    return f"{commits[0]}^"


def readers_of(system: System) -> Readers:
    """Whose streams are resumed where a frontend goes away."""
    return Readers(system.address, 6, reattach_seconds=60)


def stop(system: System, kind: str, number: int) -> None:
    process = system.processes(kind)[number]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, system.log(kind)


def colour(system: System) -> str:
    """One of two, if the worker sees to it."""
    with system.client() as client:
        deltas = client.generate("a colour: ", structured=StructuredOutput.choice(COLOURS), temperature=0)
        return "".join(delta.text for delta in deltas)


def num_groups(system: System) -> int:
    return system.statistics().num_groups


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_stay_exact_while_frontends_and_then_workers_of_the_protocol_before_are_replaced(
    before: Mapping[str, str], tmp_path: Path
) -> None:
    system = System("--max-model-len=512")
    try:
        system.start("engine", f"--journal={tmp_path}/journal")
        for kind in ("frontend", "worker", "worker"):
            system.start(kind, environment=before)
        system.wait_until_serving()
        wait_for(lambda: num_groups(system) == 2, "both workers are ready", 60)
        with readers_of(system) as readers:
            readers.go_on()
            # Told to stop, one of protocol 3 would take the requests of its streams with it.
            system.processes("frontend")[0].kill()
            system.processes("frontend")[0].wait()
            system.start("frontend")
            readers.go_on()
            with pytest.raises(UnsupportedError, match="structured"):
                colour(system)
            for number in range(2):
                stop(system, "worker", number)
                wait_for(lambda: num_groups(system) == 1, "the engine has let the old worker go", 60)
                readers.go_on()
                system.start("worker")
                wait_for(lambda: num_groups(system) == 2, "its successor is ready", 60)
                readers.go_on()
                assert colour(system) in COLOURS
            readers.end()
        for kind in ("engine", "frontend", "worker"):
            assert "Traceback" not in system.log(kind)
    finally:
        system.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_and_frontends_go_back_to_the_protocol_before_while_streams_are_open(
    before: Mapping[str, str], tmp_path: Path
) -> None:
    """Workers first: a new frontend knows what old workers do not."""
    system = System("--max-model-len=512")
    try:
        for kind in ("engine", "frontend", "worker"):
            system.start(kind, *[f"--journal={tmp_path}/journal"] * (kind == "engine"))
        system.wait_until_serving()
        with readers_of(system) as readers:
            readers.go_on()
            system.start("worker", environment=before)
            wait_for(lambda: num_groups(system) == 2, "the old worker is ready", 60)
            stop(system, "worker", 0)
            readers.go_on()
            with pytest.raises(UnsupportedError, match="structured"):
                colour(system)
            readers.end()
        stop(system, "frontend", 0)
        system.start("frontend", environment=before)
        system.wait_until_serving()
        with readers_of(system) as readers:
            readers.go_on()
            readers.end()
    finally:
        system.close()
