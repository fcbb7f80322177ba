"""The image and docker-compose.yml in this machine's Docker Engine; knows processes only by their containers.

The build takes BASE_IMAGE, WHEELS and the other build arguments from the environment: see deploy/README.md.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from processes import free_port, wait_for
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.config import Config

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
PROMPT = list(range(50))
IMAGE = "blockplane-test"
USER_ID = "10001"


def run(*command: str, environ: dict[str, str] | None = None) -> str:
    """What the command printed, on either stream; it must succeed."""
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def answers(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def compose_command() -> Sequence[str]:
    if not answers("docker", "info"):
        pytest.skip("no Docker Engine answers `docker info`")
    for command in (("docker", "compose"), ("docker-compose",)):
        if answers(*command, "version"):
            return command
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")


class Containers:
    """The services of docker-compose.yml, as a project of the tests' own on a port of its own."""

    def __init__(self) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._compose = (*compose_command(), "--project-name", f"blockplane-test-{port}", "--file", str(COMPOSE_FILE))
        self._environ = os.environ | {
            "BLOCKPLANE_IMAGE": IMAGE,
            "BLOCKPLANE_MODEL": "synthetic",
            "BLOCKPLANE_NUM_THREADS": "1",
            "BLOCKPLANE_PORT": str(port),
            # Builders older than version 23 read the Dockerfile only with these.
            "COMPOSE_DOCKER_CLI_BUILD": "1",
            "DOCKER_BUILDKIT": "1",
        }

    def compose(self, *arguments: str) -> str:
        return run(*self._compose, *arguments, environ=self._environ)

    def ids(self, *services: str) -> list[str]:
        return self.compose("ps", "--quiet", *services).split()

    def workers_that_attached(self, num_times: int = 1) -> list[str]:
        """The containers of both workers, once each has attached so often."""
        workers = self.ids("worker")
        for worker in workers:
            wait_for(
                lambda worker=worker: run("docker", "logs", worker).count("attached, with") >= num_times,  # type: ignore[misc]
                f"{worker} attaches {num_times} times",
                seconds=120,
            )
        return workers


@pytest.fixture(scope="module")
def _image() -> None:
    Containers().compose("build", "engine")


@pytest.fixture
def containers(_image: None) -> Iterator[Containers]:
    """Engine, frontend and two workers, serving."""
    started = Containers()
    try:
        started.compose("up", "--detach", "--no-build", "--scale", "worker=2")
        with Client(started.address) as client:
            client.wait_until_serving(timeout=120)
        yield started
    finally:
        started.compose("down")


def stream(client: Client, num_tokens: int) -> Iterator[int]:
    for delta in client.generate(PROMPT, max_tokens=num_tokens, temperature=0, ignore_eos=True):
        yield from delta.token_ids


def test_every_setting_can_be_set_from_the_shell() -> None:
    text = COMPOSE_FILE.read_text()
    assert [setting.name for setting in fields(Config) if f"BLOCKPLANE_{setting.name.upper()}:" not in text] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_published_port_serves_what_the_model_must_say(containers: Containers) -> None:
    with Client(containers.address) as client:
        assert list(stream(client, 40)) == continue_greedily(PROMPT, 40, ignore_eos=True)
    (frontend,) = containers.ids("frontend")
    health = ("docker", "inspect", "--format", "{{.State.Health.Status}}", frontend)
    wait_for(lambda: run(*health) == "healthy\n", "the health check agrees", seconds=60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_stream_outlives_the_containers_of_both_workers_which_come_back_and_serve(containers: Containers) -> None:
    workers = containers.workers_that_attached()
    assert len(workers) == 2
    with Client(containers.address) as client, ThreadPoolExecutor() as reader:
        tokens = stream(client, 2000)
        first = next(tokens)
        rest = reader.submit(list, tokens)
        for worker in workers:
            # All but the first process, which then ends by itself: `docker kill` would count as a wish, and stay.
            subprocess.run(["docker", "exec", worker, "sh", "-c", "kill -KILL -1"])
        assert not rest.done()
        assert [first, *rest.result()] == continue_greedily(PROMPT, 2000, ignore_eos=True)
    assert containers.workers_that_attached(2) == workers


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_processes_have_no_privilege_and_end_with_0_when_told_to(containers: Containers) -> None:
    ids = containers.ids()
    assert len(ids) == 4
    for container in ids:
        assert run("docker", "exec", container, "id", "-u").strip() == USER_ID
        assert not answers("docker", "exec", container, "touch", "/home/blockplane/changed")
    containers.compose("stop")
    assert [run("docker", "inspect", "--format", "{{.State.ExitCode}}", container) for container in ids] == ["0\n"] * 4
