"""Callers' arrays as device memory, and results as arrays: numpy or torch; knows no kernel.

Memory is shared wherever the array is contiguous, so what a kernel writes to an argument the caller sees at once.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import ml_dtypes
import numpy as np

from nki_machine.cores import Machine
from nki_machine.dtypes import as_dtype
from nki_machine.errors import RuleError
from nki_machine.layout import Layout
from nki_machine.memory import MemoryRegion, Storage
from nki_machine.tensor import NkiTensor


class NKIObject:
    """The base of the classes whose instances a kernel takes."""

    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class Arguments:
    """The arguments of one run.

    Attributes:
        has_torch: whether any is a torch tensor, so that new results are too.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._arrays: dict[int, tuple[Any, Storage]] = {}
        self.has_torch = False

    def to_device(self, value: Any) -> Any:
        """`value` with its arrays as tensors in HBM; the same array is the same storage.

        Raises:
            RuleError: an array of a dtype or a shape that NKI lacks, or a list.
        """
        if isinstance(value, np.ndarray) or _is_torch(value):
            return self._adopted(value)
        if isinstance(value, tuple):
            return tuple(self.to_device(item) for item in value)
        if isinstance(value, list):
            raise RuleError("A kernel takes no lists: pass a tuple.")
        if isinstance(value, NKIObject):
            device_value = copy.copy(value)
            device_value.__dict__.update({name: self.to_device(item) for name, item in vars(value).items()})
            return device_value
        return value

    def to_caller(self, value: Any) -> Any:
        """A kernel's result: an argument is the caller's own array, a new tensor a new one.

        Raises:
            RuleError: a result that is neither an argument nor in shared HBM, or only a part of its storage.
        """
        if isinstance(value, tuple | list):
            return type(value)(self.to_caller(item) for item in value)
        if value is None:
            return None
        if not isinstance(value, NkiTensor):
            raise RuleError(f"A kernel returns tensors, and this one returned {value!r}.")
        storage = value.storage
        if storage.is_argument:
            if value.layout != Layout.dense(storage.shape):
                raise RuleError(f"{value} is returned, a view of an argument: return the argument itself.")
            return self._arrays[storage.id][0]
        if storage.buffer is not MemoryRegion.shared_hbm:
            raise RuleError(f"{value} is returned, and a result must be in nl.shared_hbm.")
        if value.layout != Layout.dense(value.shape) or value.size != storage.array.size:
            raise RuleError(f"{value} is returned, which is a part of its storage: return the whole tensor.")
        return _as_torch(value.read()) if self.has_torch else value.read()

    def write_back(self) -> None:
        """Copies what was written to arguments that are not contiguous, which alone have memory of their own here."""
        for array, storage in self._arrays.values():
            if not storage.is_written:
                continue
            if _is_torch(array):
                if not array.is_contiguous():
                    array.copy_(_as_torch(storage.array).view(array.dtype).reshape(array.shape))
            elif not array.flags.c_contiguous:
                array[...] = storage.array.view(array.dtype).reshape(array.shape)

    def _adopted(self, array: Any) -> NkiTensor:
        for own, storage in self._arrays.values():
            if own is array:
                return NkiTensor(storage, Layout.dense(storage.shape))
        if not array.ndim:
            raise RuleError("An argument without dimensions is no tensor of NKI: pass shape (1,) or a Python number.")
        self.has_torch = self.has_torch or _is_torch(array)
        values = self._of_target(_as_numpy(array) if _is_torch(array) else array)
        as_dtype(values.dtype, self._machine.generation)
        flat = np.ascontiguousarray(values).reshape(-1)
        storage = self._machine.adopt(flat, tuple(array.shape), f"argument {len(self._arrays)}")
        self._arrays[storage.id] = (array, storage)
        return NkiTensor(storage, Layout.dense(storage.shape))

    def _of_target(self, values: np.ndarray) -> np.ndarray:
        """Before Trn3 there is one float8_e4m3, whatever the caller calls its bits."""
        if self._machine.generation < 4 and values.dtype == ml_dtypes.float8_e4m3fn:
            return values.view(ml_dtypes.float8_e4m3)
        return values


def _is_torch(value: Any) -> bool:
    """Asks torch only where someone imported it: numpy alone is enough for a run."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _as_numpy(tensor: Any) -> np.ndarray:
    from nki_machine.torch_arrays import as_numpy

    return as_numpy(tensor)


def _as_torch(array: np.ndarray) -> Any:
    from nki_machine.torch_arrays import as_torch

    return as_torch(array)
