"""Streams that check themselves, and workers to which something happens at random; knows no test.

All that is drawn comes from one seed, though what it meets does not: processes run as they run.
"""

import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from forwarding_proxy import ForwardingProxy
from processes import System

from blockplane.client.client import Client
from blockplane.protos.errors import BlockplaneError, UnavailableError
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

NUM_STREAMS, NUM_WORKERS, MAX_PROMPT_ID = 64, 3, 250
GRACE_SECONDS = 60.0
"""How long streams may take to end once nothing happens any more; also how long any of them may stand still."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: the same settings give the same tokens whenever it is asked."""

    prompt: list[int]
    settings: dict[str, Any]

    @property
    def is_greedy(self) -> bool:
        return not self.settings["temperature"]

    def tokens(self, client: Client, **more: Any) -> list[int]:
        deltas = client.generate(self.prompt, **self.settings, **more)
        return [token_id for delta in deltas for token_id in delta.token_ids]


def draw_requests(draw: random.Random, num_requests: int) -> list[Asked]:
    """Greedy and sampled ones, short and long; some share the beginning of their prompts."""
    shared = draw.choices(range(MAX_PROMPT_ID), k=200)
    requests = []
    for index in range(num_requests):
        num_tokens = draw.randint(200, 500) if index % 16 == 0 else draw.randint(1, 60)
        prompt = draw.choices(range(MAX_PROMPT_ID), k=num_tokens)
        if index % 4 == 1:
            prompt = shared[: draw.randint(32, 200)] + prompt
        settings: dict[str, Any] = {"max_tokens": draw.randint(30, 100), "temperature": 0, "ignore_eos": True}
        if index % 2:
            settings |= {"temperature": 3.0, "seed": draw.getrandbits(64), "top_p": draw.choice([1.0, 0.9])}
        requests.append(Asked(prompt, settings))
    return requests


@dataclass
class Streams:
    """Asks the requests again and again on many threads, and keeps what was not as it should be."""

    addresses: Sequence[str]
    requests: Sequence[Asked]
    expected: Sequence[list[int]]
    reattach_seconds: float | None = None
    failures: list[str] = field(default_factory=list)
    num_ended: int = 0

    def run(self, seconds: float) -> None:
        """Keep NUM_STREAMS open for so long, then let them end. What hangs is a failure."""
        numbers, stop_at = count(), time.monotonic() + seconds
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(address)) for address in self.addresses]

            def ask_until_over(client: Client) -> None:
                while time.monotonic() < stop_at and not self.failures:
                    self._ask(client, next(numbers) % len(self.requests))

            threads = [
                threading.Thread(target=ask_until_over, args=(clients[index % len(clients)],), daemon=True)
                for index in range(NUM_STREAMS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, stop_at + GRACE_SECONDS - time.monotonic()))
            num_hanging = sum(thread.is_alive() for thread in threads)
        if num_hanging:
            self.failures.append(f"{num_hanging} streams hang")

    def _ask(self, client: Client, index: int) -> None:
        more = {} if self.reattach_seconds is None else {"reattach_seconds": self.reattach_seconds}
        try:
            tokens = self.requests[index].tokens(client, **more)
        except UnavailableError as error:
            # Refused, and told to retry; what was accepted never ends so.
            if "no worker is ready" not in str(error) and "not attached to the engine" not in str(error):
                self.failures.append(f"request {index} ended: {error}")
            time.sleep(0.1)
        except BlockplaneError as error:
            self.failures.append(f"request {index} ended: {type(error).__name__}: {error}")
        else:
            self.num_ended += 1
            if tokens != self.expected[index]:
                self.failures.append(f"request {index} gave {tokens}, undisturbed {self.expected[index]}")


