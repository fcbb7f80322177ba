"""Prompts computed by one worker process and decoded by another: every text right, whichever of them is killed when."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import System, wait_for
from readers import Readers
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client

PROMPT = list(range(60, 10, -1))


@contextmanager
def split_system(*flags: str, num_decode: int = 1) -> Iterator[System]:
    """One worker for prompts and others for what follows, serving."""
    system = System("--max-model-len=2048", *flags)
    try:
        system.start("engine")
        system.start("frontend")
        start(system, "prefill")
        for _ in range(num_decode):
            start(system, "decode")
        system.wait_until_serving()
        wait_for(lambda: system.statistics().num_groups == 1 + num_decode, "all workers are ready")
        yield system
    finally:
        system.close()


def start(system: System, role: str) -> subprocess.Popen[bytes]:
    return system.start("worker", f"--role={role}", "--transfer-address=127.0.0.1:0")


def alive(system: System) -> list[subprocess.Popen[bytes]]:
    return [process for process in system.processes("worker") if process.poll() is None]


def goes_on(system: System, client: Client, killed: subprocess.Popen[bytes]) -> None:
    """Have a worker killed while a request's blocks move, and its text right all the same."""
    _, decode = alive(system)
    num_failed = system.statistics().num_failed_transfers
    # Whoever is stopped reads nothing.
    decode.send_signal(signal.SIGSTOP)
    stream = client.generate(PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
    tokens = list(next(stream).token_ids)
    wait_for(lambda: system.statistics().num_held == 1, "its blocks are to be read")
    killed.kill()
    decode.send_signal(signal.SIGCONT)
    tokens += [token_id for delta in stream for token_id in delta.token_ids]
    assert tokens == continue_greedily(PROMPT, 30, ignore_eos=True)
    statistics = system.statistics()
    assert (statistics.num_failed_transfers, statistics.num_held) == (num_failed + 1, 0)
    wait_for(lambda: all(group.kv_cache_usage == 0 for group in system.statistics().groups), "all blocks are free")


def test_texts_are_those_of_one_worker_though_blocks_move_and_their_reader_is_killed() -> None:
    prompts = [list(range(first, first + 50 + first)) for first in range(8)]
    with split_system("--worker-timeout-seconds=20") as system, system.client() as client:
        streams = [client.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True) for prompt in prompts]
        texts = [[token_id for delta in stream for token_id in delta.token_ids] for stream in streams]
        assert texts == [continue_greedily(prompt, 20, ignore_eos=True) for prompt in prompts]
        statistics = system.statistics()
        assert (statistics.num_transfers, statistics.num_failed_transfers) == (8, 0), system.log("engine")
        # The model has several KV cache groups, with blocks of their own.
        assert statistics.num_transferred_blocks >= sum(len(prompt) // 16 for prompt in prompts)
        prefill, decode = sorted(statistics.groups, key=lambda group: -group.num_admitted)
        assert prefill.num_computed_tokens <= sum(map(len, prompts)), "what others decode nobody decodes here"
        assert decode.num_steps >= 19
        goes_on(system, client, killed=system.processes("worker")[1])


@pytest.mark.slow
def test_texts_are_right_though_the_worker_that_is_read_is_killed() -> None:
    with split_system("--worker-timeout-seconds=20") as system, system.client() as client:
        goes_on(system, client, killed=system.processes("worker")[0])


@pytest.mark.slow
def test_streams_are_right_while_workers_of_both_kinds_are_killed_and_come_back() -> None:
    with split_system(num_decode=2) as system:
        roles, workers = ("prefill", "decode", "decode"), system.processes("worker")
        with Readers(system.address, 8) as readers:
            for index in (1, 0, 2):
                readers.go_on()
                worker = workers[index]
                worker.kill()
                worker.wait()
                workers[index] = start(system, roles[index])
                wait_for(lambda: system.statistics().num_groups == 3, "it is replaced", 60)
            readers.go_on()
            readers.end()
        statistics = system.statistics()
        assert statistics.num_transfers > 20
        assert (statistics.num_held, statistics.num_running) == (0, 0)
