"""Predicts how long a traced kernel would take on a NeuronCore, from published figures; knows no kernel and no shape.

    prediction = predict(trace, core=0, generation=TRN2)

A prediction is a bound from below, never a measurement: no figure here was ever compared with a device. Every resource
(HBM, the DMA engines, the descriptor engine, TensorE, VectorE, ScalarE, GpSimd) is held for so long; they overlap
freely, so a stretch of instructions takes at least as long as its busiest one. A runtime loop fences its iterations
from each other and from what stands around it, so these stretches add up, and each iteration adds the barrier. Nothing
is shorter than its longest chain of DMAs of which each reads what the one before wrote. The trace holds a loop's body
once for each iteration that ran, so nothing is extrapolated.

Left out, since nobody published it: what it costs GpSimd to describe a gather in software, run by run (how many runs
is told), waits for semaphores, the compiler's order of instructions, DMA queues, and the bus that VectorE and GpSimd
share.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from nki_cycles import FP8_DTYPES, HALF_DTYPES, cycles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nki_machine.trace import Instruction, Trace, Transfer


@dataclass(frozen=True, slots=True)
class Generation:
    """One NeuronCore's published figures.

    Attributes:
        hbm_gigabytes: HBM bandwidth, GB/s, an eighth of the device's. dma_gigabytes: of one DMA engine, GB/s.
        megahertz: of TensorE, VectorE, ScalarE and GpSimd. fast_dtypes: what VectorE's performance modes take.
        scalar_is_fast: whether ScalarE has one too.
    """

    name: str
    hbm_gigabytes: float
    dma_gigabytes: float
    megahertz: dict[str, float]
    fast_dtypes: frozenset[str]
    scalar_is_fast: bool


TRN2 = Generation(
    "Trn2",
    # 2.9 TB/s of about-neuron/arch/neuron-hardware/trainium2.rst; the NKI guide says 3.
    hbm_gigabytes=2900 / 8,
    # nki-dma-bandwidth-guide.rst.
    dma_gigabytes=23,
    # "Compute Engine Specifications" and "Vector Engine Performance Mode" of trainium2_arch.rst.
    megahertz={"tensor": 2400, "vector": 960, "scalar": 1200, "gpsimd": 1200},
    fast_dtypes=HALF_DTYPES,
    scalar_is_fast=False,
)
TRN3 = Generation(
    "Trn3",
    # 4.7 TB/s of trainium3_arch.rst; about-neuron/arch/neuron-hardware/trainium3.rst says 4.9.
    hbm_gigabytes=4700 / 8,
    dma_gigabytes=33,
    # "Compute Engine Specifications" and "Performance mode" of trainium3_arch.rst.
    megahertz={"tensor": 2400, "vector": 1200, "scalar": 1200, "gpsimd": 1200},
    fast_dtypes=HALF_DTYPES | FP8_DTYPES,
    scalar_is_fast=True,
)

NUM_DMA_ENGINES, PARTITIONS_PER_DMA_ENGINE = 16, 8
"""nki-dma-overview.rst: each of a core's 16 engines moves the data of 8 partitions."""
RUN_OVERHEAD_BYTES = 22
"""What a contiguous run costs beside its bytes, fitted to one figure of nki-dma-overview.rst: 8 runs of 256 bytes take
an engine 97 ns where 23 B/ns would take 89. Our fit, not AWS's statement."""
TRANSPOSE_EFFICIENCY = {True: 0.9, False: 0.5}
"""By whether it reads HBM, the best share of its pace that a transposing DMA reaches: trainium2_arch.rst."""
DMA_LATENCY_MICROSECONDS = 1.3
"""From a DMA's start to its semaphore: nki-dma-bandwidth-guide.rst."""
DESCRIPTOR_MICROSECONDS, NUM_DESCRIPTOR_ENGINES = 0.6, 2
"""For each DMA that the hardware describes, and how many do so: trainium2_arch.rst; assumed to hold for Trn3."""
LOOP_BARRIER_MICROSECONDS = 9.0
"""For each iteration of a runtime loop: design notes of nki-library's attention kernels (SDK 2.32)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one core; microseconds and bytes.

    Attributes:
        dma_bytes: moved by DMA. hbm_bytes: of these, out of or into HBM. num_skipped: rows that DMA left out.
        software_runs: contiguous runs that GpSimd describes; what that takes is in no other figure here.
        busy: how long each resource is held over the whole run.
        latency: of the longest chain of DMAs. barriers: of all iterations of runtime loops.
        bound: what the run takes at least. bound_by: the resource, or "latency" or "barriers", that sets most of it.
    """

    generation: str
    core: int
    dma_bytes: int
    hbm_bytes: int
    num_skipped: int
    software_runs: int
    busy: dict[str, float]
    latency: float
    barriers: float
    bound: float
    bound_by: str


