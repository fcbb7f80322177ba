"""From a layer's fused projection to its queries, keys and values: normed per head, rotated. Knows no attention."""

from typing import Protocol

import torch
from torch import Tensor

from blockplane.data_plane.models.norm import RMSNorm
from blockplane.data_plane.models.rope import rotate
from blockplane.kernels.native.pointwise import NativeHeads, takes_heads


class Heads(Protocol):
    """One layer's."""

    def refill(self, norm_weight: Tensor | None) -> None:
        """Take another norm of the same shape."""

    @staticmethod
    def rotation(table: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """What a forward's layers of one rope turn by: once for them all, from `rope.rotary_table`."""
        ...

    def __call__(self, qkv: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> query [num_tokens, num_heads, head_dim]; key and
        value [num_tokens, num_kv_heads, head_dim]."""
        ...


class TorchHeads:
    """See `Heads`."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: tuple[Tensor, float, bool] | None,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            norm: of queries and keys, float32 [num_heads + num_kv_heads, head_dim], its epsilon, and whether it adds
                one; None = there is none.
        """
        self._shape = (num_heads + 2 * num_kv_heads, head_dim)
        self._num_heads, self._num_rotated = num_heads, num_heads + num_kv_heads
        self._norm = None if norm is None else RMSNorm(norm[0], norm[1], dtype, adds_one=norm[2])

    def refill(self, norm_weight: Tensor | None) -> None:
        if self._norm is not None and norm_weight is not None:
            self._norm.refill(norm_weight)

    @staticmethod
    def rotation(table: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return table[positions].unbind(1)

    def __call__(self, qkv: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(-1, *self._shape)
        query_key, value = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        if self._norm is not None:
            query_key = self._norm(query_key)
        rotated = rotate(query_key, *rotation).to(value.dtype)
        return rotated[:, : self._num_heads], rotated[:, self._num_heads :], value


def fastest_heads(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: tuple[Tensor, float, bool] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Heads:
    """Choose by device, dtype and size."""
    kind = NativeHeads if takes_heads(head_dim, dtype, device) else TorchHeads
    return kind(num_heads, num_kv_heads, head_dim, norm, dtype)
