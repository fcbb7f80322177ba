"""A worker group of two real processes: it says what one would, outlives the loss of a rank, and fails by name."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import System, wait_for
from synthetic_oracle import continue_greedily

PROMPTS = [list(range(first, first + 50)) for first in range(4)]


def start_rank(system: System, rank: int, *flags: str) -> subprocess.Popen[bytes]:
    return system.start("worker", "--group=a", f"--rank={rank}", *flags)


@contextmanager
def engine_of_two_ranks(*flags: str) -> Iterator[System]:
    system = System("--tensor-parallel-size=2", "--max-model-len=2048", *flags)
    try:
        system.start("engine")
        yield system
    finally:
        system.close()


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_streams_are_those_of_one_process_and_outlive_the_kill_of_a_rank_exactly(killed: int) -> None:
    with engine_of_two_ranks() as system, system.client() as client:
        system.start("frontend")
        ranks = [start_rank(system, rank) for rank in range(2)]
        system.wait_until_serving()
        streams = [client.generate(prompt, max_tokens=150, temperature=0, ignore_eos=True) for prompt in PROMPTS]
        texts = [list(next(stream).token_ids) for stream in streams]
        ranks[killed].send_signal(signal.SIGKILL)
        wait_for(lambda: system.statistics().num_lost_workers == 1, "the group is lost with its rank")
        start_rank(system, killed)
        for text, stream in zip(texts, streams, strict=True):
            text += [token_id for delta in stream for token_id in delta.token_ids]
        assert texts == [continue_greedily(prompt, 150, ignore_eos=True) for prompt in PROMPTS]
        assert ranks[1 - killed].poll() is None, "the other rank has kept its weights and met the new one"


@pytest.mark.slow
def test_without_one_of_its_ranks_a_group_s_start_fails_naming_it_after_the_stated_time() -> None:
    with engine_of_two_ranks("--rendezvous-seconds=1") as system:
        assert start_rank(system, 1).wait(100) == 1
        assert "rank 0 of group a did not come within 1 s" in system.log("worker").splitlines()[-1]
        assert "rank 0 of group a did not come within 1 s" in system.log("engine")


def test_a_rank_that_cannot_load_ends_the_start_of_all_and_is_named_with_its_log() -> None:
    with engine_of_two_ranks() as system:
        missing = start_rank(system, 1, "--model=/nowhere.gguf")
        assert start_rank(system, 0).wait(100) == 1
        assert missing.wait(100) == 1
        for log in (system.log("worker"), system.log("engine")):
            assert "rank 1 at " in log
            assert " of group a gave up: " in log
            assert "/nowhere.gguf" in log
            assert "ts log" in log, "its last lines"
