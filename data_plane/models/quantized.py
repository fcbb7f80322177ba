"""The product of activations with a weight that is kept in few bits, and which weights those are. Knows no layer."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blockplane.data_plane.models.linear import Linear, TorchLinear, fastest_linear
from blockplane.kernels.native.quantized import NativeQuantizedLinear, takes
from blockplane.kernels.quantization import GROUP, Bits, quantize

# Numbers that are converted at once: what a core's cache holds.
_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits of a weight's numbers; None = as they are.

    sensitive: of the vocabulary's matrices, and of queries, keys and values. Of Gemma 3 270M the values alone, 2 % of
    the layers' numbers, cost as much accuracy in 4 bits as all of the MLPs' first half.
    others: of all other products.
    """

    sensitive: Bits | None = None
    others: Bits | None = None


WIDTHS = {"none": Widths(), "int8": Widths(8, 8), "int4": Widths(8, 4)}
"""By the setting `quantize`."""


class TorchQuantizedLinear(TorchLinear):
    """See `Linear`. One piece of the weight after another becomes float32: slow, but in any dtype.

    A code takes a byte, whatever its bits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Bits) -> None:
        """Quantize a weight [out_features, in_features], in_features a multiple of GROUP; `bias` [out_features]."""
        self._bits: Bits = bits
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.float()
        self._codes = quantize(weight, bits)

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._codes.copy_(quantize(weight, self._bits))
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.logits(x).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        out_features, in_features = self._codes.codes.shape
        x, step = x.float(), max(1, _PIECE // in_features)
        pieces = (self._codes[start : start + step] for start in range(0, out_features, step))
        products = torch.cat([functional.linear(x, piece.numbers()) for piece in pieces], dim=1)
        return products if self._bias is None else products + self._bias

    def embed(self, ids: Tensor) -> Tensor:
        return self._codes[ids].numbers().to(self._dtype)


def linear_in(bits: Bits | None, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> Linear:
    """The fastest kind whose weight has numbers of so many bits; None = as they are.

    A weight whose rows are no whole groups stays as it is.
    """
    if bits is None or weight.shape[1] % GROUP:
        return fastest_linear(weight, bias, is_gated=is_gated)
    kind = NativeQuantizedLinear if takes(weight, is_gated=is_gated) else TorchQuantizedLinear
    return kind(weight, bias, bits)
