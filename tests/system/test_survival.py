"""Processes that die, come back, or were never going to fit: what clients and operators see."""

import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import System, running_system, wait_for
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.errors import UnavailableError

PROMPT = list(range(50))


def health(system: System) -> int:
    with grpc.insecure_channel(system.address) as channel:
        status: int = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
        return status


def read(client: Client, num_tokens: int) -> list[int]:
    deltas = client.generate(PROMPT, max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_a_stream_outlives_its_worker_exactly() -> None:
    """The worker is killed in mid-stream and another takes over: nothing is lost, repeated or contradicted."""
    with running_system("--max-model-len=2048") as system, system.client() as client:
        stream = client.generate(PROMPT, max_tokens=150, temperature=0, ignore_eos=True)
        tokens = [token_id for _ in range(5) for token_id in next(stream).token_ids]
        worker = system.processes("worker")[0]
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        wait_for(lambda: health(system) == health_pb2.HealthCheckResponse.NOT_SERVING, "health tells of the loss")
        with pytest.raises(UnavailableError, match="no worker is ready"):
            read(client, 1)
        system.start("worker")
        tokens += [token_id for delta in stream for token_id in delta.token_ids]
        assert tokens == continue_greedily(PROMPT, 150, ignore_eos=True)


def test_a_second_worker_serves_beside_the_first_and_streams_go_on_when_either_is_lost() -> None:
    prompts = [list(range(first, first + 50)) for first in range(6)]
    with running_system("--max-model-len=2048") as system, system.client() as client:
        system.start("worker")
        wait_for(lambda: system.statistics().num_groups == 2, "the second worker is ready")
        streams = [client.generate(prompt, max_tokens=100, temperature=0, ignore_eos=True) for prompt in prompts]
        texts = [list(next(stream).token_ids) for stream in streams]
        assert [group.num_running for group in system.statistics().groups] == [3, 3]
        system.processes("worker")[0].kill()
        for text, stream in zip(texts, streams, strict=True):
            text += [token_id for delta in stream for token_id in delta.token_ids]
        assert texts == [continue_greedily(prompt, 100, ignore_eos=True) for prompt in prompts]
        statistics = system.statistics()
        assert (statistics.num_groups, statistics.num_lost_workers, statistics.num_suspects) == (1, 1, 0)


def test_without_the_engine_open_calls_end_unavailable_and_all_attach_again_by_themselves() -> None:
    with running_system("--max-model-len=2048") as system, system.client() as client:
        stream = client.generate(PROMPT, max_tokens=1900, temperature=0, ignore_eos=True)
        next(stream)
        engine = system.processes("engine")[0]
        engine.kill()
        engine.wait()
        with pytest.raises(UnavailableError, match="engine went away"):
            list(stream)
        assert health(system) == health_pb2.HealthCheckResponse.NOT_SERVING
        system.start("engine")
        system.wait_until_serving()
        assert read(client, 5) == continue_greedily(PROMPT, 5, ignore_eos=True)


def test_a_lost_frontend_ends_its_requests_and_another_serves_on() -> None:
    with running_system("--max-model-len=2048", "--num-seqs-buckets=1") as system, system.client() as client:
        stream = client.generate(PROMPT, max_tokens=1900, temperature=0, ignore_eos=True)
        next(stream)
        frontend = system.processes("frontend")[0]
        frontend.kill()
        frontend.wait()
        with pytest.raises(UnavailableError):
            list(stream)
        system.start("frontend")
        system.wait_until_serving()
        assert read(client, 5) == continue_greedily(PROMPT, 5, ignore_eos=True), "the only row is free again"


def test_every_process_ends_with_0_when_told_to() -> None:
    with running_system("--max-model-len=256") as system:
        for kind in ("worker", "frontend", "engine"):
            (process,) = system.processes(kind)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=15) == 0, system.log(kind)
            assert "Traceback" not in system.log(kind)


def test_a_worker_that_cannot_fit_ends_with_the_numbers_and_what_to_change() -> None:
    system = System("--kv-cache-bytes=1000000", "--max-model-len=4096")
    try:
        system.start("engine")
        worker = system.start("worker")
        assert worker.wait(timeout=60) == 1
        assert "raise kv_cache_bytes or lower max_model_len" in system.log("worker")
        assert "Traceback" not in system.log("worker")
    finally:
        system.close()


def test_a_taken_port_is_one_sentence() -> None:
    system = System()
    try:
        system.start("frontend")
        wait_for(lambda: "listening" in system.log("frontend"), "the first frontend listens")
        second = system.start("frontend")
        assert second.wait(timeout=30) == 1
        assert f"cannot listen on {system.address}" in system.log("frontend")
        assert "Traceback" not in system.log("frontend")
    finally:
        system.close()
