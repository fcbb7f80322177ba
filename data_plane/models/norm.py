"""RMS norms, and the residual additions that come before them; knows neither layers nor checkpoints."""

from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from blockplane.kernels.native.pointwise import NativeRMSNorm, takes_norm


class Norm(Protocol):
    """x / rms(x) * weight over the last axis, reckoned in float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    weight: Tensor
    """As it is multiplied by."""

    def refill(self, weight: Tensor) -> None:
        """Take another of the same shape."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def after(self, hidden: Tensor, x: Tensor, x_norm: Self | None) -> tuple[Tensor, Tensor]:
        """The residual sum and its norm: hidden + x, where `x_norm` is not None hidden + x_norm(x).

        Args:
            hidden, x: [num_tokens, size]; `hidden` may be overwritten. x_norm: a norm of this one's kind.

        Returns:
            The sum, and the norm of it.
        """
        ...


class RMSNorm:
    """See `Norm`. Families differ in where they round to the model's dtype: Gemma, which `adds_one`, after the product
    with 1 + weight, the others before the product with weight.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype, *, adds_one: bool) -> None:
        self._adds_one, self._eps = adds_one, eps
        self.weight = weight + 1.0 if adds_one else weight.to(dtype)

    def refill(self, weight: Tensor) -> None:
        self.weight.copy_(weight + 1.0 if self._adds_one else weight)

    def __call__(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), x.shape[-1:], eps=self._eps)
        if self._adds_one:
            return (normed * self.weight).to(x.dtype)
        return normed.to(x.dtype) * self.weight

    def after(self, hidden: Tensor, x: Tensor, x_norm: Self | None) -> tuple[Tensor, Tensor]:
        hidden = hidden + (x if x_norm is None else x_norm(x))
        return hidden, self(hidden)


def fastest_norm(weight: Tensor, eps: float, dtype: torch.dtype, *, adds_one: bool) -> Norm:
    """Choose by device, dtype and size."""
    kind = NativeRMSNorm if takes_norm(weight, dtype) else RMSNorm
    return kind(weight, eps, dtype, adds_one=adds_one)
