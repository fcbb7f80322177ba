"""The image and the compose files in this machine's Docker Engine; knows processes only by their containers.

The build takes BASE_IMAGE, WHEELS and the other build arguments from the environment: see deploy/README.md.
"""

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from processes import free_port, wait_for
from readers import Readers
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.config import Config

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
EXAMPLES = ROOT / "deploy" / "compose"
PROMPT = list(range(50))
IMAGE = "blockplane-test"
USER_ID = "10001"
NUM_STREAMS = 32

logger = logging.getLogger(__name__)


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
    """The services of a compose file, as a project of the tests' own on ports of its own."""

    def __init__(self, *profiles: str, file: Path = COMPOSE_FILE, **environ: str) -> None:
        port, gateway_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.gateway_url = f"http://127.0.0.1:{gateway_port}"
        project = f"blockplane-test-{port}"
        self.network = f"{project}_default"
        self._compose = (*compose_command(), "--project-name", project, "--file", str(file))
        self._compose += tuple(f"--profile={profile}" for profile in profiles)
        self._environ = os.environ | {
            "BLOCKPLANE_IMAGE": IMAGE,
            "BLOCKPLANE_MODEL": "synthetic",
            # Containers may take minutes to start on a busy machine.
            "BLOCKPLANE_MAX_QUEUE_SECONDS": "600",
            "BLOCKPLANE_NUM_THREADS": "1",
            "BLOCKPLANE_PORT": str(port),
            "GATEWAY_IMAGE": f"{IMAGE}-gateway",
            "GATEWAY_PORT": str(gateway_port),
            # Builders older than version 23 read the Dockerfile only with these.
            "COMPOSE_DOCKER_CLI_BUILD": "1",
            "DOCKER_BUILDKIT": "1",
            **environ,
        }

    def compose(self, *arguments: str, **environ: str) -> str:
        return run(*self._compose, *arguments, environ=self._environ | environ)

    def ids(self, *services: str) -> list[str]:
        return self.compose("ps", "--quiet", *services).split()

    def up(self) -> None:
        self.compose("up", "--detach", "--no-build")
        with Client(self.address) as client:
            client.wait_until_serving(timeout=600)


def attaches(worker: str) -> int:
    return run("docker", "logs", worker).count("attached, with")


def metric(engine: str, name: str) -> int:
    """As the engine tells Prometheus; `name` with its labels."""
    program = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:50052/metrics').read().decode())"
    metrics = run("docker", "exec", engine, "python3", "-c", program)
    (line,) = (line for line in metrics.splitlines() if line.startswith(f"{name} "))
    return int(float(line.split()[1]))


def num_ready_workers(engine: str) -> int:
    return metric(engine, 'blockplane:num_workers{condition="ready"}')


def wait_until_attached(worker: str, num_times: int = 1) -> None:
    wait_for(lambda: attaches(worker) >= num_times, f"{worker} attaches {num_times} times", seconds=600)


def wait_until_healthy(container: str) -> None:
    health = ("docker", "inspect", "--format", "{{.State.Health.Status}}", container)
    wait_for(lambda: run(*health) == "healthy\n", f"{container} is healthy", seconds=600)


@pytest.fixture(scope="module")
def _image() -> None:
    Containers("gateway").compose("build", "engine", "gateway")


def running(containers: Containers) -> Iterator[Containers]:
    try:
        containers.up()
        yield containers
    finally:
        containers.compose("down", "--volumes")


@pytest.fixture
def containers(_image: None) -> Iterator[Containers]:
    """Engine, frontend and two workers, serving."""
    yield from running(Containers())


@pytest.fixture
def containers_with_gateway(_image: None) -> Iterator[Containers]:
    yield from running(Containers("gateway"))


@pytest.fixture
def containers_with_journal(_image: None) -> Iterator[Containers]:
    yield from running(Containers(BLOCKPLANE_JOURNAL="/journal/journal"))


@pytest.fixture
def containers_of_ranks(_image: None) -> Iterator[Containers]:
    yield from running(Containers(file=EXAMPLES / "tensor-parallel.yml"))


