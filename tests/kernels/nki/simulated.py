"""Runs kernels as a device would, for a target and one or two cores: the runners that `kernels.nki.attention` takes."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import nki
import pytest

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"


def simulated(num_cores: int = 1, target: str = "trn2") -> Callable[..., Any]:
    """A runner by `nki.simulate`, AWS's where that is installed."""

    def run(kernel: Any, *arguments: Any) -> Any:
        with _target(target):
            return nki.simulate(kernel[num_cores])(*arguments)

    return run


class Traced:
    """A runner by the emulator alone, which knows more than a simulator; tests that take it are skipped without.

    Attributes:
        trace: of the last run.
    """

    def __init__(self, poison: float = math.nan, num_cores: int = 1, first_core: int = 0) -> None:
        self._machine = pytest.importorskip("nki_machine.run", reason="only the emulator traces and poisons")
        self._settings = {"poison": poison, "lnc": num_cores, "first_core": first_core}
        self.trace: Any = None

    def __call__(self, kernel: Any, *arguments: Any) -> Any:
        with _target("trn2"):
            result, self.trace = self._machine.run(kernel.func, *arguments, **self._settings)
        return result


@contextmanager
def _target(name: str) -> Iterator[None]:
    before = os.environ.get(TARGET)
    os.environ[TARGET] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[TARGET]
        else:
            os.environ[TARGET] = before
