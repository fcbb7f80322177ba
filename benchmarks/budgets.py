"""Where each microsecond of a decode step goes, over the real gRPC API, and the least that each part could take.

    python benchmarks/budgets.py [--quick] [--json FILE] [--model gemma3-270m] [--readme]

Real processes with the real model, bfloat16, and 1, 16 and 64 streams that draw with top-k and top-p; where all are
greedy, their tokens are found within the forward. What happens at engine and worker is wall time of the engine's step
log, medians of steps; what the log does not tell apart is told by CPU clocks of the same code in this process
(`budget_clocks`). Writing to clients is the frontend's CPU time without what it reads and makes text of. On the
worker's path are apply, inputs, forward, sample and result, which add up to a step with what the worker waits; all else
runs beside them, a plan ahead.

A floor is the least that the part could take on this machine, measured in this run; the table says what it is. Prints
the table in Markdown; --readme puts it into benchmarks/README.md, too.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import grpc
import numpy as np
import torch
from bare_http2 import Reader
from bare_server import PATH
from budget_clocks import Machine, measure_clocks, measure_least, measure_machine, opened
from budget_parts import Bare, Budget, Used, Walls, floors_of, parts_of, table, walls_of
from cpu_outside_forward import outside_share, step_seconds
from end_to_end_systems import System, process_name, running_blockplane
from processes_measured import busy_seconds, times_between, times_of
from timed_engine import PING

from blockplane.data_plane.loading.checkpoint import DEMO_MODEL
from blockplane.v1 import inference_pb2 as pb

FOLDER = Path(__file__).parent
README, BEGIN, END = FOLDER / "README.md", "<!-- budgets -->", "<!-- /budgets -->"
GENERATE = "/blockplane.v1.Inference/Generate"
PROMPT_TOKENS = 64, 192
TOKEN_IDS = 1000, 200_000
MAX_TOKENS = 4096
DRAWN = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 1}
START_SECONDS = 60.0
NUM_PINGS = 400
MESSAGE_BYTES = 64
"""About what a client gets for a token, its text and its request's id."""
BARE_INTERVAL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Sizes:
    """Streams, and for how long they are measured once all decode."""

    num_streams: tuple[int, ...] = (1, 16, 64)
    seconds: float = 8.0
    bare_seconds: float = 3.0


QUICK = Sizes((1, 64), 2.0, 1.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the system told of one number of streams; `context`: tokens of a row at the end."""

    num_streams: int
    context: int
    walls: Walls
    used: Used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 64 streams, less of them: under 40 s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    flags = parser.parse_args()
    sizes = QUICK if flags.quick else Sizes()
    measured = asyncio.run(measure(flags.model, sizes))
    # The system is gone, and the machine free for clocks and floors.
    machine = measure_machine()
    budgets = budgets_of(flags.model, measured, machine, sizes)
    lines = [*table(budgets), "", in_words(machine)]
    print("\n".join(lines))
    if flags.readme:
        README.write_text(with_table(README.read_text(), lines))
    if flags.json:
        document = {
            "machine": asdict(machine),
            "budgets": [asdict(each) | {"waiting": each.waiting} for each in budgets],
        }
        flags.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def budgets_of(model: str, measured: Sequence[Measured], machine: Machine, sizes: Sizes) -> list[Budget]:
    weights, text = opened(model)
    budgets = []
    for each in measured:
        bare = Bare(pinged(each.num_streams), written(each.num_streams, sizes.bare_seconds))
        floors = floors_of(each.num_streams, each.context, measure_least(each.num_streams), bare, weights, machine)
        parts = parts_of(each.walls, each.used, measure_clocks(each.num_streams, text))
        budgets.append(Budget(each.num_streams, each.context, each.walls, each.used, parts, floors))
    return budgets


def in_words(machine: Machine) -> str:
    return (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()};"
        f" {machine.read_bandwidth / 1e9:.0f} GB/s read, {machine.operations / 1e9:,.0f} GFLOP/s in bfloat16 products."
    )


def with_table(text: str, lines: Sequence[str]) -> str:
    """A text with these lines between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{README} lacks {BEGIN} or {END}.")
    return "\n".join([before + BEGIN, *lines, END + after])


# -- the system --------------------------------------------------------------------------------------------------------


class Stream(Reader):
    """A call that its client can end."""

    def close(self) -> None:
        self._transport.abort()


async def measure(model: str, sizes: Sizes) -> list[Measured]:
    port = free_port()
    # The last address counts: ours are no clients that a system brings along.
    flags = [f"--address=127.0.0.1:{port}", f"--model={model}", "--dtype=bfloat16"]
    async with running_blockplane("blockplane", flags) as system:
        return [await measure_streams(system, port, num_streams, sizes.seconds) for num_streams in sizes.num_streams]


async def measure_streams(system: System, port: int, num_streams: int, seconds: float) -> Measured:
    streams = [await connected(Stream(GENERATE, request(number)), port) for number in range(num_streams)]
    try:
        await until_all_decode(streams)
        before, busy, own, began = (
            times_of(system.pid, process_name),
            busy_seconds(),
            time.process_time(),
            time.time_ns(),
        )
        await asyncio.sleep(seconds)
        times = times_between(before, times_of(system.pid, process_name))
        busy, own = busy_seconds() - busy, time.process_time() - own
        assert system.admin is not None
        (steps,) = await asyncio.to_thread(system.admin.get_steps)
    finally:
        for stream in streams:
            stream.close()
    num_steps = int(np.count_nonzero(steps.began >= began))
    cpu = {each.name: 1e6 * each.seconds / num_steps for each in times.values()}
    others = max(busy - own - sum(each.seconds for each in times.values()), 0.0) / seconds
    share = outside_share(times, step_seconds(steps, began))
    used = Used(cpu["engine"], cpu["frontend"], cpu["worker"], share, others)
    context = round(sum(PROMPT_TOKENS) / 2 + statistics.mean(stream.num_messages for stream in streams))
    return Measured(num_streams, context, walls_of(steps, num_streams, began), used)


def request(number: int) -> bytes:
    """A prompt of its own, and a text that goes on until its client leaves."""
    random = np.random.default_rng(number)
    ids = random.integers(*TOKEN_IDS, random.integers(*PROMPT_TOKENS)).tolist()
    params = pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **DRAWN)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling_params=params).SerializeToString()


