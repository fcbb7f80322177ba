"""Dynamic addressing: a view whose place an index decides at run time; knows no DMA.

`vector_offset`: row p begins at `offset + index[p] * scale`; `scalar_offset`: the whole view does
(deep-dives/nki-aps.rst, "Dynamic Access"). The scale is the base tensor's number of elements to the right of the
indirect dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from nki_machine.errors import RuleError
from nki_machine.layout import Layout
from nki_machine.memory import MemoryRegion
from nki_machine.registers import VirtualRegister

if TYPE_CHECKING:
    from nki_machine.window import Window


@dataclass(frozen=True, slots=True)
class DynamicIndex:
    """What is known at run time only.

    Attributes:
        source: holds the indices. is_vector: whether there is one per row, not one for all.
        scale: elements from one index to the next. limit: of the base tensor: its first index out of bounds.
    """

    source: Window | VirtualRegister
    is_vector: bool
    scale: int
    limit: int

    def values(self) -> np.ndarray:
        """The indices now, int64, column by column; one of a scalar."""
        if isinstance(self.source, VirtualRegister):
            return np.array([self.source.read()], dtype=np.int64)
        return self.source.read().astype(np.int64).T.reshape(-1)


@dataclass(frozen=True, slots=True)
class Indirect:
    """A dynamic view, to be resolved.

    Attributes:
        view: its layout is that of index 0.
    """

    view: Window
    index: DynamicIndex

    def one_index(self) -> Layout:
        """What index 0 reaches: a row, or the whole view of a scalar index."""
        layout = self.view.layout
        return Layout(layout.shape[1:], layout.strides[1:], layout.offset) if self.index.is_vector else layout

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(indices int64 [P], in_bounds bool [P]): of a scalar index, all alike.

        A row is out of bounds when its index is, or when its pattern reaches outside the storage.
        """
        self.view.check_scope()
        indices = self.index.values()
        in_bounds = (indices >= 0) & (indices < self._limit())
        if self.index.is_vector:
            return indices[: self.view.shape[0]], in_bounds[: self.view.shape[0]]
        return np.repeat(indices, self.view.shape[0]), np.repeat(in_bounds, self.view.shape[0])

    def read_rows(self) -> np.ndarray:
        """A copy in the view's shape; rows out of bounds hold nothing that means anything."""
        indices, in_bounds = self.rows()
        if self.index.is_vector:
            return self._all_rows()[np.where(in_bounds, indices, 0)]
        return self.view.strided(self._placed(indices[0] if in_bounds[0] else 0)).copy()

    def write_rows(self, values: np.ndarray) -> None:
        """Stores `values` (as many as the view has, in its dtype) where rows are in bounds, and leaves the rest."""
        self.view.check_writable()
        indices, in_bounds = self.rows()
        values = values.reshape(self.view.shape)
        if self.index.is_vector:
            self._all_rows()[indices[in_bounds]] = values[in_bounds]
        elif in_bounds[0]:
            self.view.strided(self._placed(indices[0]))[...] = values
        self.view.storage.is_written = True

    def layout(self) -> Layout:
        """Where a scalar index places the view now.

        Raises:
            RuleError: an index per row, or an index out of bounds.
        """
        if self.index.is_vector:
            raise RuleError(f"{self.view} has an index per row, which a DMA alone resolves.")
        indices, in_bounds = self.rows()
        if not in_bounds[0]:
            raise RuleError(f"{self.view}: index {indices[0]} is not within 0..{self._limit() - 1}.")
        return self._placed(indices[0])

    def _limit(self) -> int:
        """The first index whose pattern leaves the storage, or that the base tensor does not have."""
        last = self.one_index().bounds()[1]
        return min(self.index.limit, (self.view.num_elements - 1 - last) // self.index.scale + 1)

    def _all_rows(self) -> np.ndarray:
        row = self.one_index()
        return self.view.strided(Layout((self._limit(), *row.shape), (self.index.scale, *row.strides), row.offset))

    def _placed(self, index: int) -> Layout:
        layout = self.view.layout
        return replace(layout, offset=layout.offset + int(index) * self.index.scale)


def vector_index(base: Window, source: Window) -> DynamicIndex:
    """An index per row of dimension 0 of `base`; more than one column of them is for `dma_transpose` alone.

    Raises:
        RuleError: `base` is not in HBM, or `source` no columns of 32-bit integers in SBUF.
    """
    if base.buffer.is_on_chip:
        raise RuleError(f"vector_offset: {base} must be in HBM.")
    _check_source("vector_offset", source, source.shape[:2])
    return DynamicIndex(source, True, _scale(base, 0), base.shape[0])


def scalar_index(base: Window, source: Window | VirtualRegister, dim: int, by_stride: bool = False) -> DynamicIndex:
    """One index of dimension `dim` of `base`; `by_stride` takes a base of any strides.

    Raises:
        RuleError: `source` is neither a register nor one 32-bit integer in SBUF.
    """
    if not isinstance(source, VirtualRegister):
        _check_source("scalar_offset", source, (1, 1))
    scale = base.strides[dim] if by_stride else _scale(base, dim)
    if scale < 1:
        raise RuleError(f"select: dimension {dim} of {base} has stride {scale}, along which no index moves on.")
    return DynamicIndex(source, False, scale, base.shape[dim])


def _check_source(argument: str, source: Window, shape: tuple[int, ...]) -> None:
    if source.buffer is not MemoryRegion.sbuf or source.shape != shape or source.dtype.name not in ("int32", "uint32"):
        raise RuleError(f"{argument}: {source} must be int32 or uint32 in SBUF, of shape {shape}.")


def _scale(base: Window, dim: int) -> int:
    scale = math.prod(base.shape[dim + 1 :])
    if base.shape[dim] > 1 and base.strides[dim] != scale:
        raise RuleError(
            f"ap: dimension {dim} of {base} has stride {base.strides[dim]}, and one document scales an index by "
            f"the stride, another by the {scale} elements to its right: index a contiguous tensor."
        )
    return scale
