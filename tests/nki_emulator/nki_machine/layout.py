"""Shapes and strides: what a view does to (shape, strides, offset); knows neither memory nor partitions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nki_machine.errors import RuleError


@dataclass(frozen=True, slots=True)
class Layout:
    """Element `index` lies at `offset + sum(strides * index)`, all counted in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def dense(cls, shape: tuple[int, ...]) -> Layout:
        """Row-major from the beginning."""
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(shape, strides)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest element that it reaches."""
        low = high = self.offset
        for stride, count in zip(self.strides, self.shape, strict=True):
            if stride < 0:
                low += stride * (count - 1)
            else:
                high += stride * (count - 1)
        return low, high

    def is_dense(self) -> bool:
        """Whether it is row-major without gaps, wherever it begins."""
        expected = 1
        for stride, count in zip(reversed(self.strides), reversed(self.shape), strict=True):
            if count > 1 and stride != expected:
                return False
            expected *= count
        return True

    def run(self) -> int:
        """Elements that lie one after the other before the first gap."""
        run = 1
        for stride, count in zip(reversed(self.strides), reversed(self.shape), strict=True):
            if count > 1 and stride != run:
                break
            run *= count
        return run

    def axis(self, dim: int) -> int:
        """A dimension's number, counted from the end when negative.

        Raises:
            RuleError: there is no such dimension.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise RuleError(f"Dimension {dim} of a tensor of shape {self.shape} does not exist.")
        return dim % len(self.shape)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> Layout:
        if not 0 <= start < end <= self.shape[dim] or step < 1:
            raise RuleError(
                f"slice: {start}:{end}:{step} of dimension {dim} of {self.shape} must satisfy 0 <= start < end <= "
                f"{self.shape[dim]} and step >= 1."
            )
        count = (end - start + step - 1) // step
        return Layout(
            _with(self.shape, dim, count),
            _with(self.strides, dim, self.strides[dim] * step),
            self.offset + start * self.strides[dim],
        )

    def squeeze(self, dim: int) -> Layout:
        if self.shape[dim] != 1:
            raise RuleError(f"squeeze_dim: dimension {dim} of {self.shape} must have size 1.")
        return replace(self, shape=_without(self.shape, dim), strides=_without(self.strides, dim))

    def expand(self, dim: int) -> Layout:
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        # As dense as it can be: what follows, once more.
        stride = self.shape[dim] * self.strides[dim] if dim < len(self.shape) else 1
        return replace(self, shape=shape, strides=(*self.strides[:dim], stride, *self.strides[dim:]))

    def permute(self, dims: tuple[int, ...]) -> Layout:
        if sorted(dims) != list(range(len(self.shape))):
            raise RuleError(
                f"permute: {dims} must be a permutation of the {len(self.shape)} dimensions of {self.shape}."
            )
        return replace(
            self, shape=tuple(self.shape[dim] for dim in dims), strides=tuple(self.strides[dim] for dim in dims)
        )

    def broadcast(self, dim: int, size: int) -> Layout:
        if self.shape[dim] != 1 or size < 1:
            raise RuleError(f"broadcast: dimension {dim} of {self.shape} must have size 1 to become {size}.")
        return replace(self, shape=_with(self.shape, dim, size), strides=_with(self.strides, dim, 0))

    def split(self, dim: int, shape: tuple[int, ...]) -> Layout:
        known = math.prod(count for count in shape if count != -1)
        if shape.count(-1) > 1 or known < 1 or (-1 in shape and self.shape[dim] % known):
            raise RuleError(f"reshape_dim: {shape} does not divide dimension {dim} of {self.shape}.")
        whole = tuple(self.shape[dim] // known if count == -1 else count for count in shape)
        if math.prod(whole) != self.shape[dim]:
            raise RuleError(f"reshape_dim: {shape} has not the {self.shape[dim]} elements of dimension {dim}.")
        strides = tuple(self.strides[dim] * stride for stride in Layout.dense(whole).strides)
        return replace(
            self,
            shape=(*self.shape[:dim], *whole, *self.shape[dim + 1 :]),
            strides=(*self.strides[:dim], *strides, *self.strides[dim + 1 :]),
        )

    def flatten(self, start_dim: int, end_dim: int) -> Layout:
        if not 0 <= start_dim <= end_dim < len(self.shape):
            raise RuleError(f"flatten_dims: {start_dim}..{end_dim} of {self.shape} is no range of dimensions.")
        merged = (*self.shape[:start_dim], math.prod(self.shape[start_dim : end_dim + 1]), *self.shape[end_dim + 1 :])
        inner = Layout(self.shape[start_dim : end_dim + 1], self.strides[start_dim : end_dim + 1])
        flat = inner.reshape((inner.size,))
        return replace(
            self, shape=merged, strides=(*self.strides[:start_dim], *flat.strides, *self.strides[end_dim + 1 :])
        )

    def reshape(self, shape: tuple[int, ...]) -> Layout:
        """Another shape of the same elements in the same order.

        Raises:
            RuleError: their number differs, or a new dimension would need two strides.
        """
        if math.prod(shape) != self.size or min(shape, default=1) < 1:
            raise RuleError(f"reshape: {shape} has not the {self.size} elements of {self.shape}.")
        runs = _uniform_runs(self)
        strides: list[int] = []
        count, stride = runs.pop() if runs else (1, 1)
        for size in reversed(shape):
            if count == 1 and size > 1:
                count, stride = runs.pop()
            if count % size:
                raise RuleError(
                    f"reshape: {self.shape} with strides {self.strides} cannot become {shape} without a copy."
                )
            strides.append(stride)
            count, stride = count // size, stride * size
        return replace(self, shape=shape, strides=tuple(reversed(strides)))


def _uniform_runs(layout: Layout) -> list[tuple[int, int]]:
    """(count, stride) of the dimensions, those that one stride walks merged; sizes of 1 left out."""
    runs: list[tuple[int, int]] = []
    for count, stride in zip(layout.shape, layout.strides, strict=True):
        if count == 1:
            continue
        if runs and runs[-1][1] == count * stride:
            runs[-1] = (runs[-1][0] * count, stride)
        else:
            runs.append((count, stride))
    return runs


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])
