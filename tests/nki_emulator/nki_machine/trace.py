"""What a kernel did, one instruction after another; knows neither why nor how long it takes.

The rules that only a whole run shows (capacity by live range) and the cost model read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# Runtime loops around something, outermost first: (loop's number, iteration).
Loops = tuple[tuple[int, int], ...]


class Operand(NamedTuple):
    """One tensor as one instruction saw it.

    Attributes:
        storage: which allocation, unique in a run. buffer: "hbm", "sbuf" or "psum".
        start_partition, num_partitions: 0 and 0 in HBM.
        shape: of the view, partitions first. dtype: numpy's name, such as "bfloat16".
        free_bytes: what the whole allocation takes of a partition. free_stride: elements between neighbours in a
            partition, of the innermost axis. offset: of the first element, a dynamic index left out.
    """

    storage: int
    buffer: str
    shape: tuple[int, ...]
    dtype: str
    start_partition: int
    num_partitions: int
    free_bytes: int
    free_stride: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a DMA moved: `num_elements` runs of `element_bytes` contiguous bytes each.

    Attributes:
        num_bytes: read from the source, skipped rows not counted. hbm_bytes: read from HBM plus written to
            it, so both of a copy within HBM.
        element_bytes: the shorter of the source's and the destination's contiguous runs.
        num_partitions: of the on-chip side, which says how many engines share the work; 128 from HBM to HBM.
        num_skipped: rows that were out of bounds and told to be skipped.
        dge: "hwdge", "swdge" or "none". is_transpose: whether it was a `dma_transpose`.
    """

    num_bytes: int
    hbm_bytes: int
    element_bytes: int
    num_elements: int
    num_partitions: int
    num_skipped: int
    dge: str
    is_transpose: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction that was executed.

    Attributes:
        core: of a logical core's one or two. opcode: its name in `nki.isa`, or "fori_loop" where an iteration begins.
        engine: "tensor", "vector", "scalar", "gpsimd", "sync" or "dma".
        loops: the runtime loops around it, outermost first: (loop's number, iteration).
        transfer: of DMA alone.
        details: what an engine's time depends on and no operand shows, such as a matmul's `perf_mode`.
    """

    core: int
    opcode: str
    engine: str
    writes: tuple[Operand, ...] = ()
    reads: tuple[Operand, ...] = ()
    loops: Loops = ()
    transfer: Transfer | None = None
    details: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A run's instructions, each core's in its own order."""

    instructions: list[Instruction] = field(default_factory=list)

    def of_core(self, core: int) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.core == core]
