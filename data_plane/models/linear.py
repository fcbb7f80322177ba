"""The product of activations with a stored weight, in the kind that its device multiplies fastest. Knows no layer."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from blockplane.data_plane.models.config import Activation
from blockplane.kernels.native.linear import NativeLinear, takes


class Linear(Protocol):
    """x @ weight.T + bias."""

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take others of the same shapes, into the tensors that are there."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], in the dtype of `x`."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """The same in float32."""
        ...

    def largest(self, x: Tensor) -> Tensor | None:
        """Which of each row's logits is the largest, the first of equals, or -1 where one is not finite.

        [num_rows, in_features] -> int64 [num_rows]; None = that is no cheaper than the logits.
        """
        ...

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(x @ gate.T) * (x @ up.T), of a weight that is gate above up, without bias.

        [num_rows, in_features] -> [num_rows, out_features / 2]
        """
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [num_ids] -> the weight's rows [num_ids, in_features]."""
        ...


class TorchLinear:
    """See `Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take a weight [out_features, in_features] and a bias [out_features]."""
        self._weight, self._bias = weight, bias

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight.copy_(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def logits(self, x: Tensor) -> Tensor:
        return self(x).float()

    def largest(self, _x: Tensor) -> Tensor | None:
        return None

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        gate, up = self(x).chunk(2, dim=-1)
        return (functional.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else functional.silu(gate)) * up

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._weight)


def fastest_linear(weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> Linear:
    """Choose by device, dtype and shape; the native one keeps a copy. `is_gated`: whether it is called so."""
    return NativeLinear(weight, bias) if takes(weight, is_gated=is_gated) else TorchLinear(weight, bias)
