"""Requests whose KV lies scattered in a poisoned cache, some of it prior, and what their prefill should yield.

The cache is token-major, as `reference` takes it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockplane.kernels import reference
from blockplane.kernels.nki.attention import NkiAttention
from blockplane.kernels.nki.layout import to_head_major
from blockplane.kernels.slots import SKIP_BLOCK_ID, slots_of


@dataclass(frozen=True)
class Request:
    prior_tokens: int
    num_tokens: int


class PrefilledCache:
    """The KV of some requests, of unit variance; every slot that is none of theirs holds `poison`.

    `query` packs the requests' tokens, in bfloat16, and `num_padding` tokens of NaN.
    """

    def __init__(
        self,
        requests: list[tuple[int, int]],
        block_size: int = 64,
        head_dim: int = 64,
        num_kv_heads: int = 1,
        group: int = 1,
        poison: float = math.nan,
        kv_dtype: torch.dtype = torch.bfloat16,
        num_padding: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.requests = [Request(*request) for request in requests]
        lengths = [request.prior_tokens + request.num_tokens for request in self.requests]
        widths = [-(-length // block_size) for length in lengths]
        self.blocks = torch.randperm(2 * sum(widths) + 1, generator=generator).to(torch.int32)
        self.block_table = torch.full((len(requests), max(widths) + 1), SKIP_BLOCK_ID, dtype=torch.int32)
        for row, width in enumerate(widths):
            self.block_table[row, :width] = self.blocks[sum(widths[:row]) :][:width]
        shape = (len(self.blocks), block_size, num_kv_heads, head_dim)
        full = reference.to_cache_dtype(torch.tensor(poison), kv_dtype).expand(shape)
        self.k_cache, self.v_cache = full.clone(), full.clone()
        for row, length in enumerate(lengths):
            slots = self.slots(row, 0, length)
            key, value = (torch.randn(length, num_kv_heads, head_dim, generator=generator) for _ in range(2))
            reference.write_kv(key, value, self.k_cache, self.v_cache, slots)
        num_heads, num_queries = num_kv_heads * group, sum(request.num_tokens for request in self.requests)
        query = torch.randn(num_queries, num_heads, head_dim, generator=generator)
        self.query = torch.cat((query, torch.full((num_padding, num_heads, head_dim), math.nan))).bfloat16()
        self.sinks = torch.randn(num_heads, generator=generator)
        self.scale = head_dim**-0.5

    def slots(self, row: int, first: int, end: int) -> Tensor:
        positions = torch.arange(first, end)
        return slots_of(self.block_table, torch.full_like(positions, row), positions, self.k_cache.shape[1])

    def forget_prior(self) -> None:
        """Put NaN where the requests' prior tokens are."""
        for row, request in enumerate(self.requests):
            slots = self.slots(row, 0, request.prior_tokens)
            self.k_cache.flatten(0, 1)[slots] = self.v_cache.flatten(0, 1)[slots] = math.nan

    def expected(self, kv_segment_size: int = 512, **settings: Any) -> Tensor:
        """The reference's answer on float32 copies; padding tokens are left out."""
        num_queries = sum(request.num_tokens for request in self.requests)
        caches = self.k_cache.float(), self.v_cache.float()
        return self._prefill(
            reference.segmented_attention, self.query[:num_queries].float(), caches, kv_segment_size, **settings
        )

    def output(
        self, run: Callable[..., Any], kv_segment_size: int = 512, max_group_queries: int | None = None, **settings: Any
    ) -> Tensor:
        """The kernel's answer, float32; padding tokens included."""
        twin = NkiAttention(run, max_group_queries)
        caches = to_head_major(self.k_cache), to_head_major(self.v_cache)
        return self._prefill(twin.segmented_attention, self.query, caches, kv_segment_size, **settings).float()

    def _prefill(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        kv_segment_size: int,
        **settings: Any,
    ) -> Tensor:
        counts = [request.num_tokens for request in self.requests]
        return attention(
            query,
            *caches,
            self.block_table,
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            torch.tensor([request.prior_tokens for request in self.requests], dtype=torch.int32),
            kv_segment_size=kv_segment_size,
            **{"scale": self.scale} | settings,
        )
