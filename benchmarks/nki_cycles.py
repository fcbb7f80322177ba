"""How many cycles an engine of a NeuronCore is held by one instruction of a trace; knows no clock, no DMA, no kernel.

The formulas are those that AWS published: the "Estimated instruction cost" of the `nki.isa` stubs of Neuron SDK 2.26
(2025-09-18, the last release that states them), the performance modes of the Trainium2 and Trainium3 architecture
guides, and the access rules of the Trainium/Inferentia2 guide, which the newer two build on. All of them are rates of
many instructions of a kind back to back. Left out, since nobody published it: what it costs when every instruction
waits for the one before (the guide says "about 100 cycles" without saying when), waits for semaphores, two engines that
meet in one PSUM bank, and the memory bus that VectorE's fast modes share with GpSimd.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nki_machine.trace import Instruction, Operand

MIN_INTERVAL = 64
"""Cycles between two instructions on one engine, at least: MIN_II of the 2.26 stubs and of today's nki.api.shared.rst;
on TensorE MM_INIT_LATENCY of the Trainium/Inferentia2 guide, which gives it for NeuronCore-v2."""
GPSIMD_START = 150
"""Cycles before GpSimd's first element: GPSIMD_START of the 2.26 stubs (iota, affine_select)."""
READ_OUT = 64
"""Cycles to write an accumulator register out: the 2.26 stubs of activation_reduce and tensor_scalar_reduce."""
WIDE_STRIDE_BYTES = 16
"""A wider step between neighbours halves what a memory port gives: Trainium/Inferentia2 guide, "Access pattern"."""
ITEMSIZE = {"float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2}
"""Bytes by dtype; all others take one."""
HALF_DTYPES = frozenset({"bfloat16", "float16"})
FP8_DTYPES = frozenset({"float8_e4m3", "float8_e4m3fn", "float8_e5m2"})
RECIPROCAL_SLOWDOWN = 8
"""VectorE's reciprocal: max(MIN_II, 8 N), nki.api.shared.rst."""
EXPONENTIAL_SPEEDUP = 4
"""VectorE's exponential against ScalarE's: Trainium3 guide, "Fast Exponential Evaluation"."""
PARALLEL_MEMORIES = frozenset({"tensor_tensor", "tensor_copy_predicated"})
"""Two tiles cost one's time where one lies in SBUF and the other in PSUM: the 2.26 stubs of these two."""
FAST_OPS = frozenset({"add", "multiply", "subtract"})
"""Those of two tiles that VectorE does in half the time in a fast dtype: the 2.26 stub of tensor_tensor."""
WITH_READ_OUT = frozenset({"activation", "activation_reduce", "activate2", "tensor_scalar_reduce", "exponential"})


def cycles(instruction: Instruction, fast_dtypes: frozenset[str], scalar_is_fast: bool) -> float:
    """Cycles of the instruction's own engine; 0 for what takes none, such as a register's load.

    Args:
        fast_dtypes: those that VectorE's performance modes take.
        scalar_is_fast: whether ScalarE too doubles its pace on copies and tensor_scalar of such.
    """
    if not instruction.writes:
        return 0
    match instruction.engine:
        case "tensor":
            return _tensor_cycles(instruction)
        case "vector":
            return max(MIN_INTERVAL, _vector_cycles(instruction, fast_dtypes)) + _read_out(instruction)
        case "scalar":
            mode = min(2.0, _copy_mode(instruction, fast_dtypes)) if scalar_is_fast else 1.0
            return max(MIN_INTERVAL, _num_elements(instruction) * _stride_factor(instruction) / mode) + _read_out(
                instruction
            )
        case "gpsimd":
            return GPSIMD_START + _num_elements(instruction) * min(2, max(1, len(_tiles(instruction))))
    return 0


def _tensor_cycles(instruction: Instruction) -> float:
    """`dst = stationary.T @ moving`: [M, N] takes a cycle for each of N columns, or M / 4 to load what is stationary.

    Float32 takes four passes, and two where the engine transposes (Trainium2 guide, "Built-in Transpose Support").
    FP8 at double rate contracts 256 rows in the time of 128, so its [M, N] takes as long (same guide).
    """
    (result, *_), reads = instruction.writes, instruction.reads
    wide = max((_is_wide(operand) for operand in reads), default=False)
    transposes = instruction.opcode == "nc_transpose" or bool(instruction.details.get("is_transpose"))
    is_float32 = any(operand.dtype == "float32" for operand in reads)
    passes = (2 if transposes else 4) if is_float32 else 1
    columns = _free_size(result)
    return passes * max(MIN_INTERVAL, result.shape[0] / 4 * (1 + wide), columns * (1 + wide))


def _vector_cycles(instruction: Instruction, fast_dtypes: frozenset[str]) -> float:
    """One tile takes a cycle an element, two take two; a fast mode divides, a wide stride doubles."""
    num_elements, factor = _num_elements(instruction), _stride_factor(instruction)
    match instruction.opcode:
        case "tensor_copy" | "tensor_scalar":
            return num_elements * factor / _copy_mode(instruction, fast_dtypes)
        case "tensor_reduce":
            return num_elements * factor / _reduction_mode(instruction)
        case "reciprocal":
            return num_elements * factor * RECIPROCAL_SLOWDOWN
        case "exponential":
            return num_elements * factor / EXPONENTIAL_SPEEDUP
        case _:
            return num_elements * factor * _num_reads(instruction, fast_dtypes)


def _num_reads(instruction: Instruction, fast_dtypes: frozenset[str]) -> int:
    """How many times the instruction's elements are read, one tile after another."""
    tiles = _tiles(instruction)
    if len(tiles) < 2:
        return 1
    if instruction.opcode in PARALLEL_MEMORIES and {tile.buffer for tile in tiles} == {"sbuf", "psum"}:
        return 1
    if instruction.opcode == "tensor_tensor" and all(tile.buffer == "sbuf" for tile in tiles):
        operands = (*tiles, *instruction.writes)
        is_fast = all(operand.dtype in fast_dtypes and operand.free_stride <= 1 for operand in operands)
        return 1 if is_fast and FAST_OPS.issuperset(instruction.details.get("ops", ())) else 2
    return 2


def _copy_mode(instruction: Instruction, fast_dtypes: frozenset[str]) -> float:
    """4, 2 or 1: the pace of a copy or tensor_scalar by dtypes, memories and neighbours (Trainium2 guide)."""
    if instruction.opcode not in ("tensor_copy", "tensor_scalar") or not instruction.reads:
        return 1
    operands = (instruction.reads[0], instruction.writes[0])
    num_in_psum = sum(operand.buffer == "psum" for operand in operands)
    is_contiguous = all(operand.free_stride <= 1 for operand in operands)
    if num_in_psum == 2 or any(operand.dtype not in fast_dtypes for operand in operands):
        return 1
    if num_in_psum == 0:
        return 4 if is_contiguous else 2
    return 2 if is_contiguous else 1


def _reduction_mode(instruction: Instruction) -> int:
    """2 or 1: sums and maxima of bfloat16 into bfloat16 take half the time (the 2.26 stub of tensor_reduce)."""
    is_half = all(operand.dtype == "bfloat16" for operand in (*instruction.reads, *instruction.writes))
    return 2 if is_half and instruction.details.get("ops") in (("add",), ("maximum",)) else 1


def _read_out(instruction: Instruction) -> int:
    return READ_OUT if instruction.opcode in WITH_READ_OUT and len(instruction.writes) > 1 else 0


def _num_elements(instruction: Instruction) -> int:
    """Elements per partition of the largest operand: a reduction's input, anything else's output."""
    return max(_free_size(operand) for operand in (*instruction.reads, *instruction.writes))


def _tiles(instruction: Instruction) -> list[Operand]:
    """What is read element by element; a column of one value a partition rides along for nothing."""
    num_elements = _num_elements(instruction)
    return [operand for operand in instruction.reads if _free_size(operand) == num_elements]


def _stride_factor(instruction: Instruction) -> int:
    return 2 if any(map(_is_wide, (*instruction.reads, *instruction.writes))) else 1


def _is_wide(operand: Operand) -> bool:
    return operand.free_stride * ITEMSIZE.get(operand.dtype, 1) > WIDE_STRIDE_BYTES


def _free_size(operand: Operand) -> int:
    return math.prod(operand.shape[1:])
