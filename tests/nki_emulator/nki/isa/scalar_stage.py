"""`data <op> operand`, with the operand one number per partition: the stage that three instructions share."""

from __future__ import annotations

import numpy as np

from nki_machine.errors import RuleError
from nki_machine.ops import Op
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import bits, column_or_constant, constant, is_column


def arithmetic(
    opcode: str,
    number: int,
    op: Op,
    values: np.ndarray,
    operand: float | NkiTensor | None,
    reverse: bool,
    dtypes: tuple[str, ...] | None = ("float32",),
) -> np.ndarray:
    """[P, F] float32 from [P, F] float32. RuleError as `column_or_constant`."""
    assert op.apply is not None
    if op.num_inputs == 1:
        if operand is not None and (isinstance(operand, NkiTensor) or operand != 0):
            raise RuleError(f"{opcode}: {op} takes one input, so operand{number} must be None or 0.")
        return op.apply(values)
    other = column_or_constant(opcode, f"operand{number}", operand, dtypes)
    return op.apply(other, values) if reverse else op.apply(values, other)


def bitvec(
    opcode: str, number: int, op: Op, values: np.ndarray, operand: float | NkiTensor | None, reverse: bool
) -> np.ndarray:
    """[P, F] unsigned from [P, F] unsigned of one width; the operand is a Python int, or a tile of that width."""
    assert op.apply is not None
    if op.num_inputs == 1:
        return op.apply(values)
    role = f"operand{number}"
    if not isinstance(operand, NkiTensor):
        if not isinstance(constant(opcode, role, operand), int | np.integer):
            raise RuleError(f"{opcode}: a bitvec operator takes integers, and {role} is {operand!r}.")
        other = np.array(int(operand) % 2 ** (8 * values.itemsize), values.dtype)
    else:
        other = bits(opcode, role, operand)
        if not is_column(operand) or other.dtype != values.dtype:
            raise RuleError(
                f"{opcode}: {role} must be {values.shape[0], 1} of {8 * values.itemsize} bits, and is {operand.shape} "
                f"of {operand.dtype.name}."
            )
    return op.apply(other, values) if reverse else op.apply(values, other)
