"""The reference kernels' twins for CPUs: the same results from fewer and larger operations. Shapes as there.

A context is read by whole blocks, and query heads that share a KV head go through one matrix product. FP8 is read
through a table of its 256 numbers. What is rare goes the reference's way: an active mask of one's own, a table with a
-1 inside a context, queries before position 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockplane.kernels import masks, reference


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference.write_kv`."""
    if bool((slot_mapping < 0).any()):
        return reference.write_kv(key, value, k_cache, v_cache, slot_mapping)
    k_cache.flatten(0, 1)[slot_mapping] = reference.to_cache_dtype(key, k_cache.dtype)
    v_cache.flatten(0, 1)[slot_mapping] = reference.to_cache_dtype(value, v_cache.dtype)
    return k_cache, v_cache


def decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    mask_active: Tensor | None = None,
) -> Tensor:
    """As `reference.decode_attention`."""
    if mask_active is not None:
        return reference.decode_attention(
            query,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            attention_chunk_size=attention_chunk_size,
            soft_cap=soft_cap,
            sinks=sinks,
            mask_active=mask_active,
        )
    attend = _CausalAttention(k_cache, v_cache, sliding_window, attention_chunk_size, soft_cap, sinks)
    scaled, output = query.float() * scale, torch.zeros_like(query)
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            output[row] = attend(scaled[row], block_table[row], seq_len)
    return output


def segmented_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    prior_tokens: Tensor,
    *,
    kv_segment_size: int,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.segmented_attention`; all prior KV is read at once."""
    attend = _CausalAttention(k_cache, v_cache, sliding_window, attention_chunk_size, soft_cap, sinks)
    scaled, output = query.float() * scale, torch.zeros_like(query)
    bounds = query_start_loc.tolist()
    for row, prior in enumerate(prior_tokens.tolist()):
        segment = slice(bounds[row], bounds[row + 1])
        seq_len = prior + segment.stop - segment.start
        if seq_len > prior:
            output[segment] = attend(scaled[segment], block_table[row], seq_len, 0 if kv_segment_size else prior)
    return output


def to_float32(kv: Tensor) -> Tensor:
    """What a cache holds, as numbers to reckon with."""
    if kv.dtype != torch.float8_e4m3fn:
        return kv.float()
    # Torch's cast takes a number at a time: the table is three times as fast (AVX2, one core).
    return _FP8_NUMBERS.index_select(0, kv.view(torch.uint8).flatten().int()).view(kv.shape)


_FP8_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, slots=True)
class _CausalAttention:
    """One layer's attention over its caches, a request at a time; fields as in `reference.decode_attention`.

    Queries are float32 and scaled already; outputs are float32.
    """

    k_cache: Tensor
    v_cache: Tensor
    sliding_window: int | None
    attention_chunk_size: int | None
    soft_cap: float | None
    sinks: Tensor | None

    def __call__(self, query: Tensor, block_table: Tensor, seq_len: int, least: int = 0) -> Tensor:
        """One request's queries [num_queries, num_heads, head_dim] at the last positions before `seq_len`, which see
        no key before position `least`."""
        start = seq_len - query.shape[0]
        first = max(least, masks.first_in_reach(start, self.sliding_window, self.attention_chunk_size))
        block_size = self.k_cache.shape[1]
        blocks = block_table[first // block_size : -(-seq_len // block_size)]
        if start < 0 or int(blocks.min()) < 0:
            return self._attend_by_slots(query, block_table, start, first, seq_len)
        read = slice(first % block_size, first % block_size + seq_len - first)
        # [num_kv_heads, num_keys, head_dim]
        keys, values = (
            to_float32(cache.index_select(0, blocks).flatten(0, 1)[read]).transpose(0, 1)
            for cache in (self.k_cache, self.v_cache)
        )
        num_queries, _, head_dim = query.shape
        num_kv_heads = keys.shape[0]
        # [num_kv_heads, group * num_queries, head_dim]: a KV head's query heads, one after another.
        grouped = query.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(grouped, keys.transpose(1, 2))
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if num_queries > 1:
            hidden = ~self._visible(start, seq_len, torch.arange(first, seq_len))
            scores.view(num_kv_heads, -1, num_queries, seq_len - first).masked_fill_(hidden, float("-inf"))
        attended = torch.bmm(self._softmax(scores, num_queries), values)
        return attended.view(num_kv_heads, -1, num_queries, head_dim).permute(2, 0, 1, 3).flatten(1, 2)

    def _softmax(self, scores: Tensor, num_queries: int) -> Tensor:
        """Weights [num_kv_heads, group * num_queries, num_keys] of scores of that shape."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self.sinks.float().view(scores.shape[0], -1, 1).repeat_interleave(num_queries, dim=1)
        return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]

    def _visible(self, start: int, seq_len: int, key_positions: Tensor) -> Tensor:
        query_positions = torch.arange(start, seq_len)
        return masks.causal(query_positions, key_positions, self.sliding_window, self.attention_chunk_size)

    def _attend_by_slots(self, query: Tensor, block_table: Tensor, start: int, first: int, seq_len: int) -> Tensor:
        context = reference.read_context(self.k_cache, self.v_cache, block_table, first, seq_len)
        visible = self._visible(start, seq_len, context[2])
        return reference.attend(query, *context[:2], visible, 1.0, self.soft_cap, self.sinks)
