"""Calls with bytes that no honest peer sends, and how it shows that a system does not mind; knows no service."""

import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

import grpc
from google.protobuf.message import Message
from mutated_messages import hostile_bytes
from processes import System
from synthetic_oracle import continue_greedily

CALL_SECONDS = 0.3
UNTYPED = grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED, grpc.StatusCode.UNIMPLEMENTED
FAULTS = "Traceback", "fault "


def call_with(channel: grpc.Channel, path: str, messages: Sequence[bytes]) -> None:
    """One call with these bytes, whatever its kind; what comes back is read for a while."""
    over = threading.Event()

    def outgoing() -> Iterator[bytes]:
        yield from messages
        over.wait(CALL_SECONDS / 3)

    call = channel.stream_stream(path)(outgoing(), timeout=CALL_SECONDS)
    with suppress(grpc.RpcError):
        # Some streams never end by themselves.
        deque(islice(call, 100), maxlen=0)
    over.set()
    call.cancel()
    # What a protocol has and we do not serve is refused in a sentence.
    is_refused = call.code() is grpc.StatusCode.UNIMPLEMENTED and call.details().endswith(".")
    assert is_refused or call.code() not in UNTYPED, f"{path}: {call.details()}"


def fuzz(address: str, calls: dict[str, list[Message]], prefix: str, seconds: float) -> None:
    """Valid messages up to some point of a stream, then hostile ones."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, stop_at, num_calls = random.Random(seed), time.monotonic() + seconds, 0
    with grpc.insecure_channel(address) as channel:
        while time.monotonic() < stop_at:
            method, valid = draw.choice([*calls.items()])
            start = draw.randrange(len(valid))
            hostile = [hostile_bytes(draw, message) for message in valid[start:]]
            call_with(channel, f"/{prefix}{method}", [m.SerializeToString() for m in valid[:start]] + hostile)
            num_calls += 1
    assert num_calls > 10
    print(f"{num_calls} calls")


@contextmanager
def undisturbed_batch_mate(system: System) -> Iterator[None]:
    """Meanwhile somebody generates, again and again, and gets what the model says."""
    prompt, over, texts, errors = [3, 1, 4, 1, 5], threading.Event(), list[list[int]](), list[Exception]()
    expected = continue_greedily(prompt, 30, ignore_eos=True)

    def generate() -> None:
        with system.client() as client:
            while not over.is_set():
                deltas = client.generate(prompt, max_tokens=30, temperature=0, ignore_eos=True)
                texts.append([token_id for delta in deltas for token_id in delta.token_ids])

    def generate_or_tell() -> None:
        try:
            generate()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=generate_or_tell)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert errors == []
    assert len(texts) > 1
    assert all(text == expected for text in texts)


def assert_all_live(system: System) -> None:
    for kind in ("engine", "frontend", "worker"):
        assert [process.poll() for process in system.processes(kind)] == [None], f"the {kind} lives"
        log = system.log(kind)
        assert not any(fault in log for fault in FAULTS), log[-5000:]


def assert_serves(system: System) -> None:
    system.wait_until_serving()
    with system.client() as client:
        deltas = client.generate([1, 2], max_tokens=20, temperature=0, ignore_eos=True)
        tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    assert tokens == continue_greedily([1, 2], 20, ignore_eos=True)
