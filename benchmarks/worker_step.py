"""What a worker's step costs outside the model's forward: host time, the sampler's draw, and padding; beside budgets.

    python benchmarks/worker_step.py [--quick] [--check] [--json FILE]

Host time is what a step makes the device wait for: the plan applied to the rows, the inputs (positions, slots, padding,
the block tables of all groups), and what the sampler is told; beside it, not in the budget, how the sampled tokens are
taken over. Rows decode at random phases about 1,000 tokens into their texts, so that one in sixteen gets a block at a
step; a quarter of them samples with top-k and top-p. All times are CPU microseconds of one thread on one core, in short
turns; a figure is the median of its turns' medians, and the least of them, which is what the machine does when it is
left alone. The budget is of the best turn. The sampler and the padding are `sampling_load` and `padding_load`.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from padding_load import PaddingFigure, measure_padding, recorded
from sampling_load import SamplingFigure, measure_sampling

from blockplane.data_plane.inputs import decode_inputs
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import NO_ROWS, Admission, Configure, Int32Array, StepPlan
from blockplane.protos.sampling import SamplingParams

BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE = 16, 4096, 262_144
NUM_SEQS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGETS = {64: 150.0, 256: 400.0}
"""CPU microseconds by rows, of all parts together but the last."""
PARTS = "apply", "inputs", "sampling set-up", "advance"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    num_rows: tuple[int, ...] = (1, 8, 64, 256)
    num_groups: tuple[int, ...] = (1, 6)
    num_turns: int = 25
    num_steps: int = 64
    num_sampling_turns: int = 15


QUICK = Sizes(num_turns=9, num_steps=48, num_sampling_turns=5)


@dataclass(frozen=True, slots=True)
class Figure:
    """One load's step, CPU microseconds: the median and the best turn's of what the budget is for, each part's median,
    and the budget."""

    num_rows: int
    num_groups: int
    median: float
    best: float
    parts: dict[str, float]
    budget: float | None = None

    @property
    def ratio(self) -> float | None:
        """Of the budget; by the best turn, since another process can only slow a turn down."""
        return None if self.budget is None else self.best / self.budget

    @property
    def is_missed(self) -> bool:
        return self.ratio is not None and self.ratio > 1


class DecodingRows:
    """A worker's rows that decode for ever, fed with plans that only hand out blocks."""

    def __init__(self, num_rows: int, num_groups: int) -> None:
        lengths = np.random.default_rng(0).integers(768, 1280, num_rows)
        configure = Configure(
            BLOCK_SIZE,
            num_blocks=1_000_000,
            max_model_len=MAX_MODEL_LEN,
            num_batched_tokens_buckets=(512,),
            num_seqs_buckets=tuple(bucket for bucket in NUM_SEQS_BUCKETS if bucket < 2 * num_rows),
            kv_cache_groups=(KVCacheGroup(),) * num_groups,
        )
        self.rows, self.sampling = Rows(configure), SamplingRows(configure.max_num_seqs, VOCAB_SIZE)
        self._lengths, self._num_groups = lengths, num_groups
        self._all, self._step, self._next_block = np.arange(num_rows, dtype=np.int32), 1, 1
        num_held = -(-lengths // BLOCK_SIZE)
        plan = StepPlan(
            1,
            admissions=tuple(admission(row, int(length)) for row, length in enumerate(lengths)),
            block_rows=np.repeat(self._all, num_held),
            block_ids=self._new_blocks(int(num_held.sum())),
            decode_rows=self._all,
        )
        self.rows.apply(plan)
        self.sampling.apply(plan)

    @torch.inference_mode()
    def turn(self, num_steps: int) -> list[list[float]]:
        """Each part's times, by step; the rows start where they were admitted."""
        times = [self.step() for _ in range(num_steps)]
        return [list(part) for part in zip(*times, strict=True)]

    def step(self) -> tuple[float, ...]:
        """One step; CPU microseconds of each part."""
        plan = self._plan()
        rows, sampling = self.rows, self.sampling
        start = time.thread_time()
        rows.apply(plan)
        sampling.apply(plan)
        applied = time.thread_time()
        inputs = decode_inputs(rows, rows.decode_rows, rows.decode_num_tokens)
        fed = time.thread_time()
        sampling.batch(rows, inputs.sampled_rows)
        set_up = time.thread_time()
        rows.advance(inputs.rows, inputs.num_scheduled_tokens)
        rows.append(inputs.sampled_rows, self._all)
        end = time.thread_time()
        bounds = start, applied, fed, set_up, end
        return tuple(1e6 * (bounds[i + 1] - bounds[i]) for i in range(len(PARTS)))

    def _plan(self) -> StepPlan:
        """The next step's: a block for each row whose next token begins one; it is forgotten where none is left."""
        self._step += 1
        in_need = self.rows.num_tokens[self._all] > self.rows.block_table.num_blocks[self._all] * BLOCK_SIZE
        block_rows = self._all[in_need]
        if not block_rows.size:
            return StepPlan(self._step)
        return StepPlan(self._step, block_rows=block_rows, block_ids=self._new_blocks(len(block_rows)))

    def _new_blocks(self, num_blocks: int) -> Int32Array:
        first, count = self._next_block, num_blocks * self._num_groups
        self._next_block += count
        return np.arange(first, first + count, dtype=np.int32) if num_blocks else NO_ROWS


def admission(row: int, num_tokens: int) -> Admission:
    params = SamplingParams(MAX_MODEL_LEN, temperature=1.0, top_k=64, top_p=0.95)
    params = params if row % 4 == 0 else SamplingParams(MAX_MODEL_LEN)
    return Admission(row, np.ones(num_tokens, np.int32), num_tokens, num_tokens - 1, params, seed=row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples: under 40 s")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget is missed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if flags.quick else Sizes()
    figures = measure(sizes)
    print_table(figures)
    sampling, padding = measure_sampling(sizes.num_sampling_turns), measure_padding(recorded())
    print_beside(sampling, padding)
    if flags.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "figures": [asdict(f) | {"ratio": f.ratio, "is_missed": f.is_missed} for f in figures],
            "sampling": [asdict(f) | {"is_missed": f.is_missed} for f in sampling],
            "padding": [asdict(f) | {"waste": f.waste} for f in padding],
        }
        flags.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(flags.check and any(figure.is_missed for figure in (*figures, *sampling)))


def measure(sizes: Sizes) -> list[Figure]:
    """All loads in turns, so that a machine's changing pace meets them alike."""
    loads = [DecodingRows(num_rows, num_groups) for num_groups in sizes.num_groups for num_rows in sizes.num_rows]
    turns: list[list[list[list[float]]]] = [[] for _ in loads]
    gc.collect()
    for _ in range(sizes.num_turns):
        for load, own in zip(loads, turns, strict=True):
            load.turn(sizes.num_steps // 4)
            own.append(load.turn(sizes.num_steps))
    shapes = [(num_rows, num_groups) for num_groups in sizes.num_groups for num_rows in sizes.num_rows]
    return [figure(*shape, own) for shape, own in zip(shapes, turns, strict=True)]


def figure(num_rows: int, num_groups: int, turns: Sequence[Sequence[Sequence[float]]]) -> Figure:
    """A load's figure of its turns, each the parts' times by step."""
    medians = [statistics.median(map(sum, zip(*turn[:-1], strict=True))) for turn in turns]
    parts = {
        name: statistics.median(statistics.median(turn[index]) for turn in turns) for index, name in enumerate(PARTS)
    }
    return Figure(num_rows, num_groups, statistics.median(medians), min(medians), parts, BUDGETS.get(num_rows))


def print_table(figures: Sequence[Figure]) -> None:
    """The figures in microseconds; the budget, and the best turn's part of it."""
    print(f"{'rows':>4} {'groups':>6} {'median':>8} {'best':>8}", *(f"{part:>15}" for part in PARTS), "budget   ratio")
    for figure in figures:
        columns = f"{figure.num_rows:4} {figure.num_groups:6} {figure.median:8.1f} {figure.best:8.1f} "
        columns += " ".join(f"{figure.parts[part]:15.1f}" for part in PARTS)
        if figure.ratio is not None:
            columns += f" {figure.budget:6.0f} {figure.ratio:7.3f}{'  MISSED' if figure.is_missed else ''}"
        print(columns)


def print_beside(sampling: Sequence[SamplingFigure], padding: Sequence[PaddingFigure]) -> None:
    print("\nsampling 64 rows x 262,144 ids       ms  to an arg max and one pass, budget")
    for way in sampling:
        budget = "" if way.budget is None else f" {way.budget:7.2f}{'  MISSED' if way.is_missed else ''}"
        print(f"{way.way:28} {way.milliseconds:10.1f} {way.ratio:7.2f}{budget}")
    print("\npadding, W1, W2 and W4 mixed      steps     tokens   computed   waste")
    for graph in padding:
        print(f"{graph.kind:28} {graph.num_steps:10} {graph.num_actual:10} {graph.num_computed:10} {graph.waste:7.1%}")


if __name__ == "__main__":
    # On one core: two of a virtual machine may run at very different paces.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.exit(main())
