"""The reference kernels' twins for CPUs: the same results from fewer and larger operations. Shapes as there.

A context is read by whole blocks, and query heads that share a KV head go through one matrix product. A table with a
-1 inside a context, which frees a sliding window's past, goes the reference's way.
"""

import torch
from torch import Tensor

from blockplane.kernels import reference


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `reference.write_kv`."""
    if bool((slot_mapping < 0).any()):
        reference.write_kv(key, value, k_cache, v_cache, slot_mapping)
        return
    k_cache.flatten(0, 1)[slot_mapping] = key.to(k_cache.dtype)
    v_cache.flatten(0, 1)[slot_mapping] = value.to(v_cache.dtype)


def decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """As `reference.decode_attention`."""
    output = torch.zeros_like(query)
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            start = seq_len - query.shape[1]
            output[row] = _attend_row(
                query[row], k_cache, v_cache, block_table[row], start, seq_len, scale, sliding_window, soft_cap
            )
    return output


def segmented_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    prior_tokens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """As `reference.segmented_attention`."""
    output = torch.zeros_like(query)
    bounds = query_start_loc.tolist()
    for row, prior in enumerate(prior_tokens.tolist()):
        segment = slice(bounds[row], bounds[row + 1])
        seq_len = prior + segment.stop - segment.start
        output[segment] = _attend_row(
            query[segment], k_cache, v_cache, block_table[row], prior, seq_len, scale, sliding_window, soft_cap
        )
    return output


def _attend_row(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    start: int,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """One request's queries [num_queries, num_heads, head_dim], at positions `start` to `seq_len - 1`."""
    first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
    block_size = k_cache.shape[1]
    blocks = block_table[first // block_size : -(-seq_len // block_size)]
    if int(blocks.min()) < 0:
        context = reference.read_context(k_cache, v_cache, block_table, start, seq_len, sliding_window)
        return reference.attend(query, *context, start, scale, sliding_window, soft_cap)
    read = slice(first % block_size, first % block_size + seq_len - first)
    # [num_kv_heads, num_keys, head_dim]
    keys, values = (
        cache.index_select(0, blocks).flatten(0, 1)[read].float().transpose(0, 1) for cache in (k_cache, v_cache)
    )
    num_queries, _, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    # [num_kv_heads, group * num_queries, head_dim]: a KV head's query heads, one after another.
    grouped = query.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(grouped * scale, keys.transpose(1, 2))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if num_queries > 1:
        hidden = _hidden(num_queries, start, first, seq_len, sliding_window)
        scores.view(num_kv_heads, -1, num_queries, seq_len - first).masked_fill_(hidden, float("-inf"))
    attended = torch.bmm(torch.softmax(scores, dim=-1), values)
    return attended.view(num_kv_heads, -1, num_queries, head_dim).permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)


def _hidden(num_queries: int, start: int, first: int, seq_len: int, sliding_window: int | None) -> Tensor:
    """bool [num_queries, num_keys]: which keys at positions `first` to `seq_len - 1` a query may not see."""
    positions = torch.arange(start, start + num_queries)[:, None]
    key_positions = torch.arange(first, seq_len)
    hidden = key_positions > positions
    if sliding_window is not None:
        hidden |= key_positions <= positions - sliding_window
    return hidden