async def connected(stream: Stream, port: int) -> Stream:
    """On a connection of its own."""
    await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", port)
    return stream


async def until_all_decode(streams: Sequence[Stream]) -> None:
    gives_up_at = time.monotonic() + START_SECONDS
    while min(stream.num_messages for stream in streams) < 3:
        await asyncio.sleep(0.2)
        if (end := next((stream.end for stream in streams if stream.end is not None), None)) is not None:
            raise SystemExit(f"a stream has ended: {end}")
        if time.monotonic() > gives_up_at:
            raise SystemExit(f"after {START_SECONDS} s not every stream has tokens.")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- floors that take a process of their own ---------------------------------------------------------------------------


class Child:
    """A script of this folder that answers each line with one."""

    def __init__(self, *command: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True, cwd=FOLDER)
        self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self) -> str:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self.hear()

    def hear(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self._process.args} ended; its own words are above.")
        return line


def pinged(num_rows: int) -> float:
    """Microseconds of a ping from a bare server to us and back, of as many bytes as a step's tokens."""
    pongs: SimpleQueue[bytes | None] = SimpleQueue()
    pongs.put(json.dumps({"num_pings": NUM_PINGS, "num_bytes": 4 * num_rows}).encode())
    with tempfile.TemporaryDirectory(prefix="blockplane-budgets-") as folder:
        address = f"unix:{folder}/ping.sock"
        with Child("wire_peers.py", "engine", address, '{"max_model_len": 4096}') as server:
            with grpc.insecure_channel(address) as channel:
                for message in channel.stream_stream(PING)(iter(pongs.get, None)):
                    pongs.put(message)
                pongs.put(None)
            (turn,) = json.loads(server.ask())["turns"]
    return 1e6 * statistics.median(turn["pings"][NUM_PINGS // 4 :])


def written(num_streams: int, seconds: float) -> float:
    """CPU microseconds in which a bare server writes a message to each of so many streams."""
    return asyncio.run(_written(num_streams, seconds))


async def _written(num_streams: int, seconds: float) -> float:
    port = free_port()
    with Child("bare_server.py", str(port), str(MESSAGE_BYTES), str(BARE_INTERVAL_SECONDS)) as server:
        streams = [await connected(Stream(PATH, b""), port) for _ in range(num_streams)]
        await until_all_decode(streams)
        before = server.ask().split()
        await asyncio.sleep(seconds)
        num_messages, cpu_seconds = (
            float(after) - float(first) for after, first in zip(server.ask().split(), before, strict=True)
        )
        for stream in streams:
            stream.close()
    return 1e6 * num_streams * cpu_seconds / num_messages


if __name__ == "__main__":
    sys.exit(main())
