"""A stored weight's products by the C++ kernels, bfloat16 on a CPU. Twin of `data_plane.models.linear.Linear`.

The weight is kept in panels of 64 outputs, as matrix instructions take them. A row's product does not depend on which
rows are beside it but for the instructions: tiles and vectors, and of vectors blocks of any height, sum in one order.
"""

from typing import Literal

import torch
from torch import Tensor

from blockplane.kernels.native.library import BOOL, INT, POINTER, function, is_there

PANEL = 64
DEPTH_MULTIPLE = 32

if is_there():
    _pack = function("pack_linear", POINTER, POINTER, INT, INT)
    _rows = function("packed_rows", POINTER, POINTER, POINTER, INT, INT)
    _product = (POINTER, INT, POINTER, POINTER, POINTER, INT, INT, INT, INT)
    _linear = {torch.bfloat16: function("linear_bf16", *_product), torch.float32: function("linear_float", *_product)}
    _largest = function("largest_outputs", POINTER, INT, POINTER, POINTER, INT, INT, INT)
    _gated = function("gated_linear", POINTER, INT, POINTER, POINTER, INT, INT, INT, BOOL)


def takes(weight: Tensor, *, is_gated: bool = False) -> bool:
    """Whether the kernels are there for a weight [out_features, in_features], which may be a gate above an up."""
    has_kernels = is_there() and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    fits = weight.shape[1] % DEPTH_MULTIPLE == 0 and not (is_gated and weight.shape[0] % (2 * PANEL))
    return has_kernels and fits


class NativeLinear:
    """See `Linear`; products are summed in float32 and rounded once, logits never."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a copy of a weight [out_features, in_features] that `takes` takes; `bias` [out_features]."""
        self.out_features, self.in_features = weight.shape
        num_panels = -(-self.out_features // PANEL)
        self._packed = torch.empty(num_panels * PANEL, self.in_features, dtype=torch.bfloat16)
        self._bias = None if bias is None else bias.float()
        # Asked of a tensor once: a step of one row asks for hundreds.
        self._weight_pointer = self._packed.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self.refill(weight, bias)

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        _pack(weight.contiguous().data_ptr(), self._packed.data_ptr(), self.out_features, self.in_features)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.bfloat16)

    def logits(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.float32)

    def largest(self, x: Tensor) -> Tensor:
        assert self._bias is None, "the output projection has none"
        ids = torch.empty(len(x), dtype=torch.int64)
        _largest(
            x.data_ptr(), x.stride(0), self._weight_pointer, ids.data_ptr(), len(x), self.in_features,
            self.out_features,
        )  # fmt: skip
        return ids

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, out_features = len(x), self.out_features
        output = torch.empty((num_rows, out_features), dtype=dtype)
        _linear[dtype](
            x.data_ptr(), x.stride(0), self._weight_pointer, self._bias_pointer, output.data_ptr(), out_features,
            num_rows, self.in_features, out_features,
        )  # fmt: skip
        return output

    def gated(self, x: Tensor, activation: Literal["gelu_tanh", "silu"]) -> Tensor:
        num_rows, num_outputs = len(x), self.out_features // 2
        output = torch.empty((num_rows, num_outputs), dtype=torch.bfloat16)
        _gated(
            x.data_ptr(), x.stride(0), self._weight_pointer, output.data_ptr(), num_rows, self.in_features,
            num_outputs, activation == "gelu_tanh",
        )  # fmt: skip
        return output

    def embed(self, ids: Tensor) -> Tensor:
        output = torch.empty((len(ids), self.in_features), dtype=torch.bfloat16)
        _rows(self._weight_pointer, ids.data_ptr(), output.data_ptr(), len(ids), self.in_features)
        return output
