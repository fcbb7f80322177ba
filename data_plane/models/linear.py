"""The product of activations with a stored weight, kept in the order that its device multiplies fastest."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

_TILE = 64
# Up to here a sum per row beats casting the weight to float32 (AVX2, one core: 1.5 times at 1 to 4 rows, 1.2 at 8).
_MAX_SUMMED_ROWS = 8
_TILES_PER_SUM = 256
_TILES_PER_CAST = 8
_SUM_MODE = 0


class Linear:
    """x @ weight.T + bias, by torch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take a weight [out_features, in_features] and a bias [out_features]."""
        self._weight, self._bias = weight, bias

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take others of the same shapes, into the tensors that are there."""
        self._weight.copy_(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], in the dtype of `x`."""
        return functional.linear(x, self._weight, self._bias)

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [num_ids] -> the weight's rows [num_ids, in_features]."""
        return functional.embedding(ids, self._weight)


class TiledLinear(Linear):
    """The same in bfloat16 on a CPU that has no bfloat16 arithmetic.

    There torch's product multiplies bfloat16 an element at a time: slower than memory for one row, and eight times
    slower than float32 for a hundred. So the weight is kept as [num_tiles, in_features, 64], whose lines run over
    outputs. For few rows, the outputs of a tile are a weighted sum of its lines, which torch's embedding bag reckons in
    float32 at memory speed; for many, a few tiles at a time are cast to float32, small enough to stay in the cache.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take what `Linear` takes; out_features is a multiple of 64."""
        super().__init__(_tiled(weight).contiguous(), bias)
        self._long_parts = torch.split(self._weight, _TILES_PER_SUM)
        self._short_parts = torch.split(self._weight, _TILES_PER_CAST)

    def refill(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().refill(_tiled(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= _MAX_SUMMED_ROWS:
            outputs = [_sum(x, tiles) for tiles in self._long_parts]
        else:
            rows = x.float()
            outputs = [_multiply(rows, tiles) for tiles in self._short_parts]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        output = output.to(x.dtype)
        return output if self._bias is None else output + self._bias

    def embed(self, ids: Tensor) -> Tensor:
        return self._weight[ids // _TILE, :, ids % _TILE]


def fastest_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Choose by device, dtype and shape; a tiled weight is a copy."""
    lacks_arithmetic = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not _HAS_BF16_ARITHMETIC
    tiled = lacks_arithmetic and weight.shape[0] % _TILE == 0
    return TiledLinear(weight, bias) if tiled else Linear(weight, bias)


def _tiled(weight: Tensor) -> Tensor:
    """[num_tiles * 64, in_features] -> [num_tiles, in_features, 64], a view."""
    return weight.view(-1, _TILE, weight.shape[1]).transpose(1, 2)


def _sum(x: Tensor, tiles: Tensor) -> Tensor:
    """bfloat16 [num_rows, in_features] x [num_tiles, in_features, 64] -> [num_rows, num_tiles * 64]."""
    lines, bags = _bags(len(tiles), *x.shape)
    factors = x.expand(len(tiles), -1, -1).flatten()
    sums = torch.embedding_bag(tiles.view(-1, _TILE), lines, bags, mode=_SUM_MODE, per_sample_weights=factors)[0]
    return sums.view(len(tiles), -1, _TILE).transpose(0, 1).flatten(1)


def _multiply(rows: Tensor, tiles: Tensor) -> Tensor:
    """The same product from float32 rows, in float32."""
    return torch.matmul(rows, tiles.float()).transpose(0, 1).flatten(1)


@lru_cache(maxsize=64)
def _bags(num_tiles: int, num_rows: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Which lines are summed, int32, and where each (tile, row)'s sum begins among them."""
    lines = torch.arange(num_tiles * in_features, dtype=torch.int32).view(num_tiles, 1, in_features)
    starts = torch.arange(0, num_tiles * num_rows * in_features, in_features, dtype=torch.int32)
    return lines.expand(-1, num_rows, -1).flatten(), starts


_HAS_BF16_ARITHMETIC: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
