"""How many rows one engine core drives, and how many tokens a second one frontend core delivers.

    python benchmarks/capacity.py [--quick] [--check] [--only PROCESS] [--json FILE]

Real engine and frontend processes, on gRPC over the loopback. All workers are one process that computes nothing
(benchmarks/capacity_peers.py): each answers a plan 20 ms after it came or after the answer before, whichever is later,
so that a group does 50 steps a second as long as the next plan is always there in time.

`engine`: 16 groups whose rows all decode, more and more of them, and tokens that nobody reads: what the engine does for
a step without delivery. `frontend`: streams that each get a token every 20 ms, through one frontend to clients that
only read (benchmarks/bare_http2.py), one connection each; beside it what a step costs the engine that delivers to it.

What is told is CPU seconds of the process, all its threads, over what it did meanwhile: where processes outnumber cores
the steps a second say more of the machine, but this less. *Rows a core* and *tokens a core* are what one whole core
would do at that cost.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wire import free_port

FOLDER = Path(__file__).parent
STEP_SECONDS, NUM_GROUPS = 0.02, 16
GOAL_ROWS = 4096
"""That one engine core is to drive in 16 groups."""
SATURATED_SHARE = 0.8
"""Of the steps that the workers could do: an engine that is behind that has no core more to give."""
MAX_MODEL_LEN, MAX_ROWS_PER_GROUP, NUM_BLOCKS = 8192, 640, 80_000
SETTINGS = {
    "max_model_len": MAX_MODEL_LEN,
    "num_seqs_buckets": str(MAX_ROWS_PER_GROUP),
    "num_batched_tokens_buckets": "2048",
    "max_waiting_requests": 1 << 20,
    "max_waiting_tokens": 1 << 40,
    "worker_timeout_seconds": 60,
    "step_timeout_seconds": 120,
}
NUM_FRONTEND_GROUPS = 2
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    num_rows: tuple[int, ...] = (1024, 2048, 4096, 5120, 6144, 7168)
    num_streams: tuple[int, ...] = (32, 64, 128, 256)
    settle_seconds: float = 2.0
    seconds: float = 8.0


QUICK = Sizes(num_rows=(1024, 4096), num_streams=(64,), settle_seconds=1.0, seconds=4.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """One load; times are microseconds of CPU.

    Attributes:
        process: whose CPU it is; `unit`: what it did, and a core does so many of them.
        size: rows or streams.
        steps_per_second: of each group, of 50; late_share: of the steps, those whose plan came late.
        behind_milliseconds: the most by which the workers' process was late itself.
        cores: what the process had of the CPU.
        per_step: of the engine: with nobody to deliver to, or to the one frontend whose figure it is.
        per_unit: for a row's step, or for a stream's token.
        units_per_core: rows at 50 steps a second, or tokens a second.
        tokens_per_message: of the frontend.
    """

    process: str
    size: int
    steps_per_second: float
    late_share: float
    behind_milliseconds: float
    cores: float
    per_step: float
    per_unit: float
    units_per_core: float
    tokens_per_message: float | None = None


class Peer:
    """A process that answers a line of JSON with another."""

    def __init__(self, kind: str, address: str, settings: dict[str, Any]) -> None:
        command = [sys.executable, str(FOLDER / "capacity_peers.py"), kind, address, json.dumps(settings)]
        self._kind = kind
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **told: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(told), file=self._process.stdin, flush=True)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of the {self._kind} ended; what it said stands above.")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def peer(kind: str, address: str, **settings: Any) -> Iterator[Peer]:
    process = Peer(kind, address, settings)
    try:
        process.hear()
        yield process
    finally:
        process.close()


@contextmanager
def serving(num_groups: int) -> Iterator[tuple[str, Peer, Peer]]:
    """An engine with its workers, and where it listens."""
    with tempfile.TemporaryDirectory(prefix="blockplane-capacity-") as folder:
        address = f"unix:{folder}/engine.sock"
        workers = {"num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN, "step_seconds": STEP_SECONDS}
        with (
            peer("engine", address, **SETTINGS) as engine,
            peer("workers", address, num_groups=num_groups, **workers) as worker,
        ):
            wait_until(engine, num_groups=num_groups)
            yield address, engine, worker


def wait_until(engine: Peer, **expected: int) -> None:
    """Ask the engine until it says so."""
    gives_up_at = time.monotonic() + START_SECONDS
    while not expected.items() <= (told := engine.ask()).items():
        if time.monotonic() > gives_up_at:
            raise SystemExit(f"after {START_SECONDS} s the engine has {told}, not {expected}.")
        time.sleep(0.1)


def measure(sizes: Sizes, processes: Sequence[str]) -> list[Figure]:
    figures = []
    for process in processes:
        for each in MEASUREMENTS[process](sizes):
            print_row(each)
            figures.append(each)
    return figures


def measure_engine(sizes: Sizes) -> Iterator[Figure]:
    with serving(NUM_GROUPS) as (_, engine, workers):
        for num_rows in sizes.num_rows:
            engine.ask(num_streams=num_rows)
            wait_until(engine, num_running=num_rows, num_waiting=0)
            time.sleep(sizes.settle_seconds)
            before = engine.ask(), workers.ask()
            time.sleep(sizes.seconds)
            own, work = (differences(*pair) for pair in zip(before, (engine.ask(), workers.ask()), strict=True))
            per_step = own["cpu_seconds"] / work["num_steps"]
            per_row = own["cpu_seconds"] / work["num_tokens"]
            told = figure("engine", num_rows, NUM_GROUPS, own, work, per_step, per_row, 1 / per_row * STEP_SECONDS)
            yield told
            if num_rows >= GOAL_ROWS and told.steps_per_second < SATURATED_SHARE / STEP_SECONDS:
                # More rows would only wait for each other.
                return


def measure_frontend(sizes: Sizes) -> Iterator[Figure]:
    with (
        serving(NUM_FRONTEND_GROUPS) as (engine_address, engine, workers),
        frontend(engine_address) as (address, pid),
        peer("readers", address, max_tokens=MAX_MODEL_LEN) as readers,
    ):
        for num_streams in sizes.num_streams:
            readers.ask(num_streams=num_streams)
            wait_until(engine, num_running=num_streams, num_waiting=0)
            time.sleep(sizes.settle_seconds)
            before = process_report(pid), workers.ask(), readers.ask(), engine.ask()
            time.sleep(sizes.seconds)
            after = process_report(pid), workers.ask(), readers.ask(), engine.ask()
            own, work, read, engines = (differences(*pair) for pair in zip(before, after, strict=True))
            per_step = engines["cpu_seconds"] / work["num_steps"]
            per_token = own["cpu_seconds"] / work["num_tokens"]
            per_message = work["num_tokens"] / read["num_messages"]
            groups = NUM_FRONTEND_GROUPS
            yield figure("frontend", num_streams, groups, own, work, per_step, per_token, 1 / per_token, per_message)


def figure(
    process: str,
    size: int,
    num_groups: int,
    own: dict[str, Any],
    work: dict[str, Any],
    per_step: float,
    per_unit: float,
    units_per_core: float,
    tokens_per_message: float | None = None,
) -> Figure:
    return Figure(
        process,
        size,
        work["num_steps"] / num_groups / work["seconds"],
        work["num_late"] / work["num_steps"],
        1e3 * work["behind_seconds"],
        own["cpu_seconds"] / own["seconds"],
        1e6 * per_step,
        1e6 * per_unit,
        units_per_core,
        tokens_per_message,
    )


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted meanwhile; what is no count stays as it is."""
    return {name: after[name] - (0 if name == "behind_seconds" else before[name]) for name in after}


