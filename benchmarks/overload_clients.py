"""Many clients of one frontend in a process of their own, which says how late it was itself. Knows no limits.

    python benchmarks/overload_clients.py ADDRESS SETTINGS-AS-JSON

With `num_callers`, so many ask again as soon as they have their answer, and where they are refused as soon as they are
told to; with `rate`, so many requests come a second, at random, whatever becomes of those before. Either goes on for
`seconds`, and what was begun then ends. Every request is an `Answer`; all are printed at the end, as JSON.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field

import grpc

from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.error_details import error_of_call
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub

NUM_PROMPTS, MAX_PROMPT_ID = 32, 250
MIN_TOKENS, MAX_TOKENS = 40, 114
MEAN_TOKENS = (MIN_TOKENS + MAX_TOKENS) / 2
CALL_SECONDS = 120.0
PROBE_SECONDS = 0.01


@dataclass
class Answer:
    """What became of a request, in seconds of one clock.

    Attributes:
        number: which request it was.
        offered: when it was sent, from the beginning on; `late`: by how much it should have been earlier.
        ended: how long it took as a whole.
        status: the call's.
        retry_seconds: when the refusal says to come again; None = it says nothing.
        came: how long it took until each message, and `token_ids` all that they brought.
    """

    number: int
    offered: float
    late: float = 0.0
    ended: float = 0.0
    status: str = "OK"
    retry_seconds: float | None = None
    came: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def prompt_of(number: int) -> list[int]:
    """Every NUM_PROMPTS-th request has the same."""
    draw = random.Random(number % NUM_PROMPTS)
    return draw.choices(range(MAX_PROMPT_ID), k=draw.randint(8, 32))


def num_tokens_of(number: int) -> int:
    """How long the answer is to be; MEAN_TOKENS on average."""
    return MIN_TOKENS + number * 31 % (MAX_TOKENS - MIN_TOKENS + 1)


def request_of(number: int) -> pb.GenerateRequest:
    """With a salt of its own, so that every prompt is computed."""
    params = pb.SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens_of(number))
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt_of(number)), sampling_params=params, cache_salt=f"{time.time_ns()}-{number}"
    )


class Clients:
    """All on one event loop and one connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = InferenceStub(channel)
        self._began = time.perf_counter()
        self.answers: list[Answer] = []
        self.lags: list[float] = []

    async def ask(self, due: float | None = None) -> Answer:
        """Send the next request, and read its answer to the end. `due`: when it should have been sent."""
        began = time.perf_counter()
        answer = Answer(len(self.answers), began - self._began)
        self.answers.append(answer)
        if due is not None:
            answer.late = answer.offered - due
        try:
            async for response in self._stub.Generate(request_of(answer.number), timeout=CALL_SECONDS):
                answer.came.append(time.perf_counter() - began)
                answer.token_ids += response.token_ids
        except grpc.aio.AioRpcError as failure:
            answer.status = failure.code().name
            answer.retry_seconds = getattr(error_of_call(failure), "retry_after_seconds", None)
        answer.ended = time.perf_counter() - began
        return answer

    async def in_turns(self, num_callers: int, seconds: float) -> None:
        async def call() -> None:
            while time.perf_counter() - self._began < seconds:
                answer = await self.ask()
                # All come at once in the beginning, when not as many may wait.
                await asyncio.sleep(answer.retry_seconds or 0.0)

        await asyncio.gather(*(call() for _ in range(num_callers)))

    async def at_rate(self, rate: float, seconds: float) -> None:
        draw, due, tasks = random.Random(0), 0.0, []
        while (due := due + draw.expovariate(rate)) < seconds:
            await asyncio.sleep(self._began + due - time.perf_counter())
            tasks.append(asyncio.create_task(self.ask(due)))
        await asyncio.gather(*tasks)

    async def look_after(self, load: Callable[[], Awaitable[None]]) -> None:
        """Have a load go on while this loop's own lag is measured."""
        loading = asyncio.ensure_future(load())
        while not loading.done():
            before = time.perf_counter()
            await asyncio.sleep(PROBE_SECONDS)
            self.lags.append(time.perf_counter() - before - PROBE_SECONDS)
        await loading


async def main(address: str, seconds: float, num_callers: int = 0, rate: float = 0.0) -> None:
    async with grpc.aio.insecure_channel(address, options=PEER_OPTIONS) as channel:
        await channel.channel_ready()
        clients = Clients(channel)
        if num_callers:
            await clients.look_after(lambda: clients.in_turns(num_callers, seconds))
        else:
            await clients.look_after(lambda: clients.at_rate(rate, seconds))
    told = {"answers": [asdict(answer) for answer in clients.answers], "lags": clients.lags}
    print(json.dumps({**told, "cpu_seconds": time.process_time()}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], **json.loads(sys.argv[2])))
