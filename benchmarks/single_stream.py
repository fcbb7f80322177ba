"""One stream's decode speed over the real gRPC API, next to the floor that reading the weights sets on this machine.

    python benchmarks/single_stream.py [--quick] [--json FILE] [--model gemma3-270m] [--dtype bfloat16]

A decoded token reads every weight once, so its floor is the weights' bytes over the memory's read bandwidth, which is
measured beside it: machines are noisy, and only the ratio of two figures of one run says anything.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from blockplane.client.client import Client

PROMPT = list(range(1000, 1032))


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds and rates of one run; `floor_ratio` is the floor's time for a token over the measured one."""

    model: str
    dtype: str
    num_cores: int
    machine: str
    seconds_to_ready: float
    seconds_to_first_token: float
    tokens_per_second: float
    read_gigabytes_per_second: float
    weights_gigabytes: float
    floor_ratio: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and repetitions: under 40 s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    flags = parser.parse_args()
    num_tokens, num_repetitions = (48, 2) if flags.quick else (128, 5)
    started = time.perf_counter()
    with running_system(flags.model, flags.dtype) as (address, log):
        seconds_to_ready = time.perf_counter() - started
        with Client(address) as client:
            runs = [measure(client, num_tokens) for _ in range(num_repetitions)]
        bandwidth = read_bandwidth()
    weights = loaded_bytes(log)
    tokens_per_second = statistics.median(rate for _, rate in runs)
    result = Result(
        model=flags.model,
        dtype=flags.dtype,
        num_cores=len(os.sched_getaffinity(0)),
        machine=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        seconds_to_ready=seconds_to_ready,
        seconds_to_first_token=statistics.median(first for first, _ in runs),
        tokens_per_second=tokens_per_second,
        read_gigabytes_per_second=bandwidth / 1e9,
        weights_gigabytes=weights / 1e9,
        floor_ratio=weights / bandwidth * tokens_per_second,
    )
    for name, value in asdict(result).items():
        print(f"{name:28} {value:.3g}" if isinstance(value, float) else f"{name:28} {value}")
    if flags.json:
        flags.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return 0


@contextmanager
def running_system(model: str, dtype: str) -> Iterator[tuple[str, list[str]]]:
    """`blockplane up` on a free port; yields its address and the log lines until it was ready."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    settings = f"--address={address}", f"--model={model}", f"--dtype={dtype}"
    command = [sys.executable, "-m", "blockplane.client", "up", *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    log: list[str] = []
    try:
        for line in process.stdout:
            log.append(line)
            if line.startswith("blockplane ready"):
                break
        else:
            raise SystemExit("".join(log))
        yield address, log
    finally:
        process.terminate()
        process.wait()


def measure(client: Client, num_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and tokens per second from the first to the last."""
    started = time.perf_counter()
    times = [
        time.perf_counter()
        for delta in client.generate(PROMPT, max_tokens=num_tokens, temperature=0, ignore_eos=True)
        for _ in delta.token_ids
    ]
    return times[0] - started, (len(times) - 1) / (times[-1] - times[0])


def read_bandwidth() -> float:
    """Bytes per second at which all cores read memory that no cache holds; the best of five passes."""
    words = torch.ones(1 << 26, dtype=torch.int64)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        words.sum()
        seconds.append(time.perf_counter() - started)
    return words.nbytes / min(seconds)


def loaded_bytes(log: list[str]) -> int:
    """The bytes of weights that the worker says it loaded."""
    (line,) = [line for line in log if " loaded " in line]
    return int(line.split(" bytes")[0].rsplit(" ", 1)[1])


if __name__ == "__main__":
    sys.exit(main())