def process_report(pid: int) -> dict[str, float]:
    """CPU seconds of a process, as Linux tells them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return {"cpu_seconds": ticks / os.sysconf("SC_CLK_TCK"), "seconds": time.perf_counter()}


@contextmanager
def frontend(engine_address: str) -> Iterator[tuple[str, int]]:
    """A frontend that serves, its address and its process."""
    from blockplane.client.client import Client

    address = f"127.0.0.1:{free_port()}"
    flags = ["--address", address, "--engine-address", engine_address, "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-m", "blockplane.control_plane.frontend", *flags])
    try:
        with Client(address) as client:
            client.wait_until_serving(timeout=START_SECONDS)
        yield address, process.pid
    finally:
        process.kill()
        process.wait()


def print_head() -> None:
    head = f"{'':9} {'rows':>6} {'steps/s':>8} {'late':>6} {'behind':>9} {'cores':>6}"
    print(f"{head} {'us a step':>10} {'us a token':>11} {'a core':>8} {'tokens/message':>15}")


def print_row(each: Figure) -> None:
    columns = f"{each.process:9} {each.size:6} {each.steps_per_second:8.1f} {each.late_share:6.1%}"
    columns += f" {each.behind_milliseconds:6.1f} ms {each.cores:6.2f}"
    columns += f" {each.per_step:10.0f} {each.per_unit:11.2f} {each.units_per_core:8.0f}"
    columns += f" {each.tokens_per_message:15.2f}" if each.tokens_per_message is not None else ""
    print(columns, flush=True)


MEASUREMENTS = {"engine": measure_engine, "frontend": measure_frontend}


def misses(figures: Sequence[Figure]) -> list[str]:
    """What is not as it should be."""
    return [
        f"{each.size} rows take {each.cores:.2f} cores of the engine at {each.steps_per_second:.1f} steps/s of 50;"
        f" {each.units_per_core:.0f} rows a core are less than {GOAL_ROWS}"
        for each in figures
        if each.process == "engine" and each.size == GOAL_ROWS and each.units_per_core < GOAL_ROWS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer loads: under 40 s")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if a core does not drive {GOAL_ROWS} rows")
    parser.add_argument("--only", choices=list(MEASUREMENTS), help="measure that process alone")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    flags = parser.parse_args()
    print_head()
    figures = measure(QUICK if flags.quick else Sizes(), [flags.only] if flags.only else list(MEASUREMENTS))
    for miss in misses(figures):
        print("MISSED:", miss)
    if flags.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        document = {"machine": machine, "figures": list(map(asdict, figures)), "misses": misses(figures)}
        flags.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(flags.check and bool(misses(figures)))


if __name__ == "__main__":
    sys.exit(main())
