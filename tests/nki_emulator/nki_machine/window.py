"""A strided window on one allocation: reading, writing, and patterns that the hardware walks; knows no primitive."""

from __future__ import annotations

import numpy as np

from nki_machine import cores
from nki_machine.dtypes import cast, name_of
from nki_machine.errors import RuleError
from nki_machine.indirect import DynamicIndex, Indirect
from nki_machine.layout import Layout
from nki_machine.memory import OTHER, Storage
from nki_machine.trace import Operand

# trainium_inferentia2_arch.rst: a partition and four free axes, each of a uint16 count and an int16 stride.
MAX_DIMS = 5
MAX_COUNT = 2**16 - 1
MAX_STRIDE = 2**15 - 1
_UINT8 = np.dtype(np.uint8)


class Window:
    """What an instruction's operand is.

    Attributes:
        storage: the allocation. layout: shape, strides and offset, in elements of `dtype`.
        index: what is known at run time only, of a window with dynamic addressing; else None.
    """

    __slots__ = ("_elements", "_operand", "dtype", "index", "layout", "storage")

    def __init__(
        self, storage: Storage, layout: Layout, dtype: np.dtype | None = None, index: DynamicIndex | None = None
    ) -> None:
        self.storage = storage
        self.layout = layout
        self.dtype = storage.dtype if dtype is None else dtype
        self.index = index
        self._elements: np.ndarray | None = None
        self._operand: Operand | None = None

    shape = property(lambda self: self.layout.shape)
    strides = property(lambda self: self.layout.strides)
    offset = property(lambda self: self.layout.offset)
    size = property(lambda self: self.layout.size)
    ndim = property(lambda self: len(self.layout.shape))
    buffer = property(lambda self: self.storage.buffer)
    name = property(lambda self: self.storage.name)

    def __repr__(self) -> str:
        name = self.name or f"tensor {self.storage.id}"
        pattern = [list(pair) for pair in zip(self.strides, self.shape, strict=True)]
        return f"{name} ({self.dtype} in {self.buffer.name}, pattern {pattern}, offset {self.offset})"

    @property
    def indirect(self) -> Indirect | None:
        """How to resolve a dynamic window; None of any other."""
        return None if self.index is None else Indirect(self, self.index)

    @property
    def start_partition(self) -> int:
        """Of a window on chip."""
        return self.offset // self.free_elements

    @property
    def free_elements(self) -> int:
        """Elements of `dtype` in one partition of the allocation."""
        return self.storage.free_bytes // self.dtype.itemsize

    @property
    def num_elements(self) -> int:
        """Elements of `dtype` in the whole allocation."""
        return self.storage.bytes.size // self.dtype.itemsize

    @property
    def free_span(self) -> tuple[int, int]:
        """First and last byte that a window on chip reaches in each partition of its allocation."""
        first, last = self._free_layout().bounds()
        return first * self.dtype.itemsize, (last + 1) * self.dtype.itemsize - 1

    def read(self) -> np.ndarray:
        """The elements, in the window's shape and dtype: memory itself, so copy it to keep it.

        Raises:
            RuleError: the window reaches outside its storage, or is used after the iteration that allocated it; or an
                index per row, which a DMA alone resolves.
        """
        self.check_scope()
        if self.index is not None:
            return self.strided(self.indirect.layout())
        if self._elements is None:
            self.check_pattern()
            self._elements = self.strided(self.layout)
        return self._elements

    def write(self, values: np.ndarray | float) -> None:
        """Stores values of the window's shape (or as many, or one), rounded as `dtypes.cast` does.

        Raises:
            RuleError: as `read`; or the window names an element twice.
        """
        elements = self.read()
        self.check_writable()
        values = cast(np.asarray(values), self.dtype)
        elements[...] = values if values.ndim == 0 else values.reshape(self.shape)
        self.storage.is_written = True
        if self.storage.writers is not None:
            self.writers[...] = OTHER

    @property
    def writers(self) -> np.ndarray:
        """Of PSUM, uint8 in the window's shape: who wrote each element last (memory.NOTHING, MATMUL, OTHER)."""
        layout = self.layout if self.index is None else self.indirect.layout()
        return self._strided(self.storage.writers, _UINT8, layout)

    def operand(self) -> Operand:
        """What a trace tells of it."""
        if self._operand is None:
            on_chip = self.buffer.is_on_chip
            inner = zip(reversed(self.strides[on_chip:]), reversed(self.shape[on_chip:]), strict=True)
            self._operand = Operand(
                storage=self.storage.id,
                buffer=self.buffer.kind,
                shape=self.shape,
                dtype=name_of(self.dtype),
                start_partition=self.start_partition if on_chip else 0,
                num_partitions=self.shape[0] if on_chip else 0,
                free_bytes=self.storage.free_bytes if on_chip else 0,
                free_stride=next((stride for stride, count in inner if count > 1), 1),
                offset=self.offset,
            )
        return self._operand

    def runs(self) -> int:
        """Contiguous bytes of a run, as a DMA meets them: within a partition, and within a row that has an index."""
        by_row = self.buffer.is_on_chip or (self.index is not None and self.index.is_vector)
        layout = Layout(self.shape[1:], self.strides[1:]) if by_row else self.layout
        return layout.run() * self.dtype.itemsize

    def strided(self, layout: Layout) -> np.ndarray:
        """Another layout of the same storage and dtype, as numpy."""
        return self._strided(self.storage.bytes, self.dtype, layout)

    def check_scope(self) -> None:
        """Raises: RuleError: the allocation was made in an iteration that has ended."""
        scope = self.storage.scope
        if not scope:
            return
        loops = cores.current().loops if cores.is_running() else ()
        if loops[: len(scope)] != scope:
            raise RuleError(
                f"{self} was allocated inside a loop's body and exists in that iteration only: allocate it before the "
                "loop."
            )

    def check_writable(self) -> None:
        """Raises: RuleError: the window is broadcast, so a write would hit an element twice."""
        if 0 in self.strides and any(
            stride == 0 and count > 1 for stride, count in zip(self.strides, self.shape, strict=True)
        ):
            raise RuleError(f"{self} is broadcast: a write would hit an element twice.")

    def check_pattern(self) -> None:
        """Raises: RuleError: the pattern leaves its storage or its partition, or is more than the hardware walks."""
        shape = self.shape
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
            raise RuleError(f"{self} must have 1 to {MAX_DIMS} dimensions, none of them empty.")
        low, high = (self.layout if self.index is None else self.indirect.one_index()).bounds()
        if low < 0 or high >= self.num_elements:
            raise RuleError(f"{self} reaches elements {low}..{high} of a storage of {self.num_elements}.")
        if self.buffer.is_on_chip:
            self._check_on_chip()

    def _check_on_chip(self) -> None:
        if self.shape[0] > 1 and self.strides[0] != self.free_elements:
            raise RuleError(f"{self}: the first stride must be the free element count, {self.free_elements}.")
        free = self._free_layout()
        low, high = free.bounds()
        if low < 0 or high >= self.free_elements:
            raise RuleError(f"{self} leaves its partition of {self.free_elements} elements.")
        for stride, count in zip(free.strides, free.shape, strict=True):
            if count > MAX_COUNT or (count > 1 and not -MAX_STRIDE - 1 <= stride <= MAX_STRIDE):
                raise RuleError(f"{self}: stride {stride} and count {count} must fit int16 and uint16.")

    def _free_layout(self) -> Layout:
        """What one partition sees."""
        return Layout(self.shape[1:], self.strides[1:], self.offset % self.free_elements)

    def _strided(self, memory: np.ndarray, dtype: np.dtype, layout: Layout) -> np.ndarray:
        itemsize = self.dtype.itemsize
        strides = tuple([stride * itemsize for stride in layout.strides])
        return np.ndarray(layout.shape, dtype, memory, layout.offset * itemsize, strides)
