"""The memories of a core: their sizes, their rules and one allocation's storage; knows no views and no instructions."""

import enum
import math
from dataclasses import dataclass, field

import numpy as np

from nki_machine.dtypes import poison_of
from nki_machine.errors import RuleError
from nki_machine.trace import Loops, Operand

NUM_PARTITIONS = 128
PSUM_BANK_BYTES = 2 * 1024
PSUM_NUM_BANKS = 8
# Per partition and generation (trainium2_arch.rst, trainium3_arch.rst).
SBUF_BYTES = {3: 224 * 1024, 4: 256 * 1024}
# No document says how much the compiler keeps; a public kernel of AWS's leaves this much free (mlp_cte_constants.py).
SBUF_RESERVED_BYTES = 16 * 1024 + 8 + 256

# What wrote an element of PSUM last: a matmul may only accumulate onto another matmul's.
NOTHING, MATMUL, OTHER = range(3)


class MemoryRegion(enum.Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def is_on_chip(self) -> bool:
        return self in (MemoryRegion.sbuf, MemoryRegion.psum)

    @property
    def kind(self) -> str:
        """As a trace's `Operand` calls it: "sbuf", "psum" or "hbm"."""
        return self.value if self.is_on_chip else "hbm"


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation.

    Attributes:
        id: unique in a run. shape: as allocated.
        array: flat, of the allocation's dtype. bytes: the same memory as uint8.
        free_bytes: what it takes of a partition.
        scope: the runtime loops around the allocation; outside of them it does not exist.
        is_argument: whether it is a caller's array. is_written: whether an instruction wrote it.
        writers: of PSUM, at each element's first byte: who wrote it last (NOTHING, MATMUL, OTHER).
    """

    id: int
    shape: tuple[int, ...]
    array: np.ndarray
    buffer: MemoryRegion
    name: str
    scope: Loops = ()
    is_argument: bool = False
    is_written: bool = False
    bytes: np.ndarray = field(init=False)
    free_bytes: int = field(init=False)
    writers: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.bytes = self.array.view(np.uint8)
        self.free_bytes = math.prod(self.shape[1:]) * self.array.itemsize
        if self.buffer is MemoryRegion.psum:
            self.writers = np.full(self.bytes.size, NOTHING, dtype=np.uint8)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype


def poisoned(shape: tuple[int, ...], dtype: np.dtype, poison: float) -> np.ndarray:
    """New memory, flat."""
    return np.full(math.prod(shape), poison_of(dtype, poison), dtype=dtype)


def check_allocation(shape: tuple[int, ...], dtype: np.dtype, buffer: MemoryRegion, generation: int) -> None:
    """What one allocation may be by itself; whether all fit together is known at the end of a run.

    Raises:
        RuleError: an empty or too wide shape, or more of a partition than there is.
    """
    if not shape or min(shape) < 1:
        raise RuleError(f"nl.ndarray: shape {shape} must have dimensions of at least 1.")
    if not buffer.is_on_chip:
        return
    if len(shape) < 2:
        raise RuleError(
            f"nl.ndarray: shape {shape} on chip needs a partition dimension and at least one free dimension."
        )
    if shape[0] > NUM_PARTITIONS:
        raise RuleError(f"nl.ndarray: {shape} takes {shape[0]} partitions, and {buffer.name} has {NUM_PARTITIONS}.")
    free_bytes = math.prod(shape[1:]) * dtype.itemsize
    capacity = capacity_bytes(buffer, generation)
    if free_bytes > capacity:
        raise RuleError(
            f"nl.ndarray: {shape} of {dtype} takes {free_bytes} bytes of a partition of {buffer.name}, "
            f"which has {capacity}."
        )


def capacity_bytes(buffer: MemoryRegion, generation: int) -> int:
    """Usable bytes of a partition."""
    if buffer is MemoryRegion.psum:
        return PSUM_NUM_BANKS * PSUM_BANK_BYTES
    return SBUF_BYTES[generation] - SBUF_RESERVED_BYTES


def check_start_partition(opcode: str, operand: Operand) -> None:
    """Where an engine may begin to read or write (trainium_inferentia2_arch.rst, "Data movement": start_partition).

    Raises:
        RuleError: `operand` begins elsewhere.
    """
    if operand.num_partitions > 64:
        allowed: tuple[int, ...] = (0,)
    elif operand.num_partitions > 32:
        allowed = (0, 64)
    else:
        allowed = (0, 32, 64, 96)
    if operand.start_partition not in allowed:
        raise RuleError(
            f"{opcode}: {operand.num_partitions} partitions of {operand.buffer} begin at partition "
            f"{operand.start_partition}, and an engine reaches that many from one of {allowed} only."
        )
