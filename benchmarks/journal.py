"""What the journal costs: CPU time per token of the engine's process, and how much later a step's tokens are delivered.

    python benchmarks/journal.py [--quick] [--json FILE] [--folder FOLDER]

Two engines, one with a journal and one without, decode the same streams in turns in one process, without gRPC and with
a worker that answers at once. CPU time is the whole process's, the journal's thread included. Latency is from a step's
answer to the moment at which a frontend can take its tokens: with the journal they are then in the file, in FOLDER,
which is best on the disk that would hold it.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.hello import Hello
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import load_config
from blockplane.protos.delivery import FrontendBatch, Submission
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.wire import PROTOCOL_VERSION

MAX_MODEL_LEN, BYTES_PER_BLOCK = 16_384, 2 * 16 * 8 * 4
LAYERS = (LayerKVSpec("layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32"),)
MODEL = ModelInfo("none", 1000, MAX_MODEL_LEN, (), None, b"", GenerationDefaults())


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    num_streams: tuple[int, ...] = (1, 64, 256)
    num_turns: int = 10
    num_steps: int = 500


QUICK = Sizes(num_turns=4, num_steps=200)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of streams: CPU microseconds per token, medians of the turns; and by how many microseconds a step's
    tokens are delivered later than without a journal, compared with the median there.
    """

    num_streams: int
    cpu_without: float
    cpu_with: float
    later_p50: float
    later_p99: float
    later_max: float
    bytes_per_token: float

    @property
    def ratio(self) -> float:
        return self.cpu_with / self.cpu_without


class Decoding:
    """An engine whose streams decode for ever."""

    def __init__(self, num_streams: int, journal: str) -> None:
        settings = {"journal": journal, "num_seqs_buckets": str(num_streams), "num_batched_tokens_buckets": "8192"}
        self.engine, self._num_streams = Engine(load_config(settings, {})), num_streams
        memory = BYTES_PER_BLOCK * (num_streams + 1) * (MAX_MODEL_LEN // 16)
        self._group = self.engine.attach_worker(Hello(PROTOCOL_VERSION, MODEL, LAYERS, memory, BucketRules()))
        self.engine.worker_ready(self._group)
        self._owner = self.engine.attach_frontend()
        self._outbox = self.engine.outbox(self._owner)

    async def begin(self) -> None:
        """Have all streams decode."""
        await self._outbox.take()
        params = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
        prompt = np.arange(1, 17, dtype=np.int32)
        submissions = [Submission(i, f"request-{i}", prompt, params) for i in range(self._num_streams)]
        self.engine.take_batch(self._owner, FrontendBatch(tuple(submissions)))
        num_decoding = 0
        while num_decoding < self._num_streams:
            plan = self.engine.next_plan(self._group)
            assert plan is not None
            decoding = num_decoding if plan.decode_rows is None else len(plan.decode_rows)
            await self._answer(plan.step, decoding + len(plan.prefill_rows))
            num_decoding = decoding

    async def turn(self, num_steps: int) -> tuple[float, list[float]]:
        """CPU seconds of some steps, and how long each step's delivery took."""
        latencies = []
        start = time.process_time()
        for _ in range(num_steps):
            plan = self.engine.next_plan(self._group)
            assert plan is not None
            latencies.append(await self._answer(plan.step, self._num_streams))
        return time.process_time() - start, latencies

    async def _answer(self, step: int, num_tokens: int) -> float:
        result = StepResult(step, np.full(num_tokens, 7, np.int32), epoch=self._group.configure.epoch)
        start = time.perf_counter()
        self.engine.take_result(self._group, result)
        self.engine.flush()
        num_delivered = 0
        while num_delivered < num_tokens:
            num_delivered += len((await self._outbox.take()).token_ids)
        return time.perf_counter() - start


async def measure(sizes: Sizes, num_streams: int, folder: Path) -> Figure:
    path = folder / f"journal-{num_streams}"
    without, with_journal = Decoding(num_streams, ""), Decoding(num_streams, str(path))
    for decoding in (without, with_journal):
        await decoding.begin()
        await decoding.turn(sizes.num_steps // 4)
    turns = [
        (await without.turn(sizes.num_steps), await with_journal.turn(sizes.num_steps)) for _ in range(sizes.num_turns)
    ]
    with_journal.engine.close()
    num_tokens = sizes.num_steps * num_streams
    usual = statistics.median(latency for (_, latencies), _ in turns for latency in latencies)
    later = np.array([latency - usual for _, (_, latencies) in turns for latency in latencies])
    p50, p99 = np.percentile(later, (50, 99))
    return Figure(
        num_streams,
        1e6 * statistics.median(seconds for (seconds, _), _ in turns) / num_tokens,
        1e6 * statistics.median(seconds for _, (seconds, _) in turns) / num_tokens,
        later_p50=1e6 * float(p50),
        later_p99=1e6 * float(p99),
        later_max=1e6 * float(later.max()),
        bytes_per_token=path.stat().st_size / (num_tokens * sizes.num_turns + num_tokens / 4),
    )


def report(figures: Sequence[Figure]) -> None:
    print("streams   CPU us/token: without     with    ratio   later, us: p50      p99      max   bytes/token")
    for figure in figures:
        print(
            f"{figure.num_streams:7}   {figure.cpu_without:21.2f} {figure.cpu_with:8.2f} {figure.ratio:8.2f}"
            f"   {figure.later_p50:14.0f} {figure.later_p99:8.0f} {figure.later_max:8.0f}"
            f" {figure.bytes_per_token:13.1f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    parser.add_argument("--folder", metavar="FOLDER", help="where the journal is put (default: the system's for such)")
    flags = parser.parse_args()
    sizes = QUICK if flags.quick else Sizes()
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        figures = [asyncio.run(measure(sizes, num_streams, Path(folder))) for num_streams in sizes.num_streams]
    report(figures)
    if flags.json:
        told = [{**asdict(figure), "ratio": figure.ratio} for figure in figures]
        flags.json.write_text(json.dumps({"figures": told}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
