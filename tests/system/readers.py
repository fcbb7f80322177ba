"""Clients of the synthetic model that read all the time and compare every token; know no processes, and are no test."""

import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Self

from processes import wait_for
from synthetic_oracle import continue_greedily

from blockplane.client.client import Client

NUM_TOKENS = 300


@cache
def _expected(number: int) -> list[int]:
    return continue_greedily(_prompt(number), NUM_TOKENS, ignore_eos=True)


def _prompt(number: int) -> list[int]:
    return list(range(10 + number, 50 + number))


class Readers:
    """While it is entered so many streams are open: each reader opens its next as soon as one has ended."""

    def __init__(self, address: str, num_readers: int, **arguments: Any) -> None:
        """`arguments`: more of those of `Client.generate`."""
        self._address, self._arguments = address, arguments
        self._is_over = threading.Event()
        self._readers: list[Future[None]] = []
        self._num_tokens = [0] * num_readers
        self._heard = [math.inf] * num_readers
        self._silences = [0.0] * num_readers
        self.num_streams = 0

    def __enter__(self) -> Self:
        for number in range(len(self._num_tokens)):
            # All of it before the first stream: it would take the processes' time.
            _expected(number)
        self._pool = ThreadPoolExecutor(len(self._num_tokens))
        self._readers = [self._pool.submit(self._read, number) for number in range(len(self._num_tokens))]
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._pool.shutdown()

    def _read(self, number: int) -> None:
        with Client(self._address) as client:
            while not self._is_over.is_set():
                token_ids = list[int]()
                for delta in client.generate(
                    _prompt(number), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, **self._arguments
                ):
                    token_ids += delta.token_ids
                    self._num_tokens[number] += len(delta.token_ids)
                    self._hear(number)
                assert token_ids == _expected(number)
                self.num_streams += 1

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        self._silences[number] = max(self._silences[number], now - self._heard[number])
        self._heard[number] = now

    def longest_silence(self) -> float:
        """Seconds between two deltas, the most that any reader has waited since this was asked last."""
        longest = max(self._silences)
        self._silences = [0.0] * len(self._silences)
        return longest

    def go_on(self) -> None:
        """Wait until each has got more than it has now; fail with what one of them met."""
        so_far = list(self._num_tokens)

        def have_more() -> bool:
            for reader in self._readers:
                if reader.done():
                    reader.result()
            return all(now > before for now, before in zip(self._num_tokens, so_far, strict=True))

        wait_for(have_more, "every reader gets more tokens", 120)

    def end(self) -> None:
        """Let the streams that are open end."""
        self._is_over.set()
        for reader in self._readers:
            reader.result(timeout=120)