class Victim:
    """A worker behind a proxy of its own, which comes back whenever it is killed."""

    def __init__(self, system: System, draw: random.Random, kind: str = "worker", **unruly: Any) -> None:
        """`unruly`: how an unruly worker misbehaves."""
        self._system, self._draw, self._kind = system, draw, kind
        self._environment = {"UNRULY": json.dumps(unruly)} if unruly else {}
        self.proxy = ForwardingProxy(system.engine_address)
        self.told: list[str] = []

    def __enter__(self) -> "Victim":
        self.proxy.__enter__()
        self.start()
        return self

    def __exit__(self, *ending: Any) -> None:
        self.proxy.__exit__(*ending)

    def start(self) -> None:
        flags = "--engine-address", self.proxy.address
        self.process = self._system.start(self._kind, *flags, environment=self._environment)

    def suffer(self, over: threading.Event) -> None:
        """Have something happen every now and then; afterwards all is as before."""
        started = time.monotonic()
        while not over.wait(self._draw.uniform(0.5, 3)):
            happens = self._draw.choice([self._kill, self._freeze, self._reset, self._delay, self._stall])
            self.told.append(f"{time.monotonic() - started:.1f} s: {happens.__name__}")
            happens()

    def _kill(self) -> None:
        assert self.process.poll() is None, "a worker ends only when it is killed"
        self.process.kill()
        self.process.wait()
        time.sleep(self._draw.uniform(0, 1))
        self.start()

    def _freeze(self) -> None:
        """Shorter or longer than the time after which it counts as lost."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.1, 6))
        self.process.send_signal(signal.SIGCONT)

    def _reset(self) -> None:
        self.proxy.reset()

    def _delay(self) -> None:
        self.proxy.delay_seconds = self._draw.uniform(0, 0.05)
        time.sleep(self._draw.uniform(0.5, 2))
        self.proxy.delay_seconds = 0.0

    def _stall(self) -> None:
        self.proxy.stall()
        time.sleep(self._draw.uniform(0.1, 6))
        self.proxy.flow()


class EngineVictim:
    """The engine, which comes back whenever it is killed, and takes up its journal."""

    def __init__(self, system: System, draw: random.Random) -> None:
        self._system, self._draw = system, draw
        self.told: list[str] = []
        self._process = system.start("engine")

    def suffer(self, over: threading.Event) -> None:
        started = time.monotonic()
        while not over.wait(self._draw.uniform(3, 8)):
            assert self._process.poll() is None, "the engine ends only when it is killed"
            self.told.append(f"{time.monotonic() - started:.1f} s: killed")
            self._process.kill()
            self._process.wait()
            time.sleep(self._draw.uniform(0, 1))
            self._process = self._system.start("engine")


class Supervised:
    """An unruly worker that is started again whenever it has died."""

    def __init__(self, system: System, unruly: dict[str, Any]) -> None:
        self._system, self._environment = system, {"UNRULY": json.dumps(unruly)}
        self._process = self._start()
        self.num_deaths = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return self._system.start("unruly worker", environment=self._environment)

    def keep_alive(self, over: threading.Event) -> None:
        while not over.wait(0.1):
            if self._process.poll() is not None:
                assert self._process.returncode == -signal.SIGKILL
                self.num_deaths += 1
                self._process = self._start()


@contextmanager
def suffering(seconds: float, *sufferings: Callable[[threading.Event], None]) -> Iterator[None]:
    """Each in a thread of its own for so long; what one of them raises is raised at the end."""
    over, raised = threading.Event(), list[BaseException]()

    def suffer(suffering: Callable[[threading.Event], None]) -> None:
        try:
            suffering(over)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=suffer, args=(each,), daemon=True) for each in sufferings]
    timer = threading.Timer(seconds, over.set)
    for thread in (timer, *threads):
        thread.start()
    try:
        yield
    finally:
        timer.cancel()
        over.set()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]


def statistics(system: System) -> pb.GetStatisticsResponse:
    with grpc.insecure_channel(system.engine_address) as channel:
        return EngineStub(channel).GetStatistics(pb.GetStatisticsRequest(), timeout=5)


def is_empty(system: System) -> bool:
    """Whether no request is left and every block is free."""
    try:
        told = statistics(system)
    except grpc.RpcError:
        return False
    return not told.num_running and not told.num_waiting and told.kv_cache_usage == 0
