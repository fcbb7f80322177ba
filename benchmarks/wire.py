"""What crosses between engine and worker in steady decode: bytes, round trips beside a bare ping's, a worker's waits.

    python benchmarks/wire.py [--quick] [--check] [--json FILE]

Bytes are those of whole messages as gRPC gets them, one for each step, while rows decode at random phases of their
blocks. The round trip is the engine's: from a plan that goes out to the result that comes in next, less the worker's
own time, through the real server, over loopback TCP and a unix socket. A worker that answers at once meets an engine
that still hands tokens to its frontend; one that takes a millisecond, as any real one does, meets one at rest. The ping
is a bare stream on the same server that sends as many bytes each way, and is answered as late; steps and pings take
turns, and the ratio is the median of the turns' ratios. A worker's wait is the time before each step in which it had no
plan, by its own clock, in the real worker whose steps sleep, directly and through a proxy that holds everything for a
millisecond each way; beside it stands the time from a step's end to the next one's beginning, in which the worker also
answers and reads.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scheduler_load import ControlPlane, Load

from blockplane.protos import wire
from blockplane.v1 import engine_pb2 as pb

FOLDER = Path(__file__).parent
LAYOUTS: dict[str, tuple[int | None, ...]] = {
    "full": (None,) * 18,
    "hybrid": tuple(None if index % 6 == 5 else 512 for index in range(18)),
}
"""Sliding windows by layer, None = full attention: one KV group, and Gemma 3 270M's six."""
BLOCK_SIZES = (16, 128)
PLAN_TARGETS = {("full", 256, 16): 160, ("full", 256, 128): 64}
"""By layout, rows and block size, the most bytes of the median plan."""
ROUND_TRIP_TARGET = 1.3
ROUND_TRIP_STEPS = {0.0: "at once", 0.001: "after 1 ms"}
"""By seconds, when the worker answers."""
STEP_SECONDS, NUM_WAITING_ROWS = 0.005, 64
DELAYS = {"loopback": (0.0, 0.02), "1 ms each way": (0.001, 0.05)}
"""Seconds that a proxy holds everything, and the most of a step that the worker may wait."""
MAX_MODEL_LEN, SYNTHETIC_MODEL_LEN = 32_768, 4096
"""Tokens; what the streams never reach, without a model and with the synthetic one."""
SECONDS = 60
"""How long a process may take for an answer before it counts as hung."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    num_rows: tuple[int, ...] = (1, 8, 64, 256)
    num_plans: int = 2048
    num_turns: int = 25
    num_steps: int = 64


QUICK = Sizes(num_plans=256, num_turns=7, num_steps=32)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value in its unit, what stands beside it, and the most that `compared` may be; None = no target."""

    name: str
    unit: str
    median: float
    other: float
    beside: float | None = None
    compared: float | None = None
    target: float | None = None

    @property
    def is_missed(self) -> bool:
        return self.compared is not None and self.target is not None and self.compared > self.target


