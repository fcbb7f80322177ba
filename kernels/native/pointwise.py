"""Norms, residual sums and heads by the C++ kernels, bfloat16 on a CPU. Twins of models.norm and models.heads."""

from typing import Self

import torch
from torch import Tensor

from blockplane.kernels.native.library import BOOL, FLOAT, INT, POINTER, function, is_there

SIZE_MULTIPLE = 16
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 32, 1024

if is_there():
    _norm_columns = (POINTER, FLOAT, BOOL, POINTER, INT, INT)
    _rms_norm = function("rms_norm", POINTER, *_norm_columns)
    _add_rms_norm = function("add_rms_norm", POINTER, POINTER, POINTER, *_norm_columns)
    _split_heads = function(
        "split_heads", POINTER, POINTER, FLOAT, BOOL, POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT
    )


def takes_norm(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels are there for a norm's weight [..., size] over numbers of `dtype`."""
    has_kernels = is_there() and weight.device.type == "cpu" and dtype == torch.bfloat16
    return has_kernels and weight.shape[-1] % SIZE_MULTIPLE == 0


def takes_heads(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels are there for heads of so many numbers."""
    has_kernels = is_there() and device.type == "cpu" and dtype == torch.bfloat16
    return has_kernels and head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM


class NativeRMSNorm:
    """See `RMSNorm`."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype, *, adds_one: bool) -> None:
        self._dtype, self._adds_one, self._eps = dtype, adds_one, eps
        self.weight = weight.clone()
        self.pointer = self.weight.data_ptr()
        self.refill(weight)

    def refill(self, weight: Tensor) -> None:
        self.weight.copy_(weight + 1.0 if self._adds_one else weight.to(self._dtype))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        size = x.shape[-1]
        _rms_norm(
            x.data_ptr(), self.pointer, self._eps, not self._adds_one, output.data_ptr(), x.numel() // size,
            size,
        )  # fmt: skip
        return output

    def after(self, hidden: Tensor, x: Tensor, x_norm: Self | None) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(hidden)
        _add_rms_norm(
            hidden.data_ptr(), x.data_ptr(), None if x_norm is None else x_norm.pointer,
            self.pointer, self._eps, not self._adds_one, normed.data_ptr(), *hidden.shape,
        )  # fmt: skip
        return hidden, normed


class NativeHeads:
    """See `Heads`."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: tuple[Tensor, float, bool] | None,
        dtype: torch.dtype,
    ) -> None:
        self._sizes = num_heads, num_kv_heads, head_dim
        self._eps, self._adds_one = (0.0, False) if norm is None else norm[1:]
        self._norm = None if norm is None else NativeRMSNorm(norm[0], self._eps, dtype, adds_one=self._adds_one)

    def refill(self, norm_weight: Tensor | None) -> None:
        if self._norm is not None and norm_weight is not None:
            self._norm.refill(norm_weight)

    @staticmethod
    def rotation(table: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return table, positions

    def __call__(self, qkv: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = self._sizes
        table, positions = rotation
        num_tokens = len(positions)
        query = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.bfloat16)
        key, value = torch.empty((2, num_tokens, num_kv_heads, head_dim), dtype=torch.bfloat16)
        _split_heads(
            qkv.data_ptr(), None if self._norm is None else self._norm.pointer, self._eps,
            not self._adds_one, table.data_ptr(), positions.data_ptr(), query.data_ptr(), key.data_ptr(),
            value.data_ptr(), num_tokens, *self._sizes,
        )  # fmt: skip
        return query, key, value
