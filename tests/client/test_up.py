"""`blockplane up` with real processes and the synthetic model: it starts, says so, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_inference import WAIT_SECONDS

from blockplane.client.client import Client
from blockplane.client.processes import MODULES
from blockplane.client.up import _processes
from blockplane.protos.config import load_config

COMMAND = [sys.executable, "-m", "blockplane.client"]


class Up:
    """A running `blockplane up` whose temporary files and standard error lie under `folder`."""

    def __init__(self, folder: Path, address: str, *arguments: str) -> None:
        self.address = address
        self.folder = folder / "tmp"
        self.folder.mkdir()
        self._stderr = folder / "stderr"
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*COMMAND, "up", "--address", address, "--kv-cache-bytes", "50000000", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"},
            )

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_until_ready(self) -> None:
        assert self.process.stdout.readline() == f"blockplane ready on {self.address} (model synthetic)\n", self.stderr

    def children(self) -> dict[str, int]:
        """Process ids of the planes that run for this address, by name."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and (line := _command_line(folder)) and f"--address={self.address}" in line:
                found.update({name: int(folder.name) for name, module in MODULES.items() if module in line})
        return found

    def finish(self) -> tuple[int, str]:
        """Exit status and standard output."""
        out, _ = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, out


def _command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def start_up(free_address: str) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []
    # A socket's path has room for 107 characters, of which pytest's own folders may take most.
    with tempfile.TemporaryDirectory(prefix="up-") as folder:

        def start(*arguments: str) -> Up:
            started.append(Up(Path(folder), free_address, *arguments))
            return started[-1]

        yield start
        for up in started:
            for process_id in up.children().values():
                os.kill(process_id, signal.SIGKILL)
            up.process.kill()
            up.process.communicate()


def test_a_command_runs_once_the_system_is_ready_and_alone_has_standard_output(start_up):
    up = start_up("--model", "synthetic", "--", "generate", "Once upon a time", "--max-tokens", "8", "--ignore-eos")
    status, out = up.finish()
    assert status == 0, up.stderr
    assert out.count("\n") == 1
    assert len(out) > 1
    assert f"blockplane ready on {up.address} (model synthetic)\n" in up.stderr
    assert not up.children()
    assert not list(up.folder.iterdir())


def test_the_commands_exit_status_is_that_of_up(start_up):
    up = start_up("--model", "synthetic", "--", "generate", "hi", "--max-tokens", "0")
    assert up.finish() == (1, "")
    assert up.stderr.count("blockplane generate: max_tokens is 0") == 1
    assert "blockplane up:" not in up.stderr


def test_sigint_ends_all_of_it_with_exit_0(start_up):
    up = start_up("--model", "synthetic")
    up.wait_until_ready()
    assert up.children().keys() == MODULES.keys()
    with Client(up.address) as client:
        *_, last = client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
    assert last.usage.num_output_tokens == 4
    up.process.send_signal(signal.SIGINT)
    assert up.finish() == (0, "")
    assert not up.children()
    assert not list(up.folder.iterdir())
    assert "Error" not in up.stderr


def test_sigterm_lets_an_open_stream_end_before_all_of_it_does(start_up):
    up = start_up("--model", "synthetic")
    up.wait_until_ready()
    with Client(up.address) as client:
        stream = client.generate([1, 2, 3], max_tokens=200, ignore_eos=True)
        next(stream)
        up.process.send_signal(signal.SIGTERM)
        *_, last = stream
    assert last.usage.num_output_tokens == 200
    assert up.finish() == (0, "")
    assert not up.children()


def test_sigterm_ends_all_of_it_also_while_it_starts(start_up):
    up = start_up("--model", "synthetic")
    assert eventually(lambda: up.children().keys() == MODULES.keys())
    up.process.send_signal(signal.SIGTERM)
    assert up.finish() == (0, "")
    assert not up.children()
    assert not list(up.folder.iterdir())


def test_no_process_outlives_an_up_that_is_killed(start_up):
    up = start_up("--model", "synthetic")
    up.wait_until_ready()
    up.process.kill()
    assert eventually(lambda: not up.children())


def test_no_process_outlives_an_up_that_is_killed_while_it_starts(start_up):
    up = start_up("--model", "synthetic")
    assert eventually(lambda: up.children().keys() == MODULES.keys())
    up.process.kill()
    assert eventually(lambda: not up.children())


