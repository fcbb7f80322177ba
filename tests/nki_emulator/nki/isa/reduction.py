"""Instructions that fold many elements of a tile into one, and how a fold goes on over several instructions."""

from __future__ import annotations

import numpy as np

from nki.isa.arguments import require_among, require_member, require_op
from nki.isa.enums import reduce_cmd as commands
from nki.isa.scalar_stage import arithmetic
from nki_machine import cores
from nki_machine.accumulators import Accumulator
from nki_machine.engines import issue, require_same_free_size
from nki_machine.errors import RuleError
from nki_machine.ops import OPS, Op
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import bits, column_or_constant, is_column, lanes, store, store_bits, tiles_among

ADD, MAXIMUM = OPS["add"], OPS["maximum"]


def _num_reduced(opcode: str, data: NkiTensor, axis: int | tuple[int, ...] | list[int]) -> int:
    """The number of elements that fold into one. RuleError unless the axes are the last ones and all free."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    num_axes = len(data.shape)
    if not axes or 0 in axes or axes != tuple(range(num_axes - len(axes), num_axes)):
        raise RuleError(
            f"{opcode}: axis {axis} of a tile of shape {data.shape}; only the last free axes can be reduced, in order "
            "and by their own numbers, and never the partitions (axis 0)."
        )
    return int(np.prod(data.shape[num_axes - len(axes) :]))


def tensor_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    axis: int | tuple[int, ...] | list[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """Folds the last free axes of data, [P, ..., reduced], into dst with one element for each of the kept."""
    opcode = "tensor_reduce"
    require_op(opcode, "op", op, "arithmetic", "bitvec")
    if op.name == "subtract":
        raise NotImplementedError(f"{opcode}: no document says what a reduction by {op} yields; use nl.add and negate.")
    if op.reduction is None:
        raise RuleError(f"{opcode}: {op} is no legal reduction.")
    issue(opcode, "vector", {"dst": dst}, {"data": data}, num_inputs=1, ops=(op.name,))
    num_reduced = _num_reduced(opcode, data, axis)
    if dst.size * num_reduced != data.size:
        raise RuleError(
            f"{opcode}: {data.shape} reduced along {axis} does not have as many elements as dst {dst.shape}."
        )
    folded = (data.shape[0], -1, num_reduced)
    if op.family == "bitvec":
        if negate:
            raise RuleError(f"{opcode}: negate is for arithmetic operators, and {op} is a bitvec operator.")
        store_bits(opcode, dst, op.reduction(bits(opcode, "data", data).reshape(folded)))
        return
    result = op.reduction(lanes(data).reshape(folded))
    store(dst, -result if negate else result)


def tensor_partition_reduce(dst: NkiTensor, op: Op, data: NkiTensor, name: str | None = None) -> None:
    """Folds the partitions of data, [P, F], into dst, [1, F], on the GpSimd Engine."""
    opcode = "tensor_partition_reduce"
    require_among(opcode, "op", op, "add", "average", "maximum", "bitwise_or", "bitwise_and")
    issue(opcode, "gpsimd", {"dst": dst}, {"data": data}, lanewise=False, num_inputs=1, ops=(op.name,))
    if dst.shape[0] != 1:
        raise RuleError(f"{opcode}: dst must span one partition, and is {dst.shape}.")
    require_same_free_size(opcode, dst=dst, data=data)
    assert op.reduction is not None
    if op.family == "bitvec":
        store_bits(opcode, dst, op.reduction(bits(opcode, "data", data).T))
    else:
        store(dst, op.reduction(lanes(data).T))


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: float | NkiTensor | None,
    reduce_op: Op,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: commands = commands.reset_reduce,
    reduce_init: float | NkiTensor | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """dst = data <op0> operand0, and its fold over the free axes goes to the accumulator, and to reduce_res [P, 1]."""
    opcode = "tensor_scalar_reduce"
    require_op(opcode, "op0", op0, "arithmetic")
    require_among(opcode, "reduce_op", reduce_op, "add", "multiply", "maximum", "minimum")
    require_member(opcode, "reduce_cmd", reduce_cmd, commands.reset_reduce, commands.reduce, commands.load_reduce)
    if reverse0:
        raise RuleError(f"{opcode}: reverse0 is not supported yet.")
    reads = {"data": data, **tiles_among(operand0=operand0, reduce_init=reduce_init)}
    writes = {"dst": dst, **tiles_among(reduce_res=reduce_res)}
    issue(opcode, "vector", writes, reads, num_inputs=1, ops=(op0.name, reduce_op.name))
    require_same_free_size(opcode, dst=dst, data=data)
    result = arithmetic(opcode, 0, op0, lanes(data), operand0, False)
    total = accumulate(opcode, cores.current().vector_accumulator, reduce_cmd, reduce_op, result, reduce_init)
    store(dst, result)
    read_out(opcode, reduce_res, total, negate=reduce_res_negate)


def accumulate(
    opcode: str,
    registers: Accumulator,
    command: commands,
    op: Op,
    values: np.ndarray,
    init: float | NkiTensor | None = None,
) -> np.ndarray | None:
    """Folds the rows of [P, F] into an engine's registers as `command` says; idle leaves them alone.

    Returns: what they then hold, [P, 1] float32; None after idle.
    Raises:
        RuleError: `reduce` goes on from an unknown state or from another operator's, or `init` is given for another
            command than load_reduce, or missing for it.
    """
    num_partitions = len(values)
    if (init is not None) != (command is commands.load_reduce):
        raise RuleError(f"{opcode}: reduce_init goes with reduce_cmd.load_reduce and with no other; got {command}.")
    if command is commands.idle:
        return None
    if command is commands.reset:
        registers.load(op, np.full((num_partitions, 1), op.identity, np.float32))
        return registers.read(opcode, num_partitions)
    assert op.reduction is not None
    partial = op.reduction(values)[:, None]
    if command is commands.reset_reduce:
        registers.load(op, partial)
        return partial
    if command is commands.load_reduce:
        first = column_or_constant(opcode, "reduce_init", init)
        registers.load(op, np.broadcast_to(first, (num_partitions, 1)))
    registers.add(opcode, op, partial)
    return registers.read(opcode, num_partitions)


def read_out(opcode: str, reduce_res: NkiTensor | None, total: np.ndarray | None, negate: bool = False) -> None:
    """Writes the registers to reduce_res, [P, 1], if it was given. RuleError if they hold nothing."""
    if reduce_res is None:
        return
    if total is None:
        raise RuleError(f"{opcode}: reduce_res was given with reduce_cmd.idle, which accumulates nothing to read out.")
    if not is_column(reduce_res):
        raise RuleError(f"{opcode}: reduce_res must have one element per partition, and is {reduce_res.shape}.")
    store(reduce_res, -total if negate else total)
