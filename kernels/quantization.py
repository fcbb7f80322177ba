"""Numbers in few bits: how codes are chosen for a weight, and what they stand for. Knows no product.

Along the input GROUP numbers share a scale and a minimum, bfloat16: number = scale * code + minimum.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 32

Bits = Literal[8, 4]

# Of codes and then of scale and minimum, each the best for the others (Lloyd 1982): later ones change nothing of note.
_NUM_REFITS = 4
_MIDDLE = 128
# Numbers whose codes are chosen at once: what a core's cache holds.
_PIECE = 1 << 18
# What a scale is at least: groups of zeros have one, too.
_LEAST_SCALE = 1e-30


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out_features, in_features], in_features a multiple of GROUP.

    codes: uint8 [out_features, in_features], below 2^bits. scales: bfloat16 [out_features, in_features / GROUP].
    minimums: as scales; None = -128 scales, of 8 bits.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None

    def __getitem__(self, rows: slice | Tensor) -> "Codes":
        """Those of some of the weight's rows."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return Codes(self.codes[rows], self.scales[rows], minimums)

    def copy_(self, other: "Codes") -> None:
        """Take those of another weight of the same shape, into the tensors that are there."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)
        if self.minimums is not None and other.minimums is not None:
            self.minimums.copy_(other.minimums)

    def numbers(self) -> Tensor:
        """float32 [out_features, in_features]."""
        groups, scales = _groups(self.codes), self.scales.float()[..., None]
        if self.minimums is None:
            return (scales * (groups - _MIDDLE)).flatten(1)
        return (scales * groups + self.minimums.float()[..., None]).flatten(1)


def quantize(weight: Tensor, bits: Bits) -> Codes:
    """The codes of a weight [out_features, in_features], of any dtype.

    8 bits: the largest number of a group has code 255 or 1. 4 bits: scale and minimum are the least squares fit to the
    group, so that the sum of squared errors is small, not the largest error.
    """
    rows_a_piece = max(1, _PIECE // weight.shape[1])
    choose = _eight_bits if bits == 8 else _four_bits
    pieces = [choose(_groups(rows)) for rows in torch.split(weight, rows_a_piece)]
    codes, scales, minimums = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return Codes(codes, scales, minimums if bits == 4 else None)


def _eight_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _rounded(groups.abs().amax(-1, keepdim=True) / (_MIDDLE - 1)).clamp_min(_LEAST_SCALE)
    codes = (groups / scales).round_().clamp_(1 - _MIDDLE, _MIDDLE - 1).add_(_MIDDLE)
    return _stored(codes, scales, -_MIDDLE * scales)


def _four_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales, minimums = _rounded((high - low) / 15).clamp_min(_LEAST_SCALE), _rounded(low)
    codes = _nearest_codes(groups, scales, minimums)
    mean = groups.mean(-1, keepdim=True)
    for _ in range(_NUM_REFITS):
        mean_code = codes.mean(-1, keepdim=True)
        distance = codes - mean_code
        slope = (distance * (groups - mean)).sum(-1, keepdim=True) / distance.square().sum(-1, keepdim=True)
        scales = _rounded(slope.nan_to_num()).clamp_min(_LEAST_SCALE)
        minimums = _rounded(mean - scales * mean_code)
        codes = _nearest_codes(groups, scales, minimums)
    return _stored(codes, scales, minimums)


def _stored(codes: Tensor, scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return codes.to(torch.uint8).flatten(1), scales[..., 0].bfloat16(), minimums[..., 0].bfloat16()


def _nearest_codes(groups: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    return (groups - minimums).div_(scales).round_().clamp_(0, 15)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _groups(x: Tensor) -> Tensor:
    """[out_features, in_features] -> float32 [out_features, in_features / GROUP, GROUP]."""
    return x.float().reshape(len(x), -1, GROUP)
