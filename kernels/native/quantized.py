"""A quantized weight's products by the C++ kernels, bfloat16 on a CPU. Twin of `data_plane.models.quantized`.

Few rows are multiplied with the codes as they are, and reading these is what takes time. AVX512 does so in integers, of
16 bits for the activations. For many rows a panel's numbers are rounded to bfloat16 first, as those of an unquantized
weight are.
"""

from typing import Literal

import torch
from torch import Tensor

from blockplane.kernels.native.library import BOOL, INT, POINTER, function, is_there
from blockplane.kernels.native.linear import PANEL, takes
from blockplane.kernels.quantization import Bits, quantize

__all__ = ["NativeQuantizedLinear", "takes"]

# Numbers whose codes are chosen at once.
_PIECE = 1 << 22

if is_there():
    _panel_bytes = function("quantized_panel_bytes", INT, INT, returns=INT)
    _pack = function("pack_quantized", POINTER, POINTER, POINTER, POINTER, INT, INT, INT)
    _rows = function("quantized_rows", POINTER, POINTER, POINTER, INT, INT, INT)
    _product = (POINTER, INT, POINTER, POINTER, POINTER, INT, INT, INT, INT, INT)
    _linear = {
        torch.bfloat16: function("quantized_linear_bf16", *_product),
        torch.float32: function("quantized_linear_float", *_product),
    }
    _largest = function("largest_quantized_outputs", POINTER, INT, POINTER, POINTER, INT, INT, INT, INT)
    _gated = function("gated_quantized_linear", POINTER, INT, POINTER, POINTER, INT, INT, INT, BOOL, INT)


class NativeQuantizedLinear:
    """See `Linear`; products are summed in float32 and rounded once, logits never."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Bits) -> None:
        """Quantize a weight [out_features, in_features] that `takes` takes; `bias` [out_features]."""
        self.out_features, self.in_features = weight.shape
        self._bits: Bits = bits
        num_panels = -(-self.out_features // PANEL)
        self._packed = torch.empty(num_panels, _panel_bytes(self.in_features, bits), dtype=torch.uint8)
        self._bias = None if bias is None else bias.float()
        self.refill(weight, bias)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        panels_a_piece = max(1, _PIECE // (PANEL * self.in_features))
        pieces = torch.split(weight, panels_a_piece * PANEL)
        for piece, packed in zip(pieces, torch.split(self._packed, panels_a_piece), strict=True):
            codes = quantize(piece, self._bits)
            minimums = None if codes.minimums is None else codes.minimums.data_ptr()
            _pack(
                codes.codes.data_ptr(), codes.scales.data_ptr(), minimums, packed.data_ptr(), len(piece),
                self.in_features, self._bits,
            )  # fmt: skip
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.bfloat16)

    def logits(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows = x.shape[0]
        output = torch.empty(num_rows, self.out_features, dtype=dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        _linear[dtype](
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), bias, output.data_ptr(), self.out_features, num_rows,
            self.in_features, self.out_features, self._bits,
        )  # fmt: skip
        return output

    def largest(self, x: Tensor) -> Tensor:
        assert self._bias is None, "no output projection has one"
        ids = torch.empty(x.shape[0], dtype=torch.int64)
        _largest(
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), ids.data_ptr(), x.shape[0], self.in_features,
            self.out_features, self._bits,
        )  # fmt: skip
        return ids

    def gated(self, x: Tensor, activation: Literal["gelu_tanh", "silu"]) -> Tensor:
        num_rows, num_outputs = x.shape[0], self.out_features // 2
        output = torch.empty(num_rows, num_outputs, dtype=torch.bfloat16)
        _gated(
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), output.data_ptr(), num_rows, self.in_features,
            num_outputs, activation == "gelu_tanh", self._bits,
        )  # fmt: skip
        return output

    def embed(self, ids: Tensor) -> Tensor:
        output = torch.empty(len(ids), self.in_features, dtype=torch.bfloat16)
        _rows(self._packed.data_ptr(), ids.data_ptr(), output.data_ptr(), len(ids), self.in_features, self._bits)
        return output