@pytest.fixture
def containers_with_roles(_image: None) -> Iterator[Containers]:
    yield from running(Containers(file=EXAMPLES / "prefill-decode.yml"))


def stream(client: Client, num_tokens: int) -> Iterator[int]:
    for delta in client.generate(PROMPT, max_tokens=num_tokens, temperature=0, ignore_eos=True):
        yield from delta.token_ids


def test_every_setting_can_be_set_from_the_shell() -> None:
    text = COMPOSE_FILE.read_text()
    assert [setting.name for setting in fields(Config) if f"BLOCKPLANE_{setting.name.upper()}:" not in text] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_published_port_serves_what_the_model_must_say_and_all_are_healthy(containers: Containers) -> None:
    with Client(containers.address) as client:
        assert list(stream(client, 40)) == continue_greedily(PROMPT, 40, ignore_eos=True)
    assert len(containers.ids("worker")) == 2
    for container in containers.ids():
        wait_until_healthy(container)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_32_streams_outlive_a_killed_worker_and_one_that_loses_its_network(containers: Containers) -> None:
    killed, cut_off = containers.ids("worker")
    (engine,) = containers.ids("engine")
    wait_until_attached(killed)
    wait_until_attached(cut_off)
    with Readers(containers.address, NUM_STREAMS) as readers:
        readers.go_on()
        logger.info("%d streams are open at two workers", NUM_STREAMS)
        run("docker", "kill", killed)
        readers.go_on()
        logger.info("one worker is killed: every stream goes on, %d have ended right", readers.num_streams)
        run("docker", "start", killed)
        wait_until_attached(killed, 2)
        readers.go_on()
        logger.info("it is started and attached again: every stream goes on, %d have ended right", readers.num_streams)
        assert num_ready_workers(engine) == 2
        run("docker", "network", "disconnect", containers.network, cut_off)
        wait_for(lambda: num_ready_workers(engine) == 1, "the engine misses it", seconds=60)
        readers.go_on()
        logger.info("the other one has no network: every stream goes on, %d have ended right", readers.num_streams)
        run("docker", "network", "connect", "--alias", "worker", containers.network, cut_off)
        wait_until_attached(cut_off, 2)
        readers.go_on()
        logger.info(
            "its network is back and it is attached: every stream goes on, %d have ended right", readers.num_streams
        )
        readers.end()
    assert readers.num_streams >= NUM_STREAMS
    logger.info("all %d streams had every token right", readers.num_streams)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_stream_outlives_the_containers_of_both_workers_which_come_back_and_serve(containers: Containers) -> None:
    workers = containers.ids("worker")
    for worker in workers:
        wait_until_attached(worker)
    with Client(containers.address) as client, ThreadPoolExecutor() as reader:
        tokens = stream(client, 2000)
        first = next(tokens)
        rest = reader.submit(list, tokens)
        for worker in workers:
            # All but the first process, which then ends by itself: `docker kill` would count as a wish, and stay.
            subprocess.run(["docker", "exec", worker, "sh", "-c", "kill -KILL -1"])
        assert not rest.done()
        assert [first, *rest.result()] == continue_greedily(PROMPT, 2000, ignore_eos=True)
    for worker in workers:
        wait_until_attached(worker, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_streams_outlive_the_replacing_of_every_container_as_an_upgrade_does_it(
    containers_with_journal: Containers,
) -> None:
    """README.md's commands, section "Upgrade"; the newer image is the same one by another name."""
    containers, newer = containers_with_journal, f"{IMAGE}:newer"
    run("docker", "tag", IMAGE, newer)
    old_workers = containers.ids("worker")
    for worker in old_workers:
        wait_until_attached(worker)

    def up(*arguments: str) -> None:
        containers.compose("up", "--detach", "--no-deps", "--no-build", *arguments, BLOCKPLANE_IMAGE=newer)

    with Readers(containers.address, 8, reattach_seconds=120) as readers:
        readers.go_on()
        up("engine")
        readers.go_on()
        logger.info("the engine is replaced: every stream goes on, %d have ended right", readers.num_streams)
        up("frontend")
        readers.go_on()
        logger.info("the frontend is replaced: every stream goes on, %d have ended right", readers.num_streams)
        up("--no-recreate", "--scale", "worker=4", "worker")
        for worker in {*containers.ids("worker")} - {*old_workers}:
            wait_until_attached(worker)
        for worker in old_workers:
            run("docker", "stop", "-t", "45", worker)
            readers.go_on()
        logger.info("the workers are replaced: every stream goes on, %d have ended right", readers.num_streams)
        readers.end()
    logger.info("all %d streams had every token right", readers.num_streams)
    inspect = ("docker", "inspect", "--format", "{{.Config.Image}} {{.State.Running}}")
    assert [run(*inspect, each) for each in containers.ids()].count(f"{newer} true\n") == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_streams_outlive_the_container_of_a_rank_and_its_group_meets_again(containers_of_ranks: Containers) -> None:
    containers = containers_of_ranks
    ranks = containers.ids("east-0", "east-1", "west-0", "west-1")
    (engine,) = containers.ids("engine")
    for rank in ranks:
        wait_until_healthy(rank)
    assert num_ready_workers(engine) == 2
    with Readers(containers.address, 8) as readers:
        readers.go_on()
        # All but the first process, which then ends by itself, and its container is started anew.
        subprocess.run(["docker", "exec", containers.ids("east-1")[0], "sh", "-c", "kill -KILL -1"])
        wait_for(lambda: num_ready_workers(engine) == 1, "its group is lost", seconds=60)
        readers.go_on()
        logger.info("a rank is killed: every stream goes on")
        wait_for(lambda: num_ready_workers(engine) == 2, "its group is back", seconds=600)
        readers.go_on()
        logger.info("it is back, and its group with it: every stream goes on")
        readers.end()
    logger.info("all %d streams had every token right", readers.num_streams)
    for rank in ranks:
        wait_until_healthy(rank)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_prompts_of_one_container_go_on_in_two_others(containers_with_roles: Containers) -> None:
    containers = containers_with_roles
    (engine,) = containers.ids("engine")
    wait_for(lambda: num_ready_workers(engine) == 3, "all three serve", seconds=600)
    with Readers(containers.address, 8) as readers:
        readers.go_on()
        readers.end()
    num_blocks = metric(engine, "blockplane:transferred_blocks_total")
    assert num_blocks > 0
    logger.info("all %d streams had every token right, %d blocks moved", readers.num_streams, num_blocks)
    for container in containers.ids():
        wait_until_healthy(container)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_gateway_answers_as_openai_does(containers_with_gateway: Containers) -> None:
    containers = containers_with_gateway
    (gateway,) = containers.ids("gateway")
    wait_until_healthy(gateway)
    assert run("docker", "exec", gateway, "id", "-u").strip() == USER_ID
    body = {"model": "synthetic", "prompt": "a sea", "max_tokens": 20, "temperature": 0}
    request = Request(
        f"{containers.gateway_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
        (choice,) = json.load(answer)["choices"]
    with Client(containers.address) as client:
        # The gateway puts no BOS token before a text, whose other ids are its bytes.
        deltas = client.generate(list(b"a sea"), max_tokens=20, temperature=0)
        assert choice["text"] == "".join(delta.text for delta in deltas)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_processes_have_no_privilege_and_end_with_0_when_told_to(containers: Containers) -> None:
    ids = containers.ids()
    assert len(ids) == 4
    for container in ids:
        assert run("docker", "exec", container, "id", "-u").strip() == USER_ID
        for folder in ("/", "/home/blockplane", "/opt/blockplane", "/var/tmp"):
            refused = subprocess.run(["docker", "exec", container, "touch", f"{folder}/changed"], capture_output=True)
            assert refused.returncode
            assert b"Read-only file system" in refused.stderr
        assert run("docker", "exec", container, "grep", "CapEff", "/proc/1/status").split()[1] == "0" * 16
    containers.compose("stop")
    assert [run("docker", "inspect", "--format", "{{.State.ExitCode}}", container) for container in ids] == ["0\n"] * 4
