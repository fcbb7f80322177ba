"""Python's brackets on a tensor: integers, slices, `...` and nl.ds; knows the primitives alone."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nki_machine.errors import RuleError
from nki_machine.registers import VirtualRegister

if TYPE_CHECKING:
    from nki_machine.tensor import NkiTensor


@dataclass(frozen=True, slots=True)
class DynamicSlice:
    """`nl.ds(start, size)`: `size` elements from `start` on."""

    start: int
    size: int


def indexed(tensor: NkiTensor, key: object) -> NkiTensor:
    """`tensor[key]`.

    On chip an integer keeps the partition dimension, at size 1, and the result has at least two dimensions; in HBM an
    integer drops its dimension, and one dimension is left at least.

    Raises:
        RuleError: a key that is none of these, or out of bounds.
    """
    keys = _expanded(key if isinstance(key, tuple) else (key,), tensor)
    min_dims = 2 if tensor.buffer.is_on_chip else 1
    view, dropped = tensor, []
    for dim, part in enumerate(keys):
        if isinstance(part, slice | DynamicSlice):
            view = _sliced(view, dim, part)
            continue
        view = _at(view, dim, part)
        if not (dim == 0 and tensor.buffer.is_on_chip):
            dropped.append(dim)
    # The last of them stays when too few dimensions would be left.
    for dim in reversed(dropped[: tensor.ndim - min_dims]):
        view = view.squeeze_dim(dim)
    return view


def _expanded(keys: tuple, tensor: NkiTensor) -> list:
    num_ellipses = sum(part is Ellipsis for part in keys)
    missing = tensor.ndim - (len(keys) - num_ellipses)
    if num_ellipses > 1 or missing < 0:
        raise RuleError(f"{tensor} has {tensor.ndim} dimensions, and its index {keys} names others.")
    if not num_ellipses:
        keys = (*keys, Ellipsis)
    at = next(position for position, part in enumerate(keys) if part is Ellipsis)
    return [*keys[:at], *[slice(None)] * missing, *keys[at + 1 :]]


def _sliced(view: NkiTensor, dim: int, part: slice | DynamicSlice) -> NkiTensor:
    if isinstance(part, DynamicSlice):
        return view.slice(dim, _integer(part.start), _integer(part.start) + _integer(part.size))
    if part == slice(None):
        return view
    size = view.shape[dim]
    start = 0 if part.start is None else _from_end(_integer(part.start), size)
    end = size if part.stop is None else _from_end(_integer(part.stop), size)
    return view.slice(dim, start, end, 1 if part.step is None else _integer(part.step))


def _at(view: NkiTensor, dim: int, part: object) -> NkiTensor:
    index = _from_end(_integer(part), view.shape[dim])
    return view.slice(dim, index, index + 1)


def _from_end(index: int, size: int) -> int:
    return index + size if index < 0 else index


def _integer(value: object) -> int:
    if isinstance(value, VirtualRegister):
        raise RuleError("A register is no index of Python's brackets: use select, or ap with a scalar_offset.")
    try:
        return operator.index(value)
    except TypeError:
        raise RuleError(f"{value!r} is no index: take integers, slices, `...` or nl.ds.") from None
