"""What a system that is offered twice what it can do does to those it serves, beside the same batch full and no more.

    python benchmarks/overload.py [--quick] [--check] [--json FILE]

Real processes: engine, frontend, and a worker with the synthetic model whose steps take a fixed time, whatever they
hold, so that capacity is known: one token for each row a step (`Sizes`). First as many clients as there are rows ask
one request after the other: the batch is full and nobody waits. Then requests come at random, at twice the rate at
which those before ended, whatever becomes of them: some are served, as many as may wait do, the rest is refused.
Clients live in a process of their own and measure how late they are themselves. A gap between tokens is from one
message of a stream to the next, as its client sees it; all tokens are held against the model's definition.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from overload_clients import MAX_TOKENS, MEAN_TOKENS, NUM_PROMPTS, Answer, num_tokens_of, prompt_of
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent / "tests"), str(FOLDER.parent / "tests" / "system")]

from processes import System, wait_for  # noqa: E402 - the tests' own
from synthetic_oracle import continue_greedily  # noqa: E402

SAMPLE_SECONDS = 0.25
MAX_REFUSAL_SECONDS = 0.1
MAX_GAP_RATIO = 1.5
MAX_GROWTH = 1.02
"""Of a process's memory, from the second quarter of the overload to the last."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is offered for how long, to how much."""

    num_rows: int = 32
    num_waiting: int = 16
    step_seconds: float = 0.05
    full_seconds: float = 30.0
    overload_seconds: float = 60.0
    """In which 1,000 streams are offered, with these sizes."""
    factor: float = 2.0
    """What is offered, in capacities."""


QUICK = Sizes(num_rows=16, num_waiting=8, step_seconds=0.025, full_seconds=6.0, overload_seconds=9.0)


@dataclass
class Watch:
    """What was seen of the processes while a load went on: resident bytes and CPU seconds by kind, and the most that
    ran and waited at a time.
    """

    resident: dict[str, list[int]] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)
    most_running: int = 0
    most_waiting: int = 0
    num_told: int = 0
    """How often the engine told its statistics."""


@dataclass
class Phase:
    """One load: its answers, how late the clients' loop was at times, and what was seen meanwhile."""

    answers: list[Answer]
    lags: list[float]
    watch: Watch

    def accepted(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == "OK"]

    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status != "OK"]

    def gaps(self) -> list[float]:
        return [float(gap) for answer in self.accepted() for gap in np.diff(answer.came)]

    def num_wrong(self) -> int:
        """Accepted streams that did not say what the model says."""
        return sum(
            answer.token_ids != text_of(answer.number % NUM_PROMPTS)[: num_tokens_of(answer.number)]
            for answer in self.accepted()
        )

    def growth(self, kind: str) -> float:
        """A process's memory in the last quarter, in that of the second: the first is still filling up."""
        samples = self.watch.resident[kind]
        quarter = len(samples) // 4
        return float(np.median(samples[-quarter:]) / np.median(samples[quarter : 2 * quarter]))


