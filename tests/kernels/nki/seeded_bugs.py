"""Puts a named bug into a kernel's source for as long as a test lasts; knows no kernel and no case."""

import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "blockplane.kernels.nki"


@dataclass(frozen=True, slots=True)
class Bug:
    """A change of one place of the source.

    Attributes:
        name: what is wrong, in a few words. module: of `kernels/nki`.
        old, new: text that stands in the module once, and what is there instead.
        case: the shape that it must show on.
    """

    name: str
    module: str
    old: str
    new: str
    case: str


@contextmanager
def seeded(bug: Bug) -> Iterator[None]:
    """Has every function of the bug's module run the changed source, wherever it was imported to.

    Raises AssertionError where `old` does not stand in the module exactly once.
    """
    module = importlib.import_module(f"{PACKAGE}.{bug.module}")
    path = str(module.__file__)
    source = Path(path).read_text()
    count = source.count(bug.old)
    assert count == 1, (
        f"{bug.name}: {bug.old!r} stands {count} times in {bug.module}.py; name a place that is there once"
    )
    changed = types.ModuleType(module.__name__)
    exec(compile(source.replace(bug.old, bug.new), path, "exec"), vars(changed))
    with pytest.MonkeyPatch.context() as patch:
        for name, new in vars(changed).items():
            _replace(patch, module, name, new, path)
        yield


def _replace(patch: pytest.MonkeyPatch, module: types.ModuleType, name: str, new: Any, path: str) -> None:
    """A function and a class's methods get the new ones' code, a constant the new value."""
    old = getattr(module, name, None)
    if isinstance(new, int | float | tuple) and old != new:
        patch.setattr(module, name, new)
    pairs = [(vars(old).get(method), each) for method, each in vars(new).items()] if isinstance(new, type) else []
    for before, after in [*pairs, (old, new)]:
        old_function, new_function = _function(before), _function(after)
        if old_function is not None and new_function is not None and old_function.__code__.co_filename == path:
            patch.setattr(old_function, "__code__", new_function.__code__)


def _function(value: Any) -> types.FunctionType | None:
    """A plain function, or what `nki.jit` holds."""
    value = getattr(value, "func", value)
    return value if isinstance(value, types.FunctionType) else None
