"""The worker process and signals: how it leaves an engine that needs it, one that forgets it, and none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from scripted_attaches import CONFIGURE, Attach, ScriptedEngine, Told, decode, listening, plan, prefill

from blockplane.v1 import engine_pb2 as pb

WAIT_SECONDS = 20


@contextmanager
def worker_process(address: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    flags = (f"--engine-address={address}", "--model=synthetic", "--max-model-len=64", *flags)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    command = [sys.executable, "-m", "blockplane.data_plane", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def ended_with_0(process: subprocess.Popen[str]) -> float:
    """Returns the seconds that it took."""
    start = time.monotonic()
    assert process.wait(WAIT_SECONDS) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    return time.monotonic() - start


def test_a_worker_that_is_told_to_stop_answers_what_is_asked_of_it_and_ends_with_the_stream() -> None:
    is_told = Told()

    def script(attach: Attach) -> Iterator[pb.AttachWorkerResponse]:
        yield from attach.configure()
        yield plan(prefill(1))
        attach.result()
        is_told.set()
        attach.next("leaving")
        yield plan(decode(2))
        attach.result()

    engine = ScriptedEngine(script)
    with listening(engine) as address, worker_process(address) as process:
        is_told.wait()
        process.send_signal(signal.SIGTERM)
        ended_with_0(process)
    assert (engine.errors, len(engine.hellos)) == ([], 1)


def test_an_engine_that_lets_nobody_go_is_left_after_drain_seconds_or_at_the_second_signal() -> None:
    is_told, is_heard = Told(), Told()

    def script(attach: Attach) -> Iterator[pb.AttachWorkerResponse]:
        yield from attach.configure(replace(CONFIGURE, heartbeat_milliseconds=100))
        is_told.set()
        attach.next("leaving")
        is_heard.set()
        while attach.context.is_active():
            time.sleep(0.02)

    with listening(ScriptedEngine(script, script)) as address:
        with worker_process(address, "--drain-seconds=2") as process:
            is_told.wait()
            process.send_signal(signal.SIGINT)
            assert 1.5 < ended_with_0(process) < 6
        is_told.clear()
        is_heard.clear()
        with worker_process(address, "--drain-seconds=60") as process:
            is_told.wait()
            process.send_signal(signal.SIGTERM)
            is_heard.wait()
            process.send_signal(signal.SIGTERM)
            assert ended_with_0(process) < 6


def test_a_worker_without_an_engine_ends_at_once() -> None:
    with worker_process("127.0.0.1:9", "--drain-seconds=60") as process:
        assert process.stderr is not None
        while "not attached" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert ended_with_0(process) < 6