class Peer:
    """A process of wire_peers.py; it has answered once when it is up."""

    def __init__(self, kind: str, address: str, **settings: Any) -> None:
        command = [sys.executable, str(FOLDER / "wire_peers.py"), kind, address, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.kind = kind

    def tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        assert self._process.stdout is not None
        hung = threading.Timer(SECONDS, self._process.kill)
        hung.start()
        line = self._process.stdout.readline()
        hung.cancel()
        if not line:
            raise SystemExit(f"the {self.kind} ended, or said nothing for {SECONDS} s; its own words are above.")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples: under 40 s")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    flags = parser.parse_args()
    figures = measure(QUICK if flags.quick else Sizes())
    print_table(figures)
    if flags.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        document = {"machine": machine, "figures": [asdict(f) | {"is_missed": f.is_missed} for f in figures]}
        flags.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(flags.check and any(figure.is_missed for figure in figures))


def measure(sizes: Sizes) -> list[Figure]:
    figures = []
    for layout in LAYOUTS:
        for block_size in BLOCK_SIZES:
            for num_rows in sizes.num_rows:
                figures += measure_bytes(layout, block_size, num_rows, sizes)
    for transport in ("TCP", "unix"):
        figures += measure_round_trips(transport, sizes)
    figures += [measure_waits(name, sizes) for name in DELAYS]
    return figures


def measure_bytes(layout: str, block_size: int, num_rows: int, sizes: Sizes) -> list[Figure]:
    """Of the messages that a plan and a result are sent in, over steps of rows that decode."""
    own = ControlPlane(decode_load(layout, block_size, num_rows, sizes.num_plans))
    own.decode(0)
    plans, results = [], []
    for _ in range(sizes.num_plans):
        result = own.result()
        own.answer(result)
        plan = pb.StepPlan.FromString(own.plan())
        own.deliver()
        plans.append(pb.AttachWorkerResponse(plan=plan).ByteSize())
        results.append(pb.AttachWorkerRequest(result=with_epoch(result)).ByteSize())
    target, name = (
        PLAN_TARGETS.get((layout, num_rows, block_size)),
        f"{num_rows} rows, {layout}, blocks of {block_size}",
    )
    median = statistics.median(plans)
    return [
        Figure(f"plan: {name}", "bytes", median, max(plans), compared=median, target=target),
        Figure(f"result: {name}", "bytes", statistics.median(results), max(results)),
    ]


def with_epoch(result_bytes: bytes) -> pb.StepResult:
    """As a worker sends it: an epoch is 64 random bits."""
    result = wire.result_from_proto(pb.StepResult.FromString(result_bytes))
    return wire.result_to_proto(replace(result, epoch=0x9E3779B97F4A7C15))


def decode_load(layout: str, block_size: int, num_rows: int, num_steps: int) -> Load:
    """Rows about 1,000 tokens into their texts, over blocks for as many steps."""
    lengths = np.random.default_rng(0).integers(768, 1280, num_rows).tolist()
    num_groups = len({*LAYOUTS[layout]}) if layout == "full" else 6
    num_blocks = 1 + num_groups * sum((length + num_steps + 64) // block_size + 2 for length in lengths)
    return Load(LAYOUTS[layout], tuple(lengths), num_blocks, 0, num_warm_up_steps=32, block_size=block_size)


def measure_round_trips(transport: str, sizes: Sizes) -> list[Figure]:
    """With a worker that answers at once, while the engine delivers tokens, and with one whose steps take time."""
    figures = []
    settings = {"max_model_len": MAX_MODEL_LEN}
    with (
        serving(transport, **settings) as (address, engine, frontend),
        peer("scripted_worker", address, **settings) as worker,
    ):
        for num_rows in sizes.num_rows:
            frontend.tell(num_streams=num_rows)
            for step_seconds in ROUND_TRIP_STEPS:
                told = {"num_steps": sizes.num_steps, "num_turns": sizes.num_turns, "step_seconds": step_seconds}
                worker.tell(num_rows=num_rows, **told)
                own = worker.hear()
                engine.tell()
                name = f"{transport}, {num_rows} rows, {ROUND_TRIP_STEPS[step_seconds]}"
                figures.append(round_trip(name, engine.hear()["turns"][1:], own))
                if not own["is_ahead"]:
                    print(f"{name}: the engine had one plan in flight", file=sys.stderr)
    return figures


def round_trip(name: str, turns: Sequence[dict[str, list[float]]], own: dict[str, list[float]]) -> Figure:
    """Of turns less the worker's own time; their first quarter finds the processor's caches full of the turn before."""
    own_seconds = {"steps": statistics.median(own["own"]), "pings": statistics.median(own["own_in_pings"])}
    settled = [
        {kind: [1e6 * (each - own_seconds[kind]) for each in times[len(times) // 4 :]] for kind, times in turn.items()}
        for turn in turns
    ]
    ratios = [statistics.median(turn["steps"]) / statistics.median(turn["pings"]) for turn in settled]
    every = {kind: [each for turn in settled for each in turn[kind]] for kind in own_seconds}
    return Figure(
        f"round trip: {name}",
        "us",
        statistics.median(every["steps"]),
        float(np.quantile(every["steps"], 0.99)),
        statistics.median(every["pings"]),
        statistics.median(ratios),
        ROUND_TRIP_TARGET,
    )


def measure_waits(name: str, sizes: Sizes) -> Figure:
    """A turn's share is the mean: a wait is lost whichever step it comes after."""
    delay_seconds, target = DELAYS[name]
    with (
        serving("TCP", max_model_len=SYNTHETIC_MODEL_LEN) as (address, _, frontend),
        delayed(address, delay_seconds) as worker_address,
    ):
        frontend.tell(num_streams=NUM_WAITING_ROWS)
        settings = {"max_model_len": SYNTHETIC_MODEL_LEN, "step_seconds": STEP_SECONDS}
        with peer("slow_worker", worker_address, **settings) as worker:
            worker.tell(num_rows=NUM_WAITING_ROWS, num_steps=sizes.num_steps, num_turns=sizes.num_turns)
            told = worker.hear()
    waits = 1e6 * np.array(told["waits"])
    share = float(np.median(waits.reshape(sizes.num_turns, -1).mean(axis=1))) / (1e6 * STEP_SECONDS)
    return Figure(
        f"wait after a step of 5 ms: {name}",
        "us",
        float(np.median(waits)),
        float(np.quantile(waits, 0.99)),
        1e6 * statistics.median(told["still"]),
        share,
        target,
    )


@contextmanager
def serving(transport: str, *, max_model_len: int) -> Iterator[tuple[str, Peer, Peer]]:
    """An engine, where it listens, and a frontend that is attached to it."""
    with tempfile.TemporaryDirectory(prefix="blockplane-wire-") as folder:
        address = f"unix:{folder}/engine.sock" if transport == "unix" else f"127.0.0.1:{free_port()}"
        settings = {"max_model_len": max_model_len}
        with peer("engine", address, **settings) as engine, peer("frontend", address, **settings) as frontend:
            yield address, engine, frontend


@contextmanager
def peer(kind: str, address: str, **settings: Any) -> Iterator[Peer]:
    process = Peer(kind, address, **settings)
    try:
        process.hear()
        yield process
    finally:
        process.close()


@contextmanager
def delayed(address: str, seconds: float) -> Iterator[str]:
    """The way to an address that takes so many seconds longer; none = the address."""
    if not seconds:
        yield address
        return
    proxy = FOLDER.parent / "tests" / "forwarding_proxy.py"
    command = [sys.executable, str(proxy), address, "--delay", str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def print_table(figures: Sequence[Figure]) -> None:
    """The median, the worst (of bytes the maximum, of times the 99th percentile), what stands beside, the target."""
    print(f"{'':48} {'unit':6} {'median':>9} {'worst':>9} {'beside':>9} {'value':>8} {'at most':>8}")
    for figure in figures:
        columns = f"{figure.name:48} {figure.unit:6} {figure.median:9.1f} {figure.other:9.1f}"
        columns += " " * 10 if figure.beside is None else f" {figure.beside:9.1f}"
        if figure.compared is not None and figure.target is not None:
            missed = "  MISSED" if figure.is_missed else ""
            columns += f" {figure.compared:8.3f} {figure.target:8.3f}{missed}"
        print(columns.rstrip())


if __name__ == "__main__":
    sys.exit(main())
