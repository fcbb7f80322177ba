"""`nki` for CPUs: `jit` and `simulate`; the instructions are in nki.isa, the language in nki.language.

Not AWS's package: an emulator after its public documentation. See README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nki.language import NKIObject
from nki_machine import cores
from nki_machine.run import run

__all__ = ["Kernel", "NKIObject", "jit", "simulate"]
__version__ = "0.6.0+emulated"


class Kernel:
    """A kernel, not yet called.

    Attributes:
        func: the decorated function. lnc: cores to run on; None, which means one, until brackets say.
    """

    def __init__(self, func: Callable[..., Any], lnc: int | None = None) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.lnc = lnc

    def __getitem__(self, lnc: int | tuple[int]) -> Kernel:
        return Kernel(self.func, lnc[0] if isinstance(lnc, tuple) else lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside of a kernel, a part of it; outside, a run, as with NKI_SIMULATOR=1."""
        if cores.is_running():
            return self.func(*args, **kwargs)
        return run(self, *args, **kwargs)[0]


def jit(fn: Callable[..., Any] | None = None) -> Any:
    """Makes a kernel of a function: `@nki.jit` or `@nki.jit()`."""
    return Kernel if fn is None else Kernel(fn)


def simulate(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `kernel` on this CPU, numpy or torch in and out, inputs changed in place."""
    whole = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    return functools.wraps(whole.func)(lambda *args, **kwargs: run(whole, *args, **kwargs)[0])
