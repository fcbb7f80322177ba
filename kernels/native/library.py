"""The library of the C++ kernels, in the variant for this CPU. Knows no kernel.

It is built with the package, once for each set of instructions; without a compiler, or on a CPU that has none of them,
there is none, and torch computes.
"""

import ctypes
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

POINTER, INT, FLOAT, BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_bool

VARIANTS = {
    "_amx": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512vl", "avx512dq", "avx512bw"},
    "_avx512": {"avx512_bf16", "avx512_vnni", "avx512vl", "avx512dq", "avx512bw"},
    "_avx2": {"avx2", "fma", "f16c"},
}
"""What each needs of a CPU, as Linux calls it; the best first."""


def runnable() -> list[str]:
    """The variants that were built and that this CPU can run, the best first."""
    flags = _cpu_flags()
    return [name for name, needed in VARIANTS.items() if _path(name).exists() and needed <= flags]


def load(name: str) -> ctypes.CDLL | None:
    """One that is runnable; None = Linux does not let this process have its registers."""
    library = ctypes.CDLL(str(_path(name)))
    return None if name == "_amx" and not library.request_tiles() else library


def _path(name: str) -> Path:
    return Path(__file__).with_name(f"{name}{EXTENSION_SUFFIXES[0]}")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


_library = next(filter(None, map(load, runnable())), None)


def is_there() -> bool:
    return _library is not None


def function(name: str, *argument_types: Any, returns: Any = None) -> Callable[..., Any]:
    """One of the library's, which computes without Python's lock; only where `is_there`."""
    found = getattr(_library, name)
    found.argtypes, found.restype = argument_types, returns
    return found  # type: ignore[no-any-return]


def set_num_threads(num_threads: int) -> None:
    """How many threads the kernels run on from now on, the caller's among them."""
    if _library is not None:
        _library.set_num_threads(num_threads)