@pytest.mark.parametrize("command", [(), ("--", "generate", "hi", "--ignore-eos")])
def test_a_worker_that_is_killed_ends_all_of_it_with_its_name(start_up, command):
    up = start_up("--model", "synthetic", *command)
    if command:
        assert eventually(lambda: "blockplane ready" in up.stderr or up.process.poll() is not None)
    else:
        up.wait_until_ready()
    os.kill(up.children()["worker"], signal.SIGKILL)
    status, _ = up.finish()
    assert status == 1
    assert up.stderr.splitlines()[-1].startswith("blockplane up: the worker is gone: signal 9 ended it")
    assert not up.children()


def test_a_taken_port_is_one_sentence(start_up, free_address: str):
    host, _, port = free_address.rpartition(":")
    with socket.create_server((host, int(port))):
        up = start_up("--model", "synthetic")
        assert up.finish() == (1, "")
    assert up.stderr == (
        f"blockplane up: cannot listen on {free_address}: another process does; stop it or choose another address.\n"
    )


def test_a_taken_engine_address_is_one_sentence_of_the_engines(start_up):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine_address = f"127.0.0.1:{taken.getsockname()[1]}"
        up = start_up("--model", "synthetic", "--engine-address", engine_address, "--log-level", "error")
        assert up.finish() == (1, "")
    assert up.stderr.startswith(f"blockplane up: the engine ended: cannot listen on {engine_address}")
    assert up.stderr.count("\n") == 1
    assert not up.children()


def test_a_missing_model_is_one_sentence_that_names_it(start_up, tmp_path: Path):
    missing = str(tmp_path / "none.gguf")
    up = start_up("--model", missing, "--log-level", "error")
    assert up.finish() == (1, "")
    assert up.stderr.startswith("blockplane up: the worker ended: ")
    assert missing in up.stderr
    assert up.stderr.count("\n") == 1
    assert not up.children()


def test_a_port_of_zero_is_refused_since_no_client_could_find_it(start_up):
    up = start_up("--model", "synthetic", "--address", "127.0.0.1:0")
    assert up.finish() == (1, "")
    assert up.stderr == "blockplane up: address is 127.0.0.1:0; name a port, so that clients can find it.\n"


def test_compile_ends_by_the_sentence_of_what_cannot_be_compiled_for() -> None:
    with tempfile.TemporaryDirectory(prefix="up-") as folder:
        ran = subprocess.run(
            [*COMMAND, "compile", "--model", "synthetic", "--device", "cpu"],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
            env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
        )
        left = os.listdir(folder)
    assert ran.returncode == 1
    sentence = "the builder ended: device is cpu, for which nothing is compiled; choose device neuron."
    assert ran.stderr.splitlines()[-1] == f"blockplane compile: {sentence}"
    assert left == []


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("[::1]:50052", {"engine": "[::1]:50052", "frontend": "[::1]:50053", "worker": "[::1]:50054"}),
        ("localhost:0", dict.fromkeys(MODULES, "localhost:0")),
        ("", dict.fromkeys(MODULES, "")),
    ],
)
def test_each_process_tells_its_metrics_at_a_port_of_its_own(address: str, own: dict[str, str]) -> None:
    config = load_config({"metrics_address": address}, {})
    assert {name: each.metrics_address for name, _, each in _processes(config)} == own


def test_each_rank_is_a_process_with_ports_and_a_share_of_the_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockplane.client.up.num_usable_cores", lambda: 5)
    settings = {"tensor_parallel_size": "2", "metrics_address": "h:7", "transfer_address": "h:20"}
    ranks = [each for name, _, each in _processes(load_config(settings, {})) if name == "worker"]
    assert [(each.group, each.rank, each.num_threads) for each in ranks] == [("up", 0, 2), ("up", 1, 2)]
    assert [each.metrics_address for each in ranks] == ["h:9", "h:10"]
    assert [each.transfer_address for each in ranks] == ["h:20", "h:21"]
    given = load_config({**settings, "group": "blue", "num_threads": "3"}, {})
    ranks = [each for name, _, each in _processes(given) if name == "worker"]
    assert [(each.group, each.num_threads) for each in ranks] == [("blue", 3), ("blue", 3)]
    called = [called for _, called, _ in _processes(given)]
    assert called == ["frontend", "worker of rank 0", "worker of rank 1", "engine"]
