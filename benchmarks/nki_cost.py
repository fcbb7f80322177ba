"""What the kernels for NeuronCores would take on Trn2 and Trn3: predictions from traces, never measurements.

    python benchmarks/nki_cost.py [--quick] [--check] [--json FILE]

Every kernel runs on the emulator of `tests/nki_emulator`, whose trace says what each engine and each DMA did;
`nki_cost_model` makes microseconds of it from figures that AWS published. A prediction is a bound from below: engines
and DMA overlap freely in it, and what nobody published is left out (see there). Nothing here was ever compared with a
device, compiled by neuronx-cc or run under AWS's simulator. Numbers are of one core and, but for the cases that say
otherwise, one KV head of eight query heads (prefill: one) of 128 dimensions in bfloat16. Useful bytes are the keys and
values that some query sees, the queries, the outputs, and what is written.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from nki_cost_model import TRN2, TRN3, Generation, predict
from torch import Tensor

TESTS = Path(__file__).parents[1] / "tests"
NC_VERSIONS = {TRN2.name: 3, TRN3.name: 4}
HEAD_DIM, ITEMSIZE, KV_COPIES = 128, 2, 2
"""Dimensions of a head, bytes of a number, and keys and values."""
RESOURCES = "HBM", "DMA", "DGE", "TensorE", "VectorE", "ScalarE", "GpSimd"


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a bound may be in microseconds, by generation, and the moved bytes over the useful ones."""

    bounds: dict[str, float]
    moved: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel on one shape.

    Attributes:
        call: runs it, through the kernels it is given. useful_bytes: what it must move. lnc: cores of its logical core.
    """

    name: str
    call: Callable[[Any], Any]
    useful_bytes: int
    lnc: int = 1
    is_quick: bool = True
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """The prediction of one case on one generation, microseconds of its slowest core; bytes are of all its cores.

    Attributes:
        busy: how long each resource is held. latency: of the longest chain of DMAs. barriers: of runtime loops.
        bound: what it takes at least. bound_by: what sets most of that. limit, moved_limit: None = no limit.
        software_runs: contiguous runs that GpSimd describes to DMA, in a time that nobody published and no figure has.
    """

    case: str
    generation: str
    bound: float
    bound_by: str
    busy: dict[str, float]
    latency: float
    barriers: float
    software_runs: int
    dma_bytes: int
    useful_bytes: int
    limit: float | None = None
    moved_limit: float | None = None

    @property
    def moved(self) -> float:
        """Bytes moved by DMA over the useful ones."""
        return self.dma_bytes / self.useful_bytes

    @property
    def is_missed(self) -> bool:
        is_slow = self.limit is not None and self.bound > self.limit
        return is_slow or (self.moved_limit is not None and self.moved > self.moved_limit)


class Tracing:
    """A runner of kernels for `NkiAttention` that keeps the trace of the last one."""

    def __init__(self, generation: Generation, lnc: int) -> None:
        # The emulator's folder is on the path only once nki_on_cpu has put it there.
        from nki_machine.run import run

        self._run, self._generation, self._lnc = run, NC_VERSIONS[generation.name], lnc
        self.trace: Any = None

    def __call__(self, kernel: Any, *arguments: Any) -> Any:
        result, self.trace = self._run(kernel, *arguments, lnc=self._lnc, generation=self._generation)
        return result


def decode_case(
    name: str, seq_lens: Sequence[int], table_len: int, num_new_tokens: int = 1, block_size: int = 32, **settings: Any
) -> Case:
    """Decode of rows with so many cached tokens, over a block table of `table_len` positions; 0 = a padding row."""
    num_seqs = len(seq_lens)
    num_kv_heads = settings.pop("num_kv_heads", 1)

    def call(attention: Any) -> None:
        k_cache, v_cache, table = caches(seq_lens, table_len, block_size, num_kv_heads)
        query = torch.randn(num_seqs, num_new_tokens, 8 * num_kv_heads, HEAD_DIM).bfloat16()
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        attention.decode_attention(query, k_cache, v_cache, table, lengths, scale=HEAD_DIM**-0.5)

    num_numbers = KV_COPIES * sum(seq_lens) * num_kv_heads * HEAD_DIM
    num_numbers += 2 * num_seqs * num_new_tokens * 8 * num_kv_heads * HEAD_DIM
    return Case(name, call, ITEMSIZE * num_numbers, **settings)


def prefill_case(
    name: str, num_tokens: int, prior_tokens: int, kv_segment_size: int, num_heads: int = 1, **settings: Any
) -> Case:
    """One request's segment over its prior tokens."""

    def call(attention: Any) -> None:
        k_cache, v_cache, table = caches([prior_tokens + num_tokens], prior_tokens + num_tokens, 32, 1)
        attention.segmented_attention(
            torch.randn(num_tokens, num_heads, HEAD_DIM).bfloat16(),
            k_cache,
            v_cache,
            table,
            torch.tensor([0, num_tokens], dtype=torch.int32),
            torch.tensor([prior_tokens], dtype=torch.int32),
            kv_segment_size=kv_segment_size,
            scale=HEAD_DIM**-0.5,
        )

    num_numbers = (KV_COPIES * (prior_tokens + num_tokens) + 2 * num_tokens * num_heads) * HEAD_DIM
    return Case(name, call, ITEMSIZE * num_numbers, **settings)


