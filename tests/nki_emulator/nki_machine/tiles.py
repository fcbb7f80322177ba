"""A tile as an engine's lanes see it: a row of numbers per partition, float32 or raw bits; knows no instruction."""

from __future__ import annotations

import numpy as np

from nki_machine.dtypes import name_of
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor


def is_integer(tile: NkiTensor) -> bool:
    """A boolean is none: it holds no bits of its own."""
    return tile.dtype.kind in "iu"


def lanes(tile: NkiTensor) -> np.ndarray:
    """[P, F] float32: the free axes in one, every element cast as an engine casts what it reads."""
    return tile.read().reshape(tile.shape[0], -1).astype(np.float32, copy=False)


def raw(tile: NkiTensor) -> np.ndarray:
    """[P, F] in the tile's own dtype."""
    return tile.read().reshape(tile.shape[0], -1)


def bits(opcode: str, role: str, tile: NkiTensor) -> np.ndarray:
    """[P, F] unsigned integers of the tile's width. RuleError if its dtype is not an integer's."""
    if not is_integer(tile):
        raise RuleError(f"{opcode}: a bitvec operator takes integers, and {role} is {tile.dtype.name}.")
    values = raw(tile)
    return values.view(np.dtype(f"u{values.itemsize}"))


def store(tile: NkiTensor, values: np.ndarray) -> None:
    """Writes [P, F] values, rounded to the tile's dtype."""
    tile.write(values.reshape(tile.shape))


def store_bits(opcode: str, tile: NkiTensor, values: np.ndarray) -> None:
    """Writes [P, F] unsigned integers bit by bit. RuleError if the tile's dtype is no integer of that width."""
    if not is_integer(tile) or tile.dtype.itemsize != values.itemsize:
        raise RuleError(
            f"{opcode}: a bitvec operator casts nothing, so dst must be an integer of {8 * values.itemsize} bits, "
            f"and is {tile.dtype.name}."
        )
    store(tile, values.view(tile.dtype))


def is_column(tile: NkiTensor) -> bool:
    """Whether there is one element in a partition."""
    return tile.size == tile.shape[0]


def column_or_constant(
    opcode: str, role: str, operand: object, dtypes: tuple[str, ...] | None = ("float32",)
) -> np.ndarray | np.float32:
    """A scalar operand in float32: a compile-time number, or [P, 1] from a tile of one element per partition.

    Args:
        dtypes: what a tile may be; None for any.
    Raises:
        RuleError: it is neither, or of another dtype.
    """
    if not isinstance(operand, NkiTensor):
        return np.float32(constant(opcode, role, operand))
    if not is_column(operand):
        raise RuleError(f"{opcode}: {role} must have one element per partition, and is {operand.shape}.")
    if dtypes is not None and name_of(operand.dtype) not in dtypes:
        raise RuleError(f"{opcode}: {role} as a tile must be {' or '.join(dtypes)}, and is {operand.dtype.name}.")
    return lanes(operand)


def constant(opcode: str, role: str, value: object) -> float:
    """A compile-time number. RuleError if it is anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise RuleError(f"{opcode}: {role} must be a number or a tile, and is {value!r}.")
    return value  # type: ignore[return-value]


def tiles_among(**operands: object) -> dict[str, NkiTensor]:
    """Those operands that are tiles, by name: an instruction reads them, the constants are part of it."""
    return {role: operand for role, operand in operands.items() if isinstance(operand, NkiTensor)}
