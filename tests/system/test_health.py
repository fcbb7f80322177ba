"""What the frontend's health says when processes are killed, stopped or told to end, and what becomes of open calls."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import System, running_system, wait_for
from synthetic_oracle import continue_greedily

from blockplane.client.client import SERVICE, Client
from blockplane.protos.errors import UnavailableError
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

PROMPT = list(range(50))
NUM_TOKENS = 1900
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
TIMEOUT_SECONDS = 1
SLACK_SECONDS = 2.0
FLAGS = ("--max-model-len=2048", f"--worker-timeout-seconds={TIMEOUT_SECONDS}")


class Watch:
    """All that a Watch call of the frontend's health was told, by service."""

    def __init__(self, system: System) -> None:
        self._channel = grpc.insecure_channel(system.address)
        self.told: dict[str, list[int]] = {"": [], SERVICE: []}
        for service in self.told:
            call = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest(service=service))
            threading.Thread(target=self._listen, args=(service, call), daemon=True).start()

    def _listen(self, service: str, call: Iterator[health_pb2.HealthCheckResponse]) -> None:
        try:
            for response in call:
                self.told[service].append(response.status)
        except grpc.RpcError:
            pass

    def is_told(self, *statuses: int) -> bool:
        return all(told == list(statuses) for told in self.told.values())

    def expect(self, *statuses: int, seconds: float = 60) -> None:
        wait_for(lambda: self.is_told(*statuses), f"health tells {statuses}, each once: {self.told}", seconds)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def watched(system: System) -> Iterator[Watch]:
    watch = Watch(system)
    try:
        watch.expect(SERVING)
        yield watch
    finally:
        watch.close()


def begin(client: Client, num_tokens: int = NUM_TOKENS) -> Iterator[list[int]]:
    """The tokens of a long greedy request, the first of which are there."""
    stream = (
        delta.token_ids for delta in client.generate(PROMPT, max_tokens=num_tokens, temperature=0, ignore_eos=True)
    )
    first = next(stream)
    yield list(first)
    for token_ids in stream:
        yield list(token_ids)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def num_running(system: System) -> int:
    with grpc.insecure_channel(system.engine_address) as channel:
        statistics = EngineStub(channel).GetStatistics(pb.GetStatisticsRequest())
    return sum(group.num_running for group in statistics.groups)


def descendants(address: str) -> list[str]:
    """Command lines of all processes that were started for this address."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if address in line:
                lines.append(line)
    return lines


def test_whichever_process_is_killed_health_tells_in_time_and_calls_go_on_or_end_unavailable() -> None:
    """Case 40: kill -9 of client, worker, engine and frontend in turn."""
    with running_system(*FLAGS) as system, system.client() as client, watched(system) as watch:
        # A client: its request ends with it, and nobody else notices.
        command = [sys.executable, "-m", "blockplane.client", "generate", "hi", "--ignore-eos", "--max-tokens=1900"]
        other = subprocess.Popen([*command, "--address", system.address], stdout=subprocess.PIPE)
        wait_for(lambda: num_running(system) == 1, "the other client's request runs")
        kill(other)
        wait_for(lambda: num_running(system) == 0, "its request is ended")
        assert watch.is_told(SERVING)

        # The worker: the open call waits for the next one and goes on where it was.
        stream = begin(client, 300)
        tokens = next(stream)
        kill(system.processes("worker")[0])
        watch.expect(SERVING, NOT_SERVING, seconds=TIMEOUT_SECONDS + SLACK_SECONDS)
        system.start("worker")
        watch.expect(SERVING, NOT_SERVING, SERVING)
        assert tokens + [token_id for token_ids in stream for token_id in token_ids] == continue_greedily(
            PROMPT, 300, ignore_eos=True
        )

        # The engine: without a journal its calls end.
        stream = begin(client)
        next(stream)
        kill(system.processes("engine")[0])
        with pytest.raises(UnavailableError, match="engine went away"):
            list(stream)
        watch.expect(SERVING, NOT_SERVING, SERVING, NOT_SERVING, seconds=TIMEOUT_SECONDS + SLACK_SECONDS)
        system.start("engine")
        watch.expect(SERVING, NOT_SERVING, SERVING, NOT_SERVING, SERVING)

        # The frontend: its calls end, and what they held is free.
        stream = begin(client)
        next(stream)
        kill(system.processes("frontend")[0])
        with pytest.raises(UnavailableError):
            list(stream)
        wait_for(lambda: num_running(system) == 0, "its requests are ended")
        system.start("frontend")
        system.wait_until_serving()
        assert next(begin(client)) == continue_greedily(PROMPT, 1, ignore_eos=True)

        for kind in ("frontend", "worker", "engine"):
            process = system.processes(kind)[-1]
            process.terminate()
            assert process.wait(timeout=15) == 0, system.log(kind)
        assert descendants(system.address) == [], "no orphan is left"


def test_a_stopped_engine_is_away_in_time_and_a_frontend_that_is_told_to_stop_lets_open_streams_end() -> None:
    with running_system(*FLAGS) as system, system.client() as client, watched(system) as watch:
        stream = begin(client)
        next(stream)
        engine = system.processes("engine")[0]
        engine.send_signal(signal.SIGSTOP)
        try:
            watch.expect(SERVING, NOT_SERVING, seconds=TIMEOUT_SECONDS + SLACK_SECONDS)
            with pytest.raises(UnavailableError, match="engine went away"):
                list(stream)
        finally:
            engine.send_signal(signal.SIGCONT)
        watch.expect(SERVING, NOT_SERVING, SERVING)
        wait_for(lambda: num_running(system) == 0, "the engine has found its frontend gone, and its request with it")

        stream = begin(client, 100)
        tokens = next(stream)
        frontend = system.processes("frontend")[0]
        frontend.terminate()
        watch.expect(SERVING, NOT_SERVING, SERVING, NOT_SERVING, seconds=SLACK_SECONDS)
        with pytest.raises(UnavailableError, match="this frontend is stopping") as refused:
            list(client.generate(PROMPT, max_tokens=1, max_retries=0))
        assert refused.value.retry_after_seconds == 1.0
        tokens += [token_id for token_ids in stream for token_id in token_ids]
        assert tokens == continue_greedily(PROMPT, 100, ignore_eos=True)
        assert frontend.wait(timeout=15) == 0
        assert watch.is_told(SERVING, NOT_SERVING, SERVING, NOT_SERVING)
        assert "Traceback" not in system.log("frontend")


@pytest.mark.slow
def test_a_second_signal_ends_what_is_open_at_once() -> None:
    with running_system(*FLAGS, "--drain-seconds=60") as system, system.client() as client:
        stream = begin(client)
        next(stream)
        # Nothing ends by itself any more.
        kill(system.processes("worker")[0])
        frontend = system.processes("frontend")[0]
        frontend.terminate()
        time.sleep(0.3)
        assert frontend.poll() is None
        frontend.terminate()
        with pytest.raises(UnavailableError, match="the frontend stopped before the request's end"):
            list(stream)
        assert frontend.wait(timeout=15) == 0
        assert "Traceback" not in system.log("frontend")
