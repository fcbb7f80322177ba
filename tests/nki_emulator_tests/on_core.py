"""Tiles on a core that runs outside of any kernel, so that a test can look at each instruction by itself."""

import nki.language as nl
import numpy as np
import pytest

from nki_machine import cores
from nki_machine.cores import Machine
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor


def on_generation(generation: int):
    with cores.running(Machine(1, generation).cores[0]), np.errstate(all="ignore"):
        yield cores.current()


def tile(values: object, dtype: object = None, buffer: object = nl.sbuf) -> NkiTensor:
    """A tensor with these values, which nothing in the trace wrote."""
    array = np.array(values, dtype=np.float32 if dtype is None else dtype)
    tensor = nl.ndarray(array.shape, dtype=array.dtype, buffer=buffer)
    tensor.write(array)
    return tensor


def empty(*shape: int, dtype: object = np.float32, buffer: object = nl.sbuf) -> NkiTensor:
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def psum(*shape: int, dtype: object = np.float32) -> NkiTensor:
    return empty(*shape, dtype=dtype, buffer=nl.psum)


def hbm(*shape: int, dtype: object = np.float32) -> NkiTensor:
    return empty(*shape, dtype=dtype, buffer=nl.shared_hbm)


def refuses(rule: str):
    """The instruction inside breaks a rule; `rule` is a regular expression of its sentence."""
    return pytest.raises(RuleError, match=rule)
