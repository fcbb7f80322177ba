"""What operators and routers see of a running system, and what callers may ask of it, over real sockets."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from perfetto_reader import ReadTrace
from processes import System, running_system
from synthetic_oracle import continue_greedily

from blockplane.client.cli import main
from blockplane.client.client import Client
from blockplane.client.kv_index import KVIndex
from blockplane.client.timeline import STATIONS
from blockplane.protos.errors import DeadlineError
from blockplane.protos.kv_events_wire import kv_event_batch_from_proto
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(f"--block-size={BLOCK_SIZE}", "--num-seqs-buckets=1", "--max-model-len=2048") as system:
        yield system


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    with system.client() as client:
        yield client


@pytest.fixture
def engine(system: System) -> Iterator[EngineStub]:
    with grpc.insecure_channel(system.engine_address) as channel:
        yield EngineStub(channel)


def num_cached_tokens(client: Client, prompt: list[int], **arguments: object) -> int:
    *_, last = client.generate(prompt, max_tokens=1, **arguments)  # type: ignore[arg-type]
    assert last.usage is not None
    return last.usage.num_cached_tokens


def test_a_stop_text_ends_the_output_before_it_and_the_request_with_it(client: Client, engine: EngineStub) -> None:
    prompt = [ord(letter) for letter in "Blocks, "]
    ids = continue_greedily(prompt, 40, ignore_eos=True)
    text = bytes(ids).decode(errors="replace")
    stop = text[16:20]
    assert stop.isascii()
    *_, last = deltas = list(client.generate(prompt, max_tokens=2000, temperature=0, ignore_eos=True, stop=[stop]))
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert last.finish_reason == "stop"
    assert engine.GetStatistics(pb.GetStatisticsRequest()).num_running == 0


def test_a_deadline_ends_one_that_waits_and_it_is_never_admitted(client: Client, engine: EngineStub) -> None:
    busy = client.generate([1, 2, 3], max_tokens=2000, ignore_eos=True)
    next(busy)
    before = engine.GetStatistics(pb.GetStatisticsRequest())
    assert before.num_running == 1
    with pytest.raises(DeadlineError):
        list(client.generate([4, 5, 6], max_tokens=5, timeout=0.2))
    after = engine.GetStatistics(pb.GetStatisticsRequest())
    assert (after.num_admitted, after.num_waiting) == (before.num_admitted, 0)
    busy.close()


def test_the_more_urgent_of_two_that_wait_comes_first(client: Client, engine: EngineStub) -> None:
    busy = client.generate([1, 2, 3], max_tokens=2000, ignore_eos=True)
    next(busy)
    ended: list[int] = []

    def run(priority: int) -> None:
        list(client.generate([7], max_tokens=1, priority=priority))
        ended.append(priority)

    with ThreadPoolExecutor(2) as pool:
        for number, priority in enumerate((1, -1)):
            pool.submit(run, priority)
            while engine.GetStatistics(pb.GetStatisticsRequest()).num_waiting <= number:
                time.sleep(0.01)
        busy.close()
    assert ended == [-1, 1]


def test_a_router_follows_what_is_cached(client: Client, engine: EngineStub) -> None:
    prompt = [(index * 7) % 250 for index in range(5 * BLOCK_SIZE + 3)]
    index, watch = KVIndex(), engine.WatchKVEvents(pb.WatchKVEventsRequest())
    assert index.apply(kv_event_batch_from_proto(next(watch)))
    assert index.longest_prefix(np.array(prompt, np.int32)) == 0
    assert num_cached_tokens(client, prompt, cache_salt="secret") == 0
    assert num_cached_tokens(client, prompt, skip_prefix_cache=True) == 0
    assert num_cached_tokens(client, prompt) == 0
    while index.longest_prefix(np.array(prompt, np.int32)) < 5 * BLOCK_SIZE:
        assert index.apply(kv_event_batch_from_proto(next(watch)))
    assert num_cached_tokens(client, prompt) == 5 * BLOCK_SIZE
    assert num_cached_tokens(client, prompt, skip_prefix_cache=True) == 0
    engine.ResetPrefixCache(pb.ResetPrefixCacheRequest())
    while index.longest_prefix(np.array(prompt, np.int32)):
        assert index.apply(kv_event_batch_from_proto(next(watch)))
    assert num_cached_tokens(client, prompt) == 0
    watch.cancel()


def test_statistics_count_prompts_and_what_was_cached_of_them(client: Client, engine: EngineStub) -> None:
    prompt = [(index * 11) % 250 for index in range(4 * BLOCK_SIZE)]
    before = engine.GetStatistics(pb.GetStatisticsRequest())
    assert [num_cached_tokens(client, prompt) for _ in range(2)] == [0, 3 * BLOCK_SIZE]
    after = engine.GetStatistics(pb.GetStatisticsRequest())
    assert after.num_admitted - before.num_admitted == 2
    assert after.num_prompt_tokens - before.num_prompt_tokens == 2 * len(prompt)
    assert after.num_cached_tokens - before.num_cached_tokens == 3 * BLOCK_SIZE
    assert len(after.num_common_prefix_blocks) == 3, "the model has two groups of full attention and one of a window"


def test_a_trace_of_real_steps_shows_where_each_of_them_was(
    system: System, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list(client.generate([1, 2, 3], max_tokens=20, ignore_eos=True))
    path, before = tmp_path / "trace", time.time_ns()
    assert main(["trace", "--engine-address", system.engine_address, "--steps", "10", "--output", str(path)]) == 0
    assert capsys.readouterr().out.startswith("10 steps of 1 worker group in ")
    read = ReadTrace(path.read_bytes())
    assert len(read.slices) == len(STATIONS)
    for name, begin_name, _ in STATIONS:
        slices = sorted(read.slices[f"worker group 0/{name}"], key=lambda each: each[1])
        assert len({step for step, _, _ in slices}) == len(slices) == 10, begin_name
        assert all(0 < begin <= end <= before for _, begin, end in slices)
    durations = {name: sum(end - begin for _, begin, end in slices) for name, slices in read.slices.items()}
    assert min(durations[f"worker group 0/{name}"] for name in ("inputs", "forward", "sampling")) > 0
    assert sum(read.counters["worker group 0/tokens"]) == 10
