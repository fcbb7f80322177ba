"""What long prompts do to streams that decode meanwhile: prefill and decode on workers of their own, beside the same.

    python benchmarks/split.py [--quick] [--check] [--json FILE]

Real processes, once with two workers that do both, once with one for prompts and one for decoding; every worker has
one thread and the synthetic model, whose steps compute what they cost: nothing is paced, so that a busy machine shows.
16 streams decode all the while, and long prompts come one after the other. The gaps between a stream's tokens are those
that its client sees while a long prompt waits for its first token; every token is held against the model's definition.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from blockplane.client.async_client import AsyncClient
from blockplane.v1 import engine_pb2 as pb

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "system")]

from processes import System, wait_for  # noqa: E402 - the tests' own
from synthetic_oracle import continue_greedily  # noqa: E402

MAX_RATIO = 0.5
"""Of the p99 of gaps, split to unified."""
NUM_LONG_TOKENS = 3
"""That a long prompt is asked for: enough to see that it goes on where its blocks went."""
FIRST_LONG = 1000
"""The number of the first long prompt; streams have those from 0 on."""
MAX_MODEL_LEN = 4096
WAYS = {
    "unified": ((), ()),
    "split": (("--role=prefill", "--transfer-address=127.0.0.1:0"), ("--role=decode",)),
}
"""What each of the two workers of a run is told."""


@dataclass(frozen=True, slots=True)
class Sizes:
    num_streams: int = 16
    num_long: int = 6
    long_tokens: int = 4000
    prompt_tokens: int = 40
    pause_seconds: float = 1.0
    """Between a long prompt's end and the next."""


QUICK = Sizes(num_long=2, long_tokens=2048, pause_seconds=0.3)


@dataclass
class Run:
    """What clients saw of one run, in seconds."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    statistics: pb.GetStatisticsResponse = field(default_factory=pb.GetStatisticsResponse)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value of both runs, and the most that their ratio may be; None = it is only told."""

    name: str
    unified: float
    split: float
    limit: float | None = None

    @property
    def ratio(self) -> float:
        return self.split / self.unified

    @property
    def is_missed(self) -> bool:
        return self.limit is not None and not self.ratio <= self.limit


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """No two have a block in common."""
    return random.Random(number).choices(range(200), k=num_tokens)


@contextmanager
def two_workers(way: str, sizes: Sizes) -> Iterator[System]:
    system = System(
        f"--num-seqs-buckets={2 * sizes.num_streams}",
        f"--max-model-len={MAX_MODEL_LEN}",
        "--num-batched-tokens-buckets=1024",
        "--num-blocks=4096",
        "--structured-output=off",
        "--num-threads=1",
        "--log-level=warning",
    )
    try:
        for kind in ("engine", "frontend"):
            system.start(kind)
        for flags in WAYS[way]:
            system.start("worker", *flags)
        system.wait_until_serving()
        wait_for(lambda: system.statistics().num_groups == 2, "both workers serve")
        yield system
    finally:
        system.close()


class Clients:
    """Streams that decode until they are told to stop, and long prompts beside them."""

    def __init__(self, client: AsyncClient, sizes: Sizes, run: Run) -> None:
        self._client, self._sizes, self._run = client, sizes, run
        self._is_long, self._is_over = False, False
        self._num_decoding = 0

    async def load(self) -> None:
        streams = [asyncio.create_task(self._decode(number)) for number in range(self._sizes.num_streams)]
        while self._num_decoding < self._sizes.num_streams:
            await asyncio.sleep(0.05)
        for number in range(self._sizes.num_long):
            await asyncio.sleep(self._sizes.pause_seconds)
            await self._ask_long(FIRST_LONG + number)
        self._is_over = True
        await asyncio.gather(*streams)

    async def _decode(self, number: int) -> None:
        prompt, text = prompt_of(number, self._sizes.prompt_tokens), self._run.texts.setdefault(number, [])
        before = None
        max_tokens = MAX_MODEL_LEN - self._sizes.prompt_tokens
        async for delta in self._client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True):
            now = time.perf_counter()
            text += delta.token_ids
            if before is not None and self._is_long:
                self._run.gaps.append(now - before)
            # Where it decodes from now on is settled by its second token.
            self._num_decoding += len(text) > 1 and len(text) - len(delta.token_ids) <= 1
            before = now
            if self._is_over:
                break

    async def _ask_long(self, number: int) -> None:
        text, began = self._run.texts.setdefault(number, []), time.perf_counter()
        self._is_long = True
        prompt = prompt_of(number, self._sizes.long_tokens)
        async for delta in self._client.generate(prompt, max_tokens=NUM_LONG_TOKENS, temperature=0, ignore_eos=True):
            if not text:
                self._run.first_tokens.append(time.perf_counter() - began)
                self._is_long = False
            text += delta.token_ids


def measure(way: str, sizes: Sizes) -> Run:
    run = Run()

    async def load(address: str) -> None:
        async with AsyncClient(address) as client:
            await Clients(client, sizes, run).load()

    with two_workers(way, sizes) as system:
        asyncio.run(load(system.address))
        run.statistics = system.statistics()
    return run


def num_wrong(runs: Iterable[Run], sizes: Sizes) -> int:
    """Texts that are not what the model says."""
    wrong, told = 0, [run.texts for run in runs]
    for number in told[0]:
        texts = [each[number] for each in told]
        prompt = prompt_of(number, sizes.long_tokens if number >= FIRST_LONG else sizes.prompt_tokens)
        expected = continue_greedily(prompt, max(map(len, texts)), ignore_eos=True)
        wrong += sum(not text or text != expected[: len(text)] for text in texts)
    return wrong


def figures_of(unified: Run, split: Run) -> list[Figure]:
    def gap(percentile: int, limit: float | None) -> Figure:
        of_unified, of_split = (1000 * float(np.percentile(run.gaps, percentile)) for run in (unified, split))
        return Figure(f"p{percentile} between tokens, ms", of_unified, of_split, limit)

    of_unified, of_split = (1000 * float(np.median(run.first_tokens)) for run in (unified, split))
    first = Figure("median to a long prompt's first token, ms", of_unified, of_split)
    return [gap(50, None), gap(99, MAX_RATIO), first]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything, for a look")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed or a token is wrong")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, too")
    flags = parser.parse_args()
    sizes = QUICK if flags.quick else Sizes()
    runs = {way: measure(way, sizes) for way in WAYS}
    figures, wrong = figures_of(*runs.values()), num_wrong(runs.values(), sizes)
    print(f"{'':44}{'unified':>10}{'split':>10}{'ratio':>8}{'limit':>8}")
    for each in figures:
        limit = "" if each.limit is None else f"{each.limit:8.2f}{'  MISSED' if each.is_missed else ''}"
        print(f"{each.name:44}{each.unified:10.1f}{each.split:10.1f}{each.ratio:8.2f}{limit}")
    moved = runs["split"].statistics
    print(
        f"{len(runs['unified'].gaps)} and {len(runs['split'].gaps)} gaps; {moved.num_transfers} requests moved with"
        f" {moved.num_transferred_blocks} blocks, {moved.num_failed_transfers} without; {wrong} texts were wrong"
    )
    if flags.json:
        told = [{**asdict(each), "ratio": each.ratio, "is_missed": each.is_missed} for each in figures]
        flags.json.write_text(
            json.dumps({"sizes": asdict(sizes), "figures": told, "num_wrong": wrong}, indent=2) + "\n"
        )
    return int(flags.check and (wrong > 0 or any(each.is_missed for each in figures)))


if __name__ == "__main__":
    sys.exit(main())
