"""NKI 0.6's NkiTensor: the primitives that make a view of a view; knows no instruction and no memory.

Every primitive returns a tensor of the same storage, and nothing is copied. The restrictions on the partition dimension
are those of the stubs' docstrings (api/nki/language/__init__.py) and of deep-dives/nki-aps.rst.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from nki_machine import cores
from nki_machine.dtypes import as_dtype
from nki_machine.errors import RuleError
from nki_machine.indexing import indexed
from nki_machine.indirect import DynamicIndex, scalar_index, vector_index
from nki_machine.layout import Layout
from nki_machine.memory import MemoryRegion
from nki_machine.rearrange import rearranged
from nki_machine.registers import VirtualRegister
from nki_machine.window import Window


class NkiTensor(Window):
    """A tensor as a kernel handles it.

    The primitives raise RuleError for what their docstrings in AWS's stubs exclude: above all, nothing moves, splits or
    merges the partition dimension of SBUF and PSUM, nor a dimension that is indexed at run time.
    """

    __slots__ = ()

    def __getitem__(self, key: object) -> NkiTensor:
        return indexed(self, key)

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise RuleError("A tensor is written by an instruction of nki.isa, never by an assignment.")

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        dim = self.layout.axis(dim)
        if dim == 0 and self._has_row_index():
            raise RuleError(f"slice: dimension 0 of {self} is indexed at run time.")
        if dim == 0 and self.buffer.is_on_chip and step != 1 and end - start > step:
            raise RuleError(f"slice: partitions {start}:{end}:{step} of {self} are not neighbours.")
        return self._viewed(self.layout.slice(dim, start, end, step))

    def select(self, dim: int, index: int | NkiTensor | VirtualRegister) -> NkiTensor:
        """On chip the partition dimension stays, at size 1, and so does the last free one."""
        dim = self.layout.axis(dim)
        if isinstance(index, NkiTensor | VirtualRegister):
            return self._select_dynamic(dim, index)
        one = self.slice(dim, index, index + 1)
        return one if self._keeps(dim) else one.squeeze_dim(dim)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        if dim != 0:
            raise RuleError(f"vector_select: dimension {dim} of {self} must be 0.")
        self._refuse_second_index("vector_select")
        index = vector_index(self, vector_offset)
        layout = Layout((vector_offset.shape[0], *self.shape[1:]), self.strides, self.offset)
        return NkiTensor(self.storage, layout, self.dtype, index)

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        dims = tuple(self.layout.axis(dim) for dim in dims)
        if self._has_fixed_rows() and dims[:1] != (0,):
            raise RuleError(f"permute: {dims} moves dimension 0 of {self}, whose place is first.")
        return self._viewed(self.layout.permute(dims))

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        dim = self.layout.axis(dim)
        self._keep_rows("broadcast", dim)
        return self._viewed(self.layout.broadcast(dim, size))

    def expand_dim(self, dim: int) -> NkiTensor:
        if not 0 <= dim <= self.ndim:
            raise RuleError(f"expand_dim: position {dim} is not within 0..{self.ndim}.")
        self._keep_rows("expand_dim", dim)
        return self._viewed(self.layout.expand(dim))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        dim = self.layout.axis(dim)
        self._keep_rows("squeeze_dim", dim)
        if self.ndim <= (2 if self.buffer.is_on_chip else 1):
            raise RuleError(f"squeeze_dim: {self} has no dimension to spare.")
        return self._viewed(self.layout.squeeze(dim))

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        dim = self.layout.axis(dim)
        if len(shape) > 1:
            self._keep_rows("reshape_dim", dim)
        return self._viewed(self.layout.split(dim, tuple(shape)))

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        start_dim, end_dim = self.layout.axis(start_dim), self.layout.axis(end_dim)
        self._keep_rows("flatten_dims", start_dim)
        return self._viewed(self.layout.flatten(start_dim, end_dim))

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        shape = tuple(shape)
        if not self._has_fixed_rows():
            return self._viewed(self.layout.reshape(shape))
        if shape[:1] != self.shape[:1] or (self.buffer.is_on_chip and len(shape) < 2):
            raise RuleError(f"reshape: {shape} must keep dimension 0 of {self}, and a free dimension.")
        free = Layout(self.shape[1:], self.strides[1:]).reshape(shape[1:])
        return self._viewed(Layout(shape, (self.strides[0], *free.strides), self.offset))

    def rearrange(self, src_pattern: tuple, dst_pattern: tuple, fixed_sizes: dict[str, int] | None = None) -> NkiTensor:
        return rearranged(self, src_pattern, dst_pattern, fixed_sizes or {})

    def view(self, dtype: object) -> NkiTensor:
        """The bits as another dtype; the last dimension takes the change of width."""
        dtype = as_dtype(dtype, cores.current().generation)
        old, new = self.dtype.itemsize, dtype.itemsize
        if self.index is not None:
            raise RuleError(f"view: {self} is indirect; reinterpret it before the dynamic select.")
        if self.shape[-1] > 1 and self.strides[-1] != 1:
            raise RuleError(f"view: the last dimension of {self} must be contiguous.")
        in_bytes = [old * value for value in (self.offset, self.shape[-1], *self.strides[:-1])]
        if any(value % new for value in in_bytes):
            raise RuleError(f"view: rows of {self} do not begin and end between elements of {dtype}.")
        offset, last, *strides = (value // new for value in in_bytes)
        return NkiTensor(self.storage, Layout((*self.shape[:-1], last), (*strides, 1), offset), dtype)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: NkiTensor | VirtualRegister | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: object = None,
    ) -> NkiTensor:
        """The storage by an explicit pattern of (stride, count), whatever this tensor's own shape and strides.

        Raises:
            RuleError: a pattern that the hardware does not walk; or an explicit `offset` on a view that has one, which
                one document lets override (nki-aps.rst) and another add (the stub).
            NotImplementedError: an index together with another `dtype`.
        """
        if offset is not None and self.offset:
            raise RuleError(f"ap: {self} has an offset already; call ap on the whole tensor to give another.")
        if scalar_offset is not None and vector_offset is not None:
            raise RuleError("ap: at most one of scalar_offset and vector_offset.")
        is_dynamic = scalar_offset is not None or vector_offset is not None
        if is_dynamic and dtype is not None:
            raise NotImplementedError("ap: an index together with another dtype, whose scale no document tells.")
        index = self._dynamic_index(scalar_offset, vector_offset, indirect_dim) if is_dynamic else None
        new = self.dtype if dtype is None else as_dtype(dtype, cores.current().generation)
        begin = self.offset * self.dtype.itemsize // new.itemsize if offset is None else offset
        layout = Layout(tuple(count for _, count in pattern), tuple(stride for stride, _ in pattern), begin)
        tensor = NkiTensor(self.storage, layout, new, index)
        tensor.check_pattern()
        if vector_offset is not None and layout.shape[0] > vector_offset.size:
            raise RuleError(f"ap: {tensor} has {layout.shape[0]} rows for {vector_offset.size} indices.")
        return tensor

    def get_pattern(self) -> list[list[int]]:
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        return self.index is not None

    def is_contiguous(self) -> bool:
        """On chip, within a partition."""
        if self.buffer.is_on_chip:
            return Layout(self.shape[1:], self.strides[1:]).is_dense()
        return self.layout.is_dense()

    def _viewed(self, layout: Layout) -> NkiTensor:
        return NkiTensor(self.storage, layout, self.dtype, self.index)

    def _keeps(self, dim: int) -> bool:
        """Whether an index leaves dimension `dim` at size 1."""
        return (dim == 0 or self.ndim == 2) if self.buffer.is_on_chip else self.ndim == 1

    def _has_row_index(self) -> bool:
        return self.index is not None and self.index.is_vector

    def _has_fixed_rows(self) -> bool:
        return self.buffer.is_on_chip or self._has_row_index()

    def _keep_rows(self, primitive: str, dim: int) -> None:
        if dim == 0 and self._has_fixed_rows():
            raise RuleError(f"{primitive}: dimension 0 of {self} stays as it is, being partitions or rows of an index.")

    def _refuse_second_index(self, primitive: str) -> None:
        if self.index is not None:
            raise RuleError(f"{primitive}: {self} is indirect, and a view has at most one dynamic index.")

    def _dynamic_index(
        self, scalar: NkiTensor | VirtualRegister | None, vector: NkiTensor | None, dim: int
    ) -> DynamicIndex:
        self._refuse_second_index("ap")
        if vector is None:
            return scalar_index(self, scalar, self.layout.axis(dim))
        if dim != 0:
            raise RuleError(f"ap: indirect_dim {dim} of a vector_offset must be 0.")
        return vector_index(self, vector)

    def _select_dynamic(self, dim: int, source: NkiTensor | VirtualRegister) -> NkiTensor:
        self._refuse_second_index("select")
        if dim == 0 and self.buffer.is_on_chip:
            raise RuleError(f"select: the partition of {self} must be known before the run.")
        index = scalar_index(self, source, dim, by_stride=True)
        layout = self.layout.slice(dim, 0, 1)
        return NkiTensor(self.storage, layout if self._keeps(dim) else layout.squeeze(dim), self.dtype, index)


def ndarray(shape: Sequence[int], dtype: object, buffer: MemoryRegion, name: str = "") -> NkiTensor:
    """New memory of the running core, full of poison."""
    core = cores.current()
    numpy_dtype: np.dtype = as_dtype(dtype, core.generation)
    storage = core.allocate(tuple(shape), numpy_dtype, buffer, name)
    return NkiTensor(storage, Layout.dense(storage.shape))
