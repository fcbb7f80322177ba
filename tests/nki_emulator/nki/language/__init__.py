"""`nki.language` for CPUs: dtypes, buffers, tensors, loops, names of operators; knows no instruction's arithmetic.

The functions of tiles (`nl.add(a, b)`, `nl.softmax`, ...) are not here: kernels call instructions of nki.isa.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nki_machine import cores, memory
from nki_machine import tensor as _tensor
from nki_machine.arguments import NKIObject as NKIObject
from nki_machine.dtypes import DTYPES
from nki_machine.indexing import DynamicSlice
from nki_machine.loops import fori_loop as fori_loop
from nki_machine.loops import while_loop as while_loop
from nki_machine.memory import MemoryRegion
from nki_machine.ops import OPS, Op
from nki_machine.tensor import NkiTensor

bool_ = DTYPES["bool"]
int8, int16, int32 = DTYPES["int8"], DTYPES["int16"], DTYPES["int32"]
uint8, uint16, uint32 = DTYPES["uint8"], DTYPES["uint16"], DTYPES["uint32"]
float16, float32, bfloat16 = DTYPES["float16"], DTYPES["float32"], DTYPES["bfloat16"]
float8_e4m3, float8_e4m3fn, float8_e5m2 = DTYPES["float8_e4m3"], DTYPES["float8_e4m3fn"], DTYPES["float8_e5m2"]

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm

ds = DynamicSlice

# Fully unrolled, hence Python's own (deprecated names).
affine_range = sequential_range = static_range = range


class _TileSize:
    """Sizes of the target, asked while a kernel runs or by the environment's target."""

    pmax = memory.NUM_PARTITIONS
    psum_bank_fmax = memory.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = memory.PSUM_BANK_BYTES
    psum_num_banks = memory.PSUM_NUM_BANKS
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512

    @property
    def sbuf_fmax_bytes(self) -> int:
        generation = cores.current().generation if cores.is_running() else cores.target_generation()
        return memory.capacity_bytes(sbuf, generation)

    @property
    def sbuf_fmax(self) -> int:
        return self.sbuf_fmax_bytes // 4


tile_size = _TileSize()


def ndarray(
    shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "", address: None = None
) -> NkiTensor:
    """New memory, not initialised.

    Raises:
        RuleError: a shape or dtype that the memory cannot hold.
        NotImplementedError: an `address`, since this emulator places nothing.
    """
    if address is not None:
        raise NotImplementedError("nl.ndarray: an address; this emulator places nothing, so leave it out.")
    return _tensor.ndarray(shape, dtype, buffer, name)


def is_hbm(buffer: MemoryRegion) -> bool:
    return not buffer.is_on_chip


def is_on_chip(buffer: MemoryRegion) -> bool:
    return buffer.is_on_chip


def is_psum(buffer: MemoryRegion) -> bool:
    return buffer is psum


def is_sbuf(buffer: MemoryRegion) -> bool:
    return buffer is sbuf


def program_id(axis: int = 0) -> int:
    return cores.current().program_id


def num_programs(axes: int = 0) -> int:
    return cores.current().num_programs


@contextmanager
def no_reorder() -> Iterator[None]:
    """Program order, which is the only order here; runtime loops inside are refused."""
    core = cores.current()
    before, core.in_no_reorder = core.in_no_reorder, True
    try:
        yield
    finally:
        core.in_no_reorder = before


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    print(print_prefix, np.array(tensor.read()))


def __getattr__(name: str) -> Op:
    """An operator, such as `nl.add`."""
    if name in OPS:
        return OPS[name]
    raise AttributeError(f"nl.{name} is not in this emulator of NKI; its README says what is.")