def predict(trace: Trace, core: int, generation: Generation) -> Prediction:
    """The prediction for one core of the trace. Raises ValueError where that core ran nothing."""
    instructions = trace.of_core(core)
    if not instructions:
        raise ValueError(f"the trace holds no instruction of core {core}; give one that ran")
    stretches = [_busy(list(stretch), generation) for _, stretch in groupby(instructions, lambda each: each.loops)]
    busy = {name: sum(stretch[name] for stretch in stretches) for name in stretches[0]}
    bounding: dict[str, float] = dict.fromkeys(busy, 0.0)
    for stretch in stretches:
        busiest = max(stretch, key=lambda name: stretch[name])
        bounding[busiest] += stretch[busiest]
    latency = DMA_LATENCY_MICROSECONDS * _longest_chain(instructions)
    barriers = LOOP_BARRIER_MICROSECONDS * sum(each.opcode == "fori_loop" for each in instructions)
    throughput = sum(bounding.values())
    shares = ({"latency": latency} if latency > throughput else bounding) | {"barriers": barriers}
    transfers = _transfers(instructions)
    return Prediction(
        generation.name,
        core,
        dma_bytes=sum(transfer.num_bytes for transfer in transfers),
        hbm_bytes=sum(transfer.hbm_bytes for transfer in transfers),
        num_skipped=sum(transfer.num_skipped for transfer in transfers),
        software_runs=sum(transfer.num_elements for transfer in transfers if transfer.dge == "swdge"),
        busy=busy,
        latency=latency,
        barriers=barriers,
        bound=max(throughput, latency) + barriers,
        bound_by=max(shares, key=lambda name: shares[name]),
    )


def _transfers(instructions: Sequence[Instruction]) -> list[Transfer]:
    return [instruction.transfer for instruction in instructions if instruction.transfer is not None]


def _busy(instructions: Sequence[Instruction], generation: Generation) -> dict[str, float]:
    """Microseconds that each resource is held by a stretch of instructions."""
    transfers = _transfers(instructions)
    num_described = sum(transfer.dge == "hwdge" for transfer in transfers)
    busy = {
        "HBM": sum(transfer.hbm_bytes for transfer in transfers) / generation.hbm_gigabytes / 1e3,
        "DMA": max(_engine_times(instructions, generation)),
        "DGE": num_described * DESCRIPTOR_MICROSECONDS / NUM_DESCRIPTOR_ENGINES,
    }
    for engine, name in (("tensor", "TensorE"), ("vector", "VectorE"), ("scalar", "ScalarE"), ("gpsimd", "GpSimd")):
        num_cycles = sum(
            cycles(instruction, generation.fast_dtypes, generation.scalar_is_fast)
            for instruction in instructions
            if instruction.engine == engine
        )
        busy[name] = num_cycles / generation.megahertz[engine]
    return busy


def _engine_times(instructions: Sequence[Instruction], generation: Generation) -> list[float]:
    """Microseconds of each DMA engine; a transfer is spread evenly over those of its partitions."""
    times = [0.0] * NUM_DMA_ENGINES
    for instruction in instructions:
        transfer = instruction.transfer
        if transfer is None or not transfer.num_bytes:
            continue
        pace = generation.dma_gigabytes * 1e3 * _efficiency(transfer)
        engines = _engines(instruction, transfer)
        for engine in engines:
            times[engine] += transfer.num_bytes / len(engines) / pace
    return times


def _efficiency(transfer: Transfer) -> float:
    """The share of an engine's pace that runs of this length reach."""
    if transfer.is_transpose:
        return TRANSPOSE_EFFICIENCY[transfer.hbm_bytes > 0]
    return transfer.element_bytes / (transfer.element_bytes + RUN_OVERHEAD_BYTES)


def _engines(instruction: Instruction, transfer: Transfer) -> range:
    """Those of the on-chip side's partitions; all between two places in HBM, and where DMA transposes, which takes all
    of them together (trainium2_arch.rst)."""
    if transfer.is_transpose or transfer.num_partitions >= NUM_DMA_ENGINES * PARTITIONS_PER_DMA_ENGINE:
        return range(NUM_DMA_ENGINES)
    on_chip = [operand for operand in (*instruction.writes, *instruction.reads) if operand.buffer != "hbm"]
    first = on_chip[0].start_partition if on_chip else 0
    last = first + transfer.num_partitions - 1
    return range(first // PARTITIONS_PER_DMA_ENGINE, last // PARTITIONS_PER_DMA_ENGINE + 1)


def _longest_chain(instructions: Sequence[Instruction]) -> int:
    """DMAs of the longest chain in which each needs what the one before wrote, through whatever lies between.

    Allocations are followed, not their elements; that a buffer must be free before it is filled again is left out.
    """
    depths: dict[int, int] = {}
    for instruction in instructions:
        depth = max((depths.get(operand.storage, 0) for operand in instruction.reads), default=0)
        depth += instruction.transfer is not None
        for operand in instruction.writes:
            depths[operand.storage] = max(depth, depths.get(operand.storage, 0))
    return max(depths.values(), default=0)
