"""Computations bound to their shapes without a compiler: what has another shape than it was built for is an error."""

from typing import Any

import torch

from blockplane.data_plane.backends.backend import Compute


def shapes(value: Any) -> Any:
    """Of every tensor in inputs of a graph; other values stand for themselves."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple):
        return tuple(map(shapes, value))
    if hasattr(value, "slot_mapping"):
        return type(value), *(shapes(getattr(value, name)) for name in value.__slots__)
    return value


def bound(compute: Compute, inputs: tuple[Any, ...]) -> Compute:
    """A `Backend.build`."""
    built_for = shapes(inputs)

    def run(*inputs: Any) -> Any:
        assert shapes(inputs) == built_for, "a step has another shape than its bucket was built for"
        return compute(*inputs)

    run(*inputs)
    return run
