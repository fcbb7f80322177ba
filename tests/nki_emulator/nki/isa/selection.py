"""Instructions that choose between two values by a mask that bounds or a tile give, on the Vector Engine."""

from __future__ import annotations

import numpy as np

from nki.isa.arguments import require_among, require_member
from nki.isa.enums import reduce_cmd as commands
from nki.isa.reduction import MAXIMUM, accumulate, read_out
from nki_machine import cores
from nki_machine.dtypes import name_of
from nki_machine.engines import forbid_both_in_psum, issue, require_same_free_size
from nki_machine.errors import RuleError
from nki_machine.ops import Op
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import column_or_constant, constant, is_integer, lanes, raw, store, tiles_among

FP32_MIN = float(np.finfo(np.float32).min)
# From here on float32 skips integers, and the comparison of positions is in float32.
MAX_POSITION = 2**24


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Op,
    comp_op1: Op,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: commands = commands.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Op = MAXIMUM,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """dst[p, f] = on_true_tile[p, f] where range_start + f stands to both bounds of p, else FP32_MIN; and its maximum.

    Args:
        bound0, bound1: [P, 1] float32. comp_op0, comp_op1: `position <op> bound`.
        reduce_res: [P, 1], receives the running maximum; float32 if dst is narrower, for a masked row of which the
            difference of two infinities would be NaN.
    """
    opcode = "range_select"
    for role, op in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        require_among(opcode, role, op, "equal", "less", "less_equal", "greater", "greater_equal")
    require_among(opcode, "reduce_op", reduce_op, "maximum")
    require_member(opcode, "reduce_cmd", reduce_cmd, commands.reset_reduce, commands.reduce, commands.idle)
    writes = {"dst": dst, **tiles_among(reduce_res=reduce_res)}
    reads = {"on_true_tile": on_true_tile, "bound0": bound0, "bound1": bound1}
    issue(opcode, "vector", writes, reads, num_inputs=1, ops=(comp_op0.name, comp_op1.name, "maximum"))
    require_same_free_size(opcode, dst=dst, on_true_tile=on_true_tile)
    _check_range(opcode, dst, on_true_tile, reduce_res, range_start, on_false_value)
    positions = range_start + np.arange(on_true_tile.size // on_true_tile.shape[0], dtype=np.float32)
    kept = _holds(opcode, comp_op0, positions, "bound0", bound0) & _holds(opcode, comp_op1, positions, "bound1", bound1)
    result = np.where(kept, lanes(on_true_tile), np.float32(FP32_MIN))
    _store_with_maximum(opcode, dst, result, reduce_cmd, reduce_res)


def _check_range(
    opcode: str, dst: NkiTensor, on_true: NkiTensor, reduce_res: NkiTensor | None, start: int, fill: float
) -> None:
    if is_integer(on_true):
        raise RuleError(f"{opcode}: on_true_tile must be a float, and is {on_true.dtype.name}.")
    if np.float32(constant(opcode, "on_false_value", fill)) != np.float32(FP32_MIN):
        raise RuleError(f"{opcode}: on_false_value must be {FP32_MIN}, the least float32, and is {fill}.")
    if not isinstance(start, int):
        raise RuleError(f"{opcode}: range_start must be a compile-time integer, and is {start!r}.")
    if start < 0 or start + on_true.size // on_true.shape[0] > MAX_POSITION:
        raise RuleError(f"{opcode}: positions from {start} on leave the {MAX_POSITION} that float32 tells apart.")
    if reduce_res is not None and dst.dtype.itemsize < 4 and name_of(reduce_res.dtype) != "float32":
        raise RuleError(
            f"{opcode}: in dst, {dst.dtype.name}, the fill becomes -inf, so reduce_res must be float32 and is "
            f"{reduce_res.dtype.name}: -inf - -inf would be NaN."
        )


def _holds(opcode: str, op: Op, positions: np.ndarray, role: str, bound: NkiTensor) -> np.ndarray:
    assert op.apply is not None
    return op.apply(positions, column_or_constant(opcode, role, bound)).astype(np.bool_)


def _store_with_maximum(
    opcode: str, dst: NkiTensor, result: np.ndarray, command: commands, reduce_res: NkiTensor | None
) -> None:
    registers = cores.current().vector_accumulator
    total = accumulate(opcode, registers, command, MAXIMUM, result)
    if command is commands.idle:
        registers.forget()
    store(dst, result)
    read_out(opcode, reduce_res, total)


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: float | NkiTensor,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    reduce_op: Op = MAXIMUM,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = on_true where predicate, else on_false (a number or [P, 1]); and the maximum of the free axes."""
    opcode = "select_reduce"
    require_among(opcode, "reduce_op", reduce_op, "maximum")
    require_member(opcode, "reduce_cmd", reduce_cmd, commands.idle, commands.reset_reduce, commands.reduce)
    writes = {"dst": dst, **tiles_among(reduce_res=reduce_res)}
    reads = {"predicate": predicate, "on_true": on_true, **tiles_among(on_false=on_false)}
    issue(opcode, "vector", writes, reads, num_inputs=2, ops=("select", "maximum"))
    require_same_free_size(opcode, dst=dst, predicate=predicate, on_true=on_true)
    forbid_both_in_psum(opcode, predicate=predicate, on_true=on_true)
    _require_dtype(opcode, "predicate", predicate, "int8", "uint8", "int16", "uint16")
    if name_of(on_true.dtype) in ("int32", "uint32"):
        raise RuleError(f"{opcode}: on_true cannot be {on_true.dtype.name}.")
    if reduce_res is not None and is_integer(reduce_res):
        raise RuleError(f"{opcode}: reduce_res must be a float, and is {reduce_res.dtype.name}.")
    chosen = (raw(predicate) != 0) != reverse_pred
    result = np.where(chosen, lanes(on_true), column_or_constant(opcode, "on_false", on_false, dtypes=None))
    _store_with_maximum(opcode, dst, result, reduce_cmd, reduce_res)


def _require_dtype(opcode: str, role: str, tile: NkiTensor, *names: str) -> None:
    if name_of(tile.dtype) not in names:
        raise RuleError(f"{opcode}: {role} must be {', '.join(names)}, and is {tile.dtype.name}.")


def tensor_copy_predicated(
    dst: NkiTensor,
    src: float | NkiTensor,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """Overwrites dst with src (a tile of dst's dtype, or a number) where predicate, and leaves the rest as it is."""
    opcode = "tensor_copy_predicated"
    reads = {"predicate": predicate, **tiles_among(src=src)}
    issue(opcode, "vector", {"dst": dst}, reads, num_inputs=len(reads))
    require_same_free_size(opcode, dst=dst, **reads)
    _require_dtype(opcode, "predicate", predicate, "uint8", "uint16", "uint32")
    chosen = (raw(predicate) != 0) != reverse_pred
    if isinstance(src, NkiTensor):
        forbid_both_in_psum(opcode, src=src, predicate=predicate)
        if src.dtype != dst.dtype:
            raise RuleError(f"{opcode}: src is {src.dtype.name} and dst {dst.dtype.name}; it casts nothing.")
        store(dst, np.where(chosen, raw(src), raw(dst)))
        return
    number = np.array(constant(opcode, "src", src)).astype(dst.dtype)
    store(dst, np.where(chosen, number, raw(dst)))
