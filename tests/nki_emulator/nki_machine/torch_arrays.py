"""Torch tensors as numpy arrays of the same memory, and back; imported once a caller brings one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

# Of equal width; numpy reads none of these from torch.
_BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
# NKI's float8_e4m3 has no name in torch; its finite values have the bits of e4m3fn's.
_TORCH_OF_NAME = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype not in _BITS:
        return tensor.numpy()
    bits, dtype = _BITS[tensor.dtype]
    return tensor.view(bits).numpy().view(dtype)


def as_torch(array: np.ndarray) -> torch.Tensor:
    dtype = _TORCH_OF_NAME.get(array.dtype.name)
    if dtype is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16 if array.itemsize == 2 else np.uint8)).view(dtype)
