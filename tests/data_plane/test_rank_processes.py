"""Ranks as processes of their own, some of which are killed, stopped, told to end or cannot build."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from scripted_attaches import CONFIGURE, PROMPT, decode, listening, plan, prefill
from scripted_ranks import SECONDS, RankEngine, tokens_of
from synthetic_oracle import continue_greedily

from blockplane.data_plane.ranks.watchdog import EXIT_BLOCKED, GRACE_SECONDS
from blockplane.protos import wire
from blockplane.v1 import engine_pb2 as pb

EXPECTED = continue_greedily(PROMPT, 8, ignore_eos=True)


class Processes:
    """Ranks of group g, each with its log in a file."""

    def __init__(self, address: str, folder: Path, stack: ExitStack) -> None:
        self._address, self._folder, self._stack = address, folder, stack

    def start(self, *ranks: int) -> list[subprocess.Popen[bytes]]:
        return [self._stack.enter_context(self._rank(rank)) for rank in ranks]

    @contextmanager
    def _rank(self, rank: int) -> Iterator[subprocess.Popen[bytes]]:
        flags = f"--engine-address={self._address} --model=synthetic --max-model-len=64 --structured-output=off".split()
        command = [sys.executable, "-m", "blockplane.data_plane", *flags, "--group=g", f"--rank={rank}"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
        with open(self._folder / str(rank), "ab") as log:
            process = subprocess.Popen(command, stderr=log, env=environ)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def log(self, rank: int) -> str:
        return (self._folder / str(rank)).read_text()


@pytest.fixture
def engine() -> RankEngine:
    return RankEngine()


@pytest.fixture
def processes(engine: RankEngine, tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        address = stack.enter_context(listening(engine, num_streams=8))
        yield Processes(address, tmp_path, stack)


def test_a_killed_peer_s_place_is_taken_and_one_told_to_stop_is_let_go(
    engine: RankEngine, processes: Processes
) -> None:
    first, peer = processes.start(0, 1)
    ranks, hellos = engine.ready()
    assert tokens_of(ranks, prefill(1), decode(2)) == EXPECTED[:2]
    peer.kill()
    ranks[1].wait_for_end()
    killed = time.monotonic()
    ranks[0].send(plan(decode(3)))
    assert "rank 0 of g has lost the other ranks" in ranks[0].next("fault").fault.message
    ranks[0].end(grpc.StatusCode.UNAVAILABLE)
    (survivor,) = engine.ranks(size=1)
    assert time.monotonic() - killed < 20
    assert survivor.join.boot_id == hellos[0].boot_id
    engine.joined.append(survivor)
    (peer,) = processes.start(1)
    ranks, again = engine.ready()
    assert [hello.boot_id == was.boot_id for hello, was in zip(again, hellos, strict=True)] == [True, False]
    assert tokens_of(ranks, prefill(1)) == EXPECTED[:1]
    peer.send_signal(signal.SIGTERM)
    ranks[1].next("leaving")
    assert tokens_of(ranks, decode(2)) == EXPECTED[1:2]
    for rank in ranks:
        rank.end()
    assert peer.wait(SECONDS) == 0
    assert "Traceback" not in processes.log(0) + processes.log(1)
    assert first.poll() is None


def test_a_rank_that_cannot_build_tells_why_and_all_end_by_it(engine: RankEngine, processes: Processes) -> None:
    sound, failing = processes.start(0, 1)
    ranks = engine.ranks()
    engine.meet(ranks)
    for rank, num_blocks in zip(ranks, (16, 1), strict=True):
        configure = wire.configure_to_proto(replace(CONFIGURE, num_blocks=num_blocks))
        rank.send(pb.AttachWorkerResponse(configure=configure))
    fault = ranks[1].next("fault").fault
    assert "asks for 1 blocks, and block 0 is never used" in fault.message
    assert re.search(r"INFO rank 1 of group g has met the 1 others$", fault.log, re.MULTILINE)
    for rank in ranks:
        rank.end(grpc.StatusCode.FAILED_PRECONDITION, "rank 1 of group g gave up.")
    assert [sound.wait(SECONDS), failing.wait(SECONDS)] == [1, 1]
    assert processes.log(0).splitlines()[-1] == "blockplane worker: rank 1 of group g gave up."


@pytest.mark.slow
def test_a_rank_that_waits_for_a_stopped_one_is_ended_once_its_stream_has(
    engine: RankEngine, processes: Processes
) -> None:
    blocked, stopped = processes.start(0, 1)
    ranks, _ = engine.ready()
    tokens_of(ranks, prefill(1))
    stopped.send_signal(signal.SIGSTOP)
    ranks[0].send(plan(decode(2)))
    with pytest.raises(subprocess.TimeoutExpired):
        blocked.wait(GRACE_SECONDS / 2)
    ended = time.monotonic()
    ranks[0].end(grpc.StatusCode.UNAVAILABLE)
    assert blocked.wait(SECONDS) == EXIT_BLOCKED
    assert time.monotonic() - ended >= GRACE_SECONDS
    assert "this rank still waits in an all_reduce for others that are gone" in processes.log(0)
    # Whoever wakes finds that nobody is there any more, and comes again.
    stopped.send_signal(signal.SIGCONT)
    ranks[1].next("fault")
    ranks[1].end(grpc.StatusCode.UNAVAILABLE)
    (again,) = engine.ranks(size=1) if engine.joined else [None]
    assert again is None or again.join.rank == 1
