"""Whatever happens to workers and to the way between them and the engine, every stream is as if nothing had."""

import random
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import pytest
from chaos import (
    NUM_STREAMS,
    NUM_WORKERS,
    Asked,
    EngineVictim,
    Streams,
    Supervised,
    Victim,
    draw_requests,
    is_empty,
    statistics,
    suffering,
)
from processes import System, free_port, wait_for
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client
from blockplane.protos.errors import BlockplaneError

NUM_MATES, POISON = 12, 254
SETTINGS = (
    "--max-model-len=768",
    # Room for fewer requests than there are streams, on each worker.
    "--kv-cache-bytes=2000000",
    "--worker-timeout-seconds=4",
    "--step-timeout-seconds=5",
    "--num-batched-tokens-buckets=128,512",
    "--num-seqs-buckets=8,32",
    "--num-threads=1",
)


@contextmanager
def chaotic_system(draw: random.Random, *flags: str) -> Iterator["ChaoticSystem"]:
    system = System(*SETTINGS, *flags)
    try:
        with ExitStack() as stack:
            yield ChaoticSystem(system, draw, stack)
    except BaseException:
        for kind in ("engine", "frontend", "worker", "unruly worker"):
            with suppress(FileNotFoundError):
                print(f"--- {kind}\n{system.log(kind)[-4000:]}")
        raise
    finally:
        system.close()


class ChaoticSystem:
    """An engine, its workers, one of which delays and repeats results, and two frontends."""

    def __init__(self, system: System, draw: random.Random, stack: ExitStack) -> None:
        self.system = system
        self.engine = EngineVictim(system, random.Random(draw.random()))
        self.addresses = [system.address, f"127.0.0.1:{free_port()}"]
        for address in self.addresses:
            system.start("frontend", "--address", address)
        unruly = {"seed": draw.getrandbits(32), "duplicates": 0.002, "delays": 0.02, "delay_seconds": 0.3}
        kinds: list[tuple[str, dict[str, Any]]] = [("worker", {})] * (NUM_WORKERS - 1) + [("unruly worker", unruly)]
        self.workers = [
            stack.enter_context(Victim(system, random.Random(draw.random()), kind, **told)) for kind, told in kinds
        ]
        for address in self.addresses:
            with Client(address) as client:
                client.wait_until_serving(timeout=60)


def undisturbed(system: ChaoticSystem, requests: Sequence[Asked]) -> list[list[int]]:
    """What each request gives while nothing happens; some of the greedy ones as the model is defined."""
    with Client(system.addresses[0]) as client, ThreadPoolExecutor(len(requests)) as threads:
        expected = [*threads.map(lambda request: request.tokens(client), requests)]
    assert statistics(system.system).num_preemptions > 0, "there are fewer blocks than the requests take"
    for request, tokens in [*zip(requests, expected, strict=True)][:12]:
        assert len(tokens) == request.settings["max_tokens"]
        if request.is_greedy:
            assert tokens == continue_greedily(request.prompt, len(tokens), ignore_eos=True)
    return expected


def check_chaos(seconds: float, *, with_engine: bool = False) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    requests = draw_requests(draw, NUM_STREAMS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        flags = [f"--journal={folder}/journal"] if with_engine else []
        system = stack.enter_context(chaotic_system(draw, *flags))
        streams = Streams(system.addresses, requests, undisturbed(system, requests), 60 if with_engine else None)
        victims = [*system.workers, *([system.engine] if with_engine else [])]
        with suffering(seconds, *(victim.suffer for victim in victims)):
            streams.run(seconds)
        for victim in victims:
            print(victim.told)
        print(f"{streams.num_ended} streams ended as undisturbed")
        assert streams.failures == [], "\n".join(streams.failures)
        assert streams.num_ended >= NUM_STREAMS
        wait_for(lambda: is_empty(system.system), "no request is left, and every block is free")
        assert "Traceback" not in system.system.log("engine")
        assert "Traceback" not in system.system.log("frontend")


@pytest.mark.timeout(240)
def test_every_stream_equals_its_undisturbed_run() -> None:
    check_chaos(seconds=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stream_equals_its_undisturbed_run_for_minutes() -> None:
    check_chaos(seconds=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stream_outlives_the_engine_where_it_keeps_a_journal() -> None:
    check_chaos(seconds=60, with_engine=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_request_that_kills_its_worker_ends_alone() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    requests = [asked for asked in draw_requests(random.Random(seed), 2 * NUM_MATES) if asked.is_greedy]
    poisonous = Asked([1, 2, POISON, 3], {"max_tokens": 50, "temperature": 0, "ignore_eos": True})
    system = System(*SETTINGS)
    try:
        system.start("engine")
        system.start("frontend")
        workers = [Supervised(system, {"poison": POISON}) for _ in range(2)]
        system.wait_until_serving()
        with (
            suffering(200, *(worker.keep_alive for worker in workers)),
            system.client() as client,
            ThreadPoolExecutor(NUM_MATES + 1) as threads,
        ):
            mates = [threads.submit(request.tokens, client) for request in requests]
            time.sleep(0.5)
            poisoned = threads.submit(poisonous.tokens, client)
            with pytest.raises(BlockplaneError) as caught:
                poisoned.result(timeout=180)
            texts = [mate.result(timeout=60) for mate in mates]
        assert caught.value.status is grpc.StatusCode.INTERNAL
        for request, tokens in zip(requests, texts, strict=True):
            assert tokens == continue_greedily(request.prompt, request.settings["max_tokens"], ignore_eos=True)
        print(f"{sum(worker.num_deaths for worker in workers)} workers were killed")
        wait_for(lambda: is_empty(system), "no request is left, and every block is free")
    finally:
        system.close()