def write_case(name: str, num_tokens: int, **settings: Any) -> Case:
    """New keys and values of one KV head into slots that lie side by side."""

    def call(attention: Any) -> None:
        k_cache, v_cache, _ = caches([num_tokens], max(32, num_tokens), 32, 1)
        new = torch.randn(num_tokens, 1, HEAD_DIM).bfloat16()
        attention.write_kv(new, new, k_cache, v_cache, torch.arange(num_tokens))

    # Each is read and written.
    return Case(name, call, 2 * KV_COPIES * ITEMSIZE * num_tokens * HEAD_DIM, **settings)


def caches(
    seq_lens: Sequence[int], table_len: int, block_size: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Head-major caches full of numbers, and a table of blocks in no order; -1 behind what a row holds."""
    held = [math.ceil(seq_len / block_size) for seq_len in seq_lens]
    k_cache, v_cache = torch.randn(2, sum(held) + 1, num_kv_heads, block_size, HEAD_DIM).bfloat16()
    table = torch.full((len(seq_lens), math.ceil(table_len / block_size)), -1, dtype=torch.int32)
    blocks = torch.randperm(sum(held)).int() + 1
    for row, ids in enumerate(blocks.split(held)):
        table[row, : held[row]] = ids
    return k_cache, v_cache, table


CASES = (
    decode_case("decode 8 x 8000 of 8192", [8000] * 8, 8192, limits=Limits({TRN2.name: 95, TRN3.name: 75}, moved=1.05)),
    decode_case("  blocks of 16", [8000] * 8, 8192, block_size=16, is_quick=False),
    decode_case("  blocks of 128", [8000] * 8, 8192, block_size=128, is_quick=False),
    decode_case("  4 new tokens", [8000] * 8, 8192, 4),
    decode_case("  6 of 8 rows padding", [8000] * 2 + [0] * 6, 8192),
    decode_case("  two cores", [8000] * 8, 8192, lnc=2, is_quick=False),
    decode_case("decode 8 x 1000 of 1024", [1000] * 8, 1024, limits=Limits({TRN2.name: 20, TRN3.name: 20})),
    decode_case("  in a table of 8192", [1000] * 8, 8192),
    prefill_case("prefill 1024 over 4096", 1024, 4096, 4096, limits=Limits({TRN2.name: 75})),
    prefill_case("  by segments of 1024", 1024, 4096, 1024),
    prefill_case("  8 heads", 1024, 4096, 4096, 8, is_quick=False),
    write_case("write 8 tokens", 8),
    write_case("write 1024 tokens", 1024),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases: under 40 s")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    flags = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from nki_on_cpu import ensure_nki

    if not ensure_nki():
        raise SystemExit("AWS's nki is installed, which leaves no trace; run this where it is not.")
    figures = []
    for case in CASES:
        if case.is_quick or not flags.quick:
            figures += [figure(case, generation) for generation in (TRN2, TRN3)]
    print_table(figures)
    if flags.json:
        rows = [asdict(each) | {"moved": each.moved, "is_missed": each.is_missed} for each in figures]
        flags.json.write_text(json.dumps({"kind": "predicted", "figures": rows}, indent=1) + "\n")
    return int(flags.check and any(each.is_missed for each in figures))


def figure(case: Case, generation: Generation) -> Figure:
    """The case's prediction; the emulated `nki` must be importable."""
    from blockplane.kernels.nki.attention import NkiAttention

    torch.manual_seed(0)
    tracing = Tracing(generation, case.lnc)
    case.call(NkiAttention(tracing))
    cores = [predict(tracing.trace, core, generation) for core in range(case.lnc)]
    slowest = max(cores, key=lambda core: core.bound)
    limits = case.limits or Limits({})
    return Figure(
        case.name.strip(),
        generation.name,
        slowest.bound,
        slowest.bound_by,
        slowest.busy,
        slowest.latency,
        slowest.barriers,
        slowest.software_runs,
        sum(core.dma_bytes for core in cores),
        case.useful_bytes,
        limits.bounds.get(generation.name),
        limits.moved,
    )


def print_table(figures: Sequence[Figure]) -> None:
    """Predicted microseconds, and moved over useful bytes."""
    print("predicted microseconds; a bound from below, never measured")
    heads = " ".join(f"{name:>8}" for name in (*RESOURCES, "latency", "barriers"))
    print(f"{'':26} {'':4} {'bound':>8} {'by':8} {heads} {'sw runs':>8} {'MB':>7} {'/useful':>8}  limit")
    for each in figures:
        parts = [each.busy[name] for name in RESOURCES] + [each.latency, each.barriers]
        columns = f"{each.case:26} {each.generation:4} {each.bound:8.1f} {each.bound_by:8} "
        columns += " ".join(f"{part:8.1f}" for part in parts)
        columns += f" {each.software_runs:8} {each.dma_bytes / 1e6:7.2f} {each.moved:8.3f}"
        if each.limit is not None:
            columns += f" {each.limit:6.0f}{'  MISSED' if each.is_missed else ''}"
        print(columns)


if __name__ == "__main__":
    sys.exit(main())
