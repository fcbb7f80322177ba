"""The engine is killed in mid-stream with its journal on: every stream goes on where its client has it."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import System, running_system
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.errors import DataLossError, NotFoundError, UnavailableError

NUM_STREAMS, NUM_TOKENS = 8, 200
PROMPTS = [list(range(10 + number, 50 + number)) for number in range(NUM_STREAMS)]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with running_system("--max-model-len=1024", f"--journal={tmp_path}/journal") as system:
        yield system


def kill_engine(system: System) -> None:
    engine = system.processes("engine")[-1]
    engine.send_signal(signal.SIGKILL)
    engine.wait()


def test_streams_outlive_the_engine_exactly(system: System) -> None:
    """Killed twice, the second time while they are being resumed."""

    def read(number: int) -> list[int]:
        token_ids = list[int]()
        with system.client() as client:
            for delta in client.generate(
                PROMPTS[number], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, reattach_seconds=60
            ):
                token_ids += delta.token_ids
                if number == 0 and len(token_ids) in (10, 11, 12, 100, 101, 102) and len(kills) * 90 < len(token_ids):
                    kills.append(len(token_ids))
                    kill_engine(system)
                    system.start("engine")
        return token_ids

    kills = list[int]()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = list(pool.map(read, range(NUM_STREAMS)))
    assert len(kills) == 2, "else nothing was shown"
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text == continue_greedily(prompt, NUM_TOKENS, ignore_eos=True)


def test_a_request_goes_on_unread_and_its_end_is_kept(system: System) -> None:
    with Client(system.address, caller="ada") as client:
        stream = client.generate(PROMPTS[0], max_tokens=50, temperature=0, ignore_eos=True, request_id="mine")
        had = [token_id for _ in range(3) for token_id in next(stream).token_ids]
        kill_engine(system)
        with pytest.raises(UnavailableError, match="engine went away"):
            had += [token_id for delta in stream for token_id in delta.token_ids]
        system.start("engine")
        system.wait_until_serving()
        whole = continue_greedily(PROMPTS[0], 50, ignore_eos=True)
        deltas = list(client.resume("mine", [len(had)]))
        assert had + [token_id for delta in deltas for token_id in delta.token_ids] == whole
        assert deltas[-1].finish_reason == "length"
        # Again, from the start, now that it has ended.
        assert [token_id for delta in client.resume("mine") for token_id in delta.token_ids] == whole
        with pytest.raises(DataLossError, match="51 tokens of sample 0"):
            list(client.resume("mine", [51]))
    with system.client() as other, pytest.raises(NotFoundError, match="of this caller"):
        list(other.resume("mine"))


def test_a_lost_frontend_ends_no_request(system: System) -> None:
    with system.client() as client:
        stream = client.generate(PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, reattach_seconds=60)
        tokens = list(next(stream).token_ids)
        frontend = system.processes("frontend")[0]
        frontend.kill()
        frontend.wait()
        system.start("frontend")
        tokens += [token_id for delta in stream for token_id in delta.token_ids]
    assert tokens == continue_greedily(PROMPTS[0], NUM_TOKENS, ignore_eos=True)
