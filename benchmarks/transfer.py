"""How fast KV blocks move from one worker process to another over loopback, beside a plain copy of as many bytes.

    python benchmarks/transfer.py [--quick] [--json FILE]

Both processes have all that a worker has of it, and no steps: one serves blocks of a model's shape, the other fetches
them into blocks of its own. The copy is numpy's, from memory to memory within one process, so that a ratio of 1 would
mean that the way between the processes costs nothing. TLS is that of a certificate made for the run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from blockplane.data_plane.transfers.blocks import MovableBlocks
from blockplane.data_plane.transfers.transfers import Transfers
from blockplane.protos.columns import column_to_bytes
from blockplane.protos.config import Config, add_settings, as_flags, load_config
from blockplane.v1 import engine_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from certificates import Authority

EPOCH = 1
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV, in bfloat16 and blocks of 32 tokens."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def blocks(self, num_bytes: int) -> MovableBlocks:
        """So many bytes of blocks, and the null block; each cache has contents of its own."""
        shape = 32, self.num_kv_heads, self.head_dim
        block_bytes = 2 * self.num_layers * 2 * int(np.prod(shape))
        num_blocks = 1 + num_bytes // block_bytes
        caches = (torch.full((num_blocks, *shape), index, dtype=torch.bfloat16) for index in range(2 * self.num_layers))
        return MovableBlocks(EPOCH, tuple(caches))


SHAPES = (Shape("Gemma 3 270M", 18, 1, 256), Shape("Llama 3.1 8B", 32, 8, 128))


@dataclass(frozen=True, slots=True)
class Figure:
    """Gigabytes a second: of the transfer, the median of its rounds, and of a copy between them."""

    shape: str
    way: str
    block_bytes: int
    num_bytes: int
    transfer: float
    copy: float

    @property
    def ratio(self) -> float:
        return self.transfer / self.copy


def serve(config: Config, shape: str, num_bytes: int) -> None:
    """What the other process does: offer blocks until its input ends."""
    transfers = Transfers(config)
    blocks = next(each for each in SHAPES if each.name == shape).blocks(num_bytes)
    transfers.begin(transfers.attach(), blocks)
    print(transfers.address, flush=True)
    sys.stdin.read()


@contextmanager
def serving(config: Config, shape: Shape, num_bytes: int) -> Iterator[str]:
    """Another process with so many bytes of blocks; gives its address."""
    command = [sys.executable, __file__, "--serve", shape.name, str(num_bytes), *as_flags(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def measure(shape: Shape, way: str, config: Config, num_bytes: int, num_rounds: int) -> Figure:
    transfers, blocks = Transfers(config), shape.blocks(num_bytes)
    fetches, answers = transfers.attach(), SimpleQueue[pb.AttachWorkerRequest]()
    fetches.begin(blocks)
    block_ids = column_to_bytes(np.arange(1, blocks.num_blocks, dtype=np.int32))
    moved = (blocks.num_blocks - 1) * blocks.block_bytes
    pair = np.zeros(moved, np.uint8), np.ones(moved, np.uint8)
    of_transfer, of_copy = [], []
    serving_config = load_config({**asdict(config), "transfer_address": "127.0.0.1:0"}, {})
    with serving(serving_config, shape, num_bytes) as address:
        fetch = pb.FetchBlocks(
            transport="grpc",
            address=address,
            source_epoch=EPOCH,
            source_block_ids=block_ids,
            block_ids=block_ids,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        # The first one dials, and touches the memory.
        for _ in range(1 + num_rounds):
            began = time.perf_counter()
            fetches.take(fetch, answers.put)
            failure = answers.get(timeout=TIMEOUT_SECONDS).fetched.failure
            of_transfer.append(moved / (time.perf_counter() - began) / 1e9)
            assert not failure, failure
            began = time.perf_counter()
            np.copyto(*pair)
            of_copy.append(moved / (time.perf_counter() - began) / 1e9)
    fetches.end()
    transfers.close()
    rates = (float(np.median(each[1:])) for each in (of_transfer, of_copy))
    return Figure(shape.name, way, blocks.block_bytes, moved, *rates)


def measure_all(num_bytes: int, num_rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder), "benchmark")
        certificate, key = authority.issue("worker")
        ways = {
            "plaintext": Config(),
            "TLS": Config(tls_certificate=certificate, tls_key=key, tls_ca=str(authority.ca)),
        }
        return [measure(shape, way, config, num_bytes, num_rounds) for shape in SHAPES for way, config in ways.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything, for a look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, too")
    parser.add_argument("--serve", nargs=2, metavar=("SHAPE", "BYTES"), help=argparse.SUPPRESS)
    add_settings(parser)
    flags = parser.parse_args()
    if flags.serve:
        serve(load_config(vars(flags), {}), flags.serve[0], int(flags.serve[1]))
        return 0
    figures = measure_all(64 << 20 if flags.quick else 256 << 20, 3 if flags.quick else 9)
    print(f"{'blocks of':14}{'over':>11}{'KiB':>8}{'GB/s':>8}{'copy':>8}{'ratio':>8}")
    for each in figures:
        kib = each.block_bytes / 1024
        print(f"{each.shape:14}{each.way:>11}{kib:8.0f}{each.transfer:8.2f}{each.copy:8.2f}{each.ratio:8.3f}")
    if flags.json:
        told = [{**asdict(figure), "ratio": figure.ratio} for figure in figures]
        flags.json.write_text(json.dumps({"figures": told}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
