"""Puts a workload on a server and notes when what came, as its clients see it; reckons nothing from that.

Arrivals are an open loop: a request is due when it is due, however slowly others are answered, and is measured from
then on, so that what a server does to those behind a slow answer counts ("coordinated omission",
https://github.com/giltene/wrk2).
"""

import asyncio
import heapq
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass

from blockplane.client.async_client import AsyncClient
from blockplane.client.values import Usage
from blockplane.client.workload import WorkItem
from blockplane.protos.errors import BlockplaneError


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came together."""

    seconds: float
    sample_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request; times are seconds from the run's beginning.

    Attributes:
        due, sent, ended: when it was to be sent, and was, and had its end.
        usage: all samples together; None if it failed.
        failure: the gRPC status that it failed with, and the sentence; None if it did not.
    """

    name: str
    due: float
    sent: float
    ended: float
    arrivals: tuple[Arrival, ...]
    usage: Usage | None
    failure: tuple[str, str] | None


class Load:
    """One run of a workload."""

    def __init__(self, client: AsyncClient, concurrency: int | None) -> None:
        """`concurrency`: requests that may be open at once; those that are due then wait, and that counts."""
        self._client = client
        self._slots: AbstractAsyncContextManager[None] = (
            nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        )
        self._progress = Progress()
        self._began = 0.0

    async def run(self, items: Sequence[WorkItem]) -> list[Outcome]:
        """Send all of them, each when it is due. Returns what became of each, in their order."""
        self._began = asyncio.get_running_loop().time()
        self._progress.expect(len(items))
        async with asyncio.TaskGroup() as group:
            tasks = []
            for item in items:
                await self._sleep_until(item.at_seconds or 0.0)
                tasks.append(group.create_task(self._run_one(item)))
        return [task.result() for task in tasks]

    async def _run_one(self, item: WorkItem) -> Outcome:
        due = item.at_seconds
        if item.arrive_after_tokens:
            await self._progress.reached(item.arrive_after_tokens)
            due = max(due or 0.0, self._now())
        async with self._slots:
            try:
                # One that is due at no time of its own is what its slot asks next.
                return await self._measured(item, self._now() if due is None else due)
            finally:
                self._progress.ended()

    async def _measured(self, item: WorkItem, due: float) -> Outcome:
        arrivals: list[Arrival] = []
        usages: list[Usage] = []
        failure, sent, num_tokens = None, self._now(), 0
        try:
            # A measured request is sent once: what fails is told.
            async with aclosing(self._client.generate(**{"max_retries": 0, **item.arguments})) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        arrivals.append(Arrival(self._now(), delta.sample_index, len(delta.token_ids)))
                        num_tokens += len(delta.token_ids)
                        self._progress.note(num_tokens)
                    if delta.usage is not None:
                        usages.append(delta.usage)
        except BlockplaneError as error:
            failure = error.status.name, str(error)
        usage = None if failure else _together(usages)
        return Outcome(item.name, due, sent, self._now(), tuple(arrivals), usage, failure)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    async def _sleep_until(self, at: float) -> None:
        if (left := at - self._now()) > 0:
            await asyncio.sleep(left)


class Progress:
    """How many output tokens the longest answer has, for who waits for that many."""

    def __init__(self) -> None:
        self._most = 0
        self._num_left = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def expect(self, num_requests: int) -> None:
        self._num_left = num_requests

    def note(self, num_tokens: int) -> None:
        """Some request has so many tokens now."""
        self._most = max(self._most, num_tokens)
        self._wake()

    def ended(self) -> None:
        """Some request has ended. Where all that are left wait, nobody would come up to what they wait for."""
        self._num_left -= 1
        self._wake()

    async def reached(self, num_tokens: int) -> None:
        if num_tokens > self._most:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (num_tokens, id(future), future))
            self._wake()
            await future

    def _wake(self) -> None:
        while self._waiting and (self._waiting[0][0] <= self._most or len(self._waiting) == self._num_left):
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)


def _together(usages: Sequence[Usage]) -> Usage:
    """Of all samples: their prompt is one, of which the first to be admitted may compute what the others find."""
    return Usage(
        num_prompt_tokens=max((usage.num_prompt_tokens for usage in usages), default=0),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_cached_tokens=min((usage.num_cached_tokens for usage in usages), default=0),
    )
