"""CPU time of the control plane's step, from a worker's result to streams' tokens and the next plan, beside vLLM's.

    python benchmarks/control_plane.py [--quick] [--check] [--json FILE] [--vllm PYTHON]

A step is all that the engine does for one result: read its bytes, answer, gather per stream, schedule, and write the
bytes of the next plan and of the delivery. Rows decode at random phases about 1,000 tokens into their texts, none ends,
and every block that is taken was cached before, as in a server that has run for a while. All times are CPU microseconds
of one thread, the garbage collector at work.

Machines are noisy, and change their pace within seconds, so only ratios of what was measured side by side say anything:
loads are measured in short turns, and the ratio is the median of the turns' ratios. With `--vllm`, the python of an
environment that has vLLM, every other turn is vLLM's scheduler's: schedule and update alone
(benchmarks/vllm_scheduler.py).
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scheduler_load import ControlPlane, Load, kv_groups

from blockplane.control_plane.engine.kv_needs import num_blocks_needed

BLOCK_SIZE, PROMPT_LENGTH, WARM_UP_STEPS = 16, 8192, 32
LAYOUTS: dict[str, tuple[int | None, ...]] = {
    "full": (None,) * 18,
    "hybrid": tuple(None if index % 6 == 5 else 512 for index in range(18)),
}
"""Sliding windows by layer, None = full attention. `hybrid` is Gemma 3 270M."""
STEP_TARGETS = {1: 1 / 2, 256: 1 / 15, 1024: 1 / 15}
"""By rows, the most of vLLM's time that a step of ours may take."""
PROMPT_PARTS = "hashing", "lookup", "cold", "cached"
PROMPT_TARGETS = {"hashing": 1 / 2, "lookup": 1 / 2}
FLATNESS = 1.25
"""The most by which a step may be slower with more free blocks than with the fewest; nothing but caches' misses."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; samples come in rounds, ours and vLLM's in turns."""

    num_rows: tuple[int, ...] = (1, 8, 64, 256, 1024)
    num_free_blocks: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    num_rounds: int = 25
    num_steps: int = 64
    num_long_steps: int = 8
    num_prompts: int = 4
    num_growth_rows: int = 64
    num_growth_steps: int = 24

    def num_peer_steps(self, num_rows: int) -> int:
        """vLLM's steps a round: fewer of the long ones."""
        return min(self.num_steps, self.num_long_steps + 1024 // num_rows)


QUICK = Sizes(
    num_rows=(1, 256),
    num_free_blocks=(1_000, 100_000),
    num_rounds=7,
    num_steps=48,
    num_long_steps=4,
    num_prompts=2,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured cost, microseconds: the median, the 99th percentile, the median of what it is compared with, and the
    median ratio of the two in turns side by side.
    """

    name: str
    layout: str
    median: float
    p99: float
    reference: float | None = None
    ratio: float | None = None
    target: float | None = None

    @property
    def is_missed(self) -> bool:
        return self.ratio is not None and self.target is not None and self.ratio > self.target


class Peer:
    """vLLM's scheduler in a process of its own, which answers requests in order."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("vllm_scheduler.py")
        # Its warnings are about the missing model.
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the vLLM process ended; see `{' '.join(map(str, self._process.args))} < /dev/null`.")
        return json.loads(line)

    def ask(self, request: dict[str, Any]) -> Any:
        self.send(request)
        return self.receive()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples: under 40 s")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure the vLLM of this python beside ours")
    flags = parser.parse_args()
    with ExitStack() as stack:
        peer = None
        if flags.vllm:
            peer = Peer(flags.vllm)
            stack.callback(peer.close)
        figures = measure(QUICK if flags.quick else Sizes(), peer)
    print_table(figures)
    if flags.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        document = {
            "machine": machine,
            "figures": [asdict(f) | {"is_missed": f.is_missed} for f in figures],
        }
        flags.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(flags.check and any(figure.is_missed for figure in figures))


def measure(sizes: Sizes, peer: Peer | None) -> list[Figure]:
    figures = measure_growth(sizes)
    if peer is not None:
        print("vLLM", peer.receive()["version"])
    for layout in LAYOUTS:
        figures += [measure_steps(layout, num_rows, sizes, peer) for num_rows in sizes.num_rows]
        figures += measure_prompts(layout, sizes, peer)
    return figures


def measure_steps(layout: str, num_rows: int, sizes: Sizes, peer: Peer | None) -> Figure:
    """A step of rows that decode, ours and vLLM's in turns."""
    load = decode_load(layout, num_rows, sizes.num_rounds * sizes.num_steps)
    own, ours, theirs = under_load(load, peer), list[list[float]](), list[list[float]]()
    for _ in range(sizes.num_rounds):
        ours.append(settled(own.decode(sizes.num_steps)))
        if peer is not None:
            theirs.append(settled(peer.ask({"decode": sizes.num_peer_steps(num_rows)})))
    return figure(f"step of {num_rows} rows", layout, ours, theirs, STEP_TARGETS.get(num_rows))


def measure_prompts(layout: str, sizes: Sizes, peer: Peer | None) -> list[Figure]:
    """Admissions of long prompts, one at a time, ours and vLLM's in turns."""
    own, ours, theirs = under_load(prompt_load(layout), peer), list[Any](), list[Any]()
    for _ in range(sizes.num_rounds):
        ours.append(settled([own.admit(PROMPT_LENGTH) for _ in range(sizes.num_prompts)]))
        if peer is not None:
            theirs.append(settled([peer.ask({"admit": PROMPT_LENGTH}) for _ in range(sizes.num_prompts)]))
    return [
        figure(
            f"{PROMPT_LENGTH} tokens, {part}",
            layout,
            [[times[part] for times in turn] for turn in ours],
            [[times[part] for times in turn] for turn in theirs],
            PROMPT_TARGETS.get(part),
        )
        for part in PROMPT_PARTS
    ]


def measure_growth(sizes: Sizes) -> list[Figure]:
    """The same step beside more and more free blocks, in turns; compared with the fewest."""
    num_rows = sizes.num_growth_rows
    planes = [ControlPlane(decode_load("full", num_rows, num_free_blocks=num)) for num in sizes.num_free_blocks]
    times: list[list[list[float]]] = [[] for _ in planes]
    for _ in range(sizes.num_rounds):
        for plane, own in zip(planes, times, strict=True):
            own.append(settled(plane.decode(sizes.num_growth_steps)))
    names = [f"step of {num_rows} rows, {num:,} free blocks" for num in sizes.num_free_blocks]
    fewest, *more = [figure(name, "full", own, times[0], FLATNESS) for name, own in zip(names, times, strict=True)]
    return [replace(fewest, reference=None, ratio=None, target=None), *more]


def settled(samples: list[Any]) -> list[Any]:
    """Without the first quarter, which finds the processor's caches full of what had its turn before."""
    return samples[len(samples) // 4 :]


def under_load(load: Load, peer: Peer | None) -> ControlPlane:
    """Ours under a load, and vLLM's too, both at once since nothing is measured yet."""
    if peer is not None:
        peer.send({"load": asdict(load) | {"max_num_seqs": load.max_num_seqs}})
    gc.collect()
    own = ControlPlane(load)
    if peer is not None:
        peer.receive()
    return own


def decode_load(layout: str, num_rows: int, num_steps: int = 0, num_free_blocks: int | None = None) -> Load:
    """Rows about 1,000 tokens into their texts, over as many free blocks as said, or as so many steps take."""
    lengths = np.random.default_rng(0).integers(768, 1280, num_rows).tolist()
    groups = kv_groups(LAYOUTS[layout])
    if num_free_blocks is None:
        # Until all rows decode, 16 join a step.
        num_steps += num_rows // 10 + WARM_UP_STEPS
        num_free_blocks = (num_steps // BLOCK_SIZE + 2 * len(groups)) * num_rows + 1024 * len(groups)
    num_held = sum(num_blocks_needed(groups, length, BLOCK_SIZE) for length in lengths)
    return make_load(layout, tuple(lengths), 1 + num_held + num_free_blocks)


def prompt_load(layout: str) -> Load:
    return make_load(layout, (), num_blocks=1 + 4 * len(kv_groups(LAYOUTS[layout])) * PROMPT_LENGTH // BLOCK_SIZE)


def make_load(layout: str, prompt_lengths: tuple[int, ...], num_blocks: int) -> Load:
    num_blocks_per_filler = len(kv_groups(LAYOUTS[layout])) * PROMPT_LENGTH // BLOCK_SIZE
    return Load(
        windows=LAYOUTS[layout],
        prompt_lengths=prompt_lengths,
        num_blocks=num_blocks,
        num_fillers=num_blocks // num_blocks_per_filler + 1,
        num_warm_up_steps=WARM_UP_STEPS if prompt_lengths else 0,
    )


def figure(
    name: str, layout: str, ours: Sequence[list[float]], reference: Sequence[list[float]], target: float | None
) -> Figure:
    """A figure of turns' samples; the n-th turn of the one is compared with the n-th of the other."""
    samples = [sample for turn in ours for sample in turn]
    median, p99 = statistics.median(samples), float(np.quantile(samples, 0.99))
    if not reference:
        return Figure(name, layout, median, p99)
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, reference, strict=True)]
    beside = statistics.median(sample for turn in reference for sample in turn)
    return Figure(name, layout, median, p99, beside, statistics.median(ratios), target)


def print_table(figures: Sequence[Figure]) -> None:
    """The figures in microseconds; what they are compared with, the ratio, and what it may be at most."""
    print(f"{'CPU microseconds':38} {'layout':7} {'median':>9} {'p99':>9} {'beside':>9} {'ratio':>7} {'at most':>7}")
    for figure in figures:
        columns = f"{figure.name:38} {figure.layout:7} {figure.median:9.1f} {figure.p99:9.1f}"
        if figure.ratio is not None:
            columns += f" {figure.reference:9.1f} {figure.ratio:7.3f}"
        if figure.target is not None:
            columns += f" {figure.target:7.3f}{'  MISSED' if figure.is_missed else ''}"
        print(columns)


if __name__ == "__main__":
    # Both sides on the same core: two of a virtual machine may run at very different paces.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.exit(main())