@cache
def text_of(number: int) -> list[int]:
    """What the model says to one of the prompts, by the longest answer that is asked for."""
    return continue_greedily(prompt_of(number), MAX_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value in its unit, and the most that it may be; None = it is only told."""

    name: str
    unit: str
    value: float
    limit: float | None = None

    @property
    def is_missed(self) -> bool:
        return self.limit is not None and not self.value <= self.limit


@contextmanager
def paced_system(sizes: Sizes) -> Iterator[System]:
    system = System(
        f"--num-seqs-buckets={sizes.num_rows}",
        f"--max-waiting-requests={sizes.num_waiting}",
        "--max-model-len=512",
        # So few that they are all in use, for what runs or as what is cached, long before the overload.
        "--num-blocks=2048",
        "--num-batched-tokens-buckets=128",
        "--kv-segment-size-buckets=128",
        "--structured-output=off",
        "--num-threads=1",
        "--log-level=warning",
    )
    try:
        for kind in ("engine", "frontend"):
            system.start(kind)
        system.start("paced worker", environment={"STEP_SECONDS": str(sizes.step_seconds)})
        system.wait_until_serving()
        yield system
    finally:
        system.close()


def run_phase(system: System, **load: float) -> Phase:
    """Have clients do as `load` says, which are the settings of overload_clients.py, and look on meanwhile."""
    command = [sys.executable, str(FOLDER / "overload_clients.py"), system.address, json.dumps(load)]
    with watched(system) as watch:
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    told: dict[str, Any] = json.loads(ran.stdout)
    watch.cores["clients"] = told["cpu_seconds"] / load["seconds"]
    return Phase([Answer(**answer) for answer in told["answers"]], told["lags"], watch)


@contextmanager
def watched(system: System) -> Iterator[Watch]:
    pids = {kind: system.processes(kind)[0].pid for kind in ("engine", "frontend", "paced worker")}
    watch, over = Watch({kind: [] for kind in pids}), threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_SECONDS):
            for kind, pid in pids.items():
                watch.resident[kind].append(resident_bytes(pid))
            statistics = system.statistics()
            watch.most_running = max(watch.most_running, statistics.num_running)
            watch.most_waiting = max(watch.most_waiting, statistics.num_waiting)
            watch.num_told += 1

    began, before = time.perf_counter(), {kind: cpu_seconds(pid) for kind, pid in pids.items()}
    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield watch
    finally:
        over.set()
        looking.join()
    seconds = time.perf_counter() - began
    watch.cores = {kind: (cpu_seconds(pid) - before[kind]) / seconds for kind, pid in pids.items()}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(sizes: Sizes) -> tuple[Phase, Phase]:
    """The full batch, and the overload. Nothing is left of either in the system, or this fails saying so."""
    with paced_system(sizes) as system:
        full = run_phase(system, num_callers=sizes.num_rows, seconds=sizes.full_seconds)
        wait_for(lambda: is_idle(system), "nothing is left of the full batch")
        rate = sizes.factor * capacity(full, sizes)
        overload = run_phase(system, rate=rate, seconds=sizes.overload_seconds)
        wait_for(lambda: is_idle(system), "nothing is left of the overload")
    return full, overload


def capacity(full: Phase, sizes: Sizes) -> float:
    """Requests a second, of the tokens that came while the batch was full."""
    came = [answer.offered + seconds for answer in full.answers for seconds in answer.came]
    begin, end = sizes.full_seconds / 4, sizes.full_seconds
    return sum(begin <= seconds < end for seconds in came) / (end - begin) / MEAN_TOKENS


def is_idle(system: System) -> bool:
    """Whether no request is left in engine and frontend, and every block is free."""
    told = system.statistics()
    with grpc.insecure_channel(system.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        num_streams = stub.GetServerInfo(vllm.GetServerInfoRequest()).active_requests
    is_empty = not (told.num_running or told.num_waiting or told.num_parked or told.num_waiting_tokens)
    return is_empty and told.kv_cache_usage == 0 and not num_streams


def figures_of(full: Phase, overload: Phase, sizes: Sizes) -> list[Figure]:
    refused, statuses = overload.refused(), Counter(answer.status for answer in overload.answers)
    everything = Counter(answer.status for answer in [*full.answers, *overload.answers])
    num_other = everything.total() - everything["OK"] - everything["RESOURCE_EXHAUSTED"]
    refusals = [answer.ended for answer in refused] or [0.0]
    usual, gaps = full.gaps(), overload.gaps()
    usual_p99, p99 = (float(np.quantile(each, 0.99)) for each in (usual, gaps))
    figures = [
        Figure("capacity, full batch", "requests/s", capacity(full, sizes)),
        Figure("offered", "streams", len(overload.answers)),
        Figure("accepted", "streams", statuses["OK"]),
        Figure("refused RESOURCE_EXHAUSTED", "streams", statuses["RESOURCE_EXHAUSTED"]),
        Figure("ended otherwise", "streams", num_other, 0),
        Figure("accepted and wrong", "streams", overload.num_wrong() + full.num_wrong(), 0),
        Figure("refused without a time to retry", "streams", sum(each.retry_seconds is None for each in refused), 0),
        Figure("most rows at a time", "requests", overload.watch.most_running, sizes.num_rows),
        Figure("most waiting at a time", "requests", overload.watch.most_waiting, sizes.num_waiting),
        *(Figure(f"refusal, {name}", "ms", 1e3 * float(np.quantile(refusals, q))) for name, q in QUANTILES.items()),
        Figure("refusal, slowest", "ms", 1e3 * max(refusals), 1e3 * MAX_REFUSAL_SECONDS),
        *(Figure(f"gap, full, {name}", "ms", 1e3 * float(np.quantile(usual, q))) for name, q in QUANTILES.items()),
        *(Figure(f"gap, overload, {name}", "ms", 1e3 * float(np.quantile(gaps, q))) for name, q in QUANTILES.items()),
        Figure("gap p99, overload in full", "", p99 / usual_p99, MAX_GAP_RATIO),
        Figure("clients' own lag, p99", "ms", 1e3 * float(np.quantile(overload.lags, 0.99))),
        Figure("clients' own lag, worst", "ms", 1e3 * max(overload.lags)),
    ]
    for kind in ("engine", "frontend"):
        samples = overload.watch.resident[kind]
        figures.append(Figure(f"memory of the {kind}, at the end", "MiB", samples[-1] / 2**20))
        figures.append(Figure(f"memory of the {kind}, last in second quarter", "", overload.growth(kind), MAX_GROWTH))
    return figures + [Figure(f"cores, {kind}", "", each) for kind, each in overload.watch.cores.items()]


QUANTILES = {"p50": 0.5, "p99": 0.99}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter: under 40 s")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    flags = parser.parse_args()
    sizes = QUICK if flags.quick else Sizes()
    figures = figures_of(*measure(sizes), sizes)
    for figure in figures:
        limit = "" if figure.limit is None else f"{figure.limit:9.2f}{'  MISSED' * figure.is_missed}"
        print(f"{figure.name:46} {figure.unit:10} {figure.value:9.2f} {limit}".rstrip())
    if flags.json:
        told = [{**asdict(figure), "is_missed": figure.is_missed} for figure in figures]
        flags.json.write_text(json.dumps({"sizes": asdict(sizes), "figures": told}, indent=2) + "\n")
    return int(flags.check and any(figure.is_missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
