"""Two workers drained and given other weights while streams are open, as real processes: every stream is exact."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import System, wait_for
from synthetic_oracle import continue_greedily

from blockplane.client.admin import Admin
from blockplane.protos.errors import ModelError, UnavailableError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 300
PROMPTS = [[index, *range(40, 60)] for index in range(4)]
PACE = {"STEP_SECONDS": "0.02"}
"""Of a step, so that a stream lives for 6 s at least."""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    system = System("--max-model-len=1024", "--drain-seconds=1")
    try:
        for kind in ("engine", "frontend"):
            system.start(kind)
        for _ in range(2):
            system.start("paced worker", environment=PACE)
        system.wait_until_serving()
        wait_for(lambda: len(system.statistics().groups) == 2, "two workers serve", 60)
        yield system
    finally:
        system.close()


@pytest.fixture
def admin(system: System) -> Iterator[Admin]:
    with Admin(system.engine_address) as admin:
        yield admin


@contextmanager
def open_streams(system: System) -> Iterator[list[list[int]]]:
    """A stream of each prompt, all of which have begun; at the end all have ended well."""
    received: list[list[int]] = [[] for _ in PROMPTS]
    ended: list[str | None] = []

    def read(prompt: list[int], tokens: list[int]) -> None:
        with system.client() as client:
            for delta in client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True):
                tokens.extend(delta.token_ids)
        ended.append(delta.finish_reason)

    threads = [threading.Thread(target=read, args=each) for each in zip(PROMPTS, received, strict=True)]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(len(tokens) > 3 for tokens in received), "all streams have begun", 60)
    yield received
    for thread in threads:
        thread.join(60)
    assert ended == ["length"] * len(PROMPTS)


def num_requests(admin: Admin) -> list[int]:
    """By group; those that have just moved wait for its next step."""
    told = [worker.statistics for worker in admin.list_workers() if worker.statistics is not None]
    return [statistics.num_running + statistics.num_waiting for statistics in told]


def states(admin: Admin) -> list[str]:
    return [worker.state for worker in admin.list_workers()]


@cache
def undisturbed(seed: int) -> list[list[int]]:
    """What the streams are with one model's weights alone."""
    return [continue_greedily(prompt, NUM_TOKENS, ignore_eos=True, seed=seed) for prompt in PROMPTS]


def is_exact(prompt: list[int], tokens: list[int], old: list[int], new: int) -> bool:
    """Whether a stream is of the old weights up to a token, and of the new ones, which saw that text, from there on."""
    if tokens == old:
        return True
    first = next(index for index, pair in enumerate(zip(tokens, old, strict=True)) if len(set(pair)) > 1)
    # Both may have meant the same for a token or two before.
    return any(
        tokens[at:] == continue_greedily([*prompt, *tokens[:at]], NUM_TOKENS - at, ignore_eos=True, seed=new)
        for at in range(first, max(-1, first - 3), -1)
    )


def test_streams_move_from_a_drained_worker_and_all_of_them_outlive_new_weights(system: System, admin: Admin) -> None:
    with open_streams(system) as received:
        assert all(num_requests(admin))
        admin.drain(0, timeout=20)
        assert states(admin) == ["draining", "ready"]
        assert num_requests(admin) == [0, 4]
    assert received == undisturbed(0)
    admin.undrain(0)
    with open_streams(system) as received:
        assert all(num_requests(admin))
        assert admin.reload_weights("synthetic-7", timeout=60) == (0, 1)
        assert [(worker.state, worker.weight_epoch) for worker in admin.list_workers()] == [("ready", 1)] * 2
        assert len({worker.model_fingerprint for worker in admin.list_workers()}) == 1
    for prompt, tokens, old in zip(PROMPTS, received, undisturbed(0), strict=True):
        assert is_exact(prompt, tokens, old, 7)
    assert received != undisturbed(0), "some took longer than drain_seconds"
    with (
        open_streams(system) as received,
        pytest.raises(ModelError, match="worker 0 has kept its weights: nowhere has"),
    ):
        admin.reload_weights("nowhere", timeout=60)
    assert received == undisturbed(7)


def test_where_all_are_drained_nothing_new_is_served_until_one_is_not(system: System, admin: Admin) -> None:
    for group in range(2):
        admin.drain(group, timeout=20)
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(system.address) as channel, system.client() as client:
        health = health_pb2_grpc.HealthStub(channel)
        wait_for(lambda: health.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING, "not serving")
        with pytest.raises(UnavailableError):
            list(client.generate([1], max_tokens=1, max_retries=0))
        admin.undrain(1)
        wait_for(lambda: health.Check(request).status == health_pb2.HealthCheckResponse.SERVING, "serving")
        assert len(list(client.generate([1], max_tokens=1))) == 1
    with grpc.insecure_channel(system.engine_address) as channel:
        request = health_pb2.HealthCheckRequest(service="blockplane.v1.Admin")
        assert health_pb2_grpc.HealthStub(channel).Check(request).status == health_pb2.HealthCheckResponse.SERVING
