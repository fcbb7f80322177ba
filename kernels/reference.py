"""The specification of every kernel: a loop over requests and one plain attention in float32. Dumb on purpose.

An accelerated kernel has the signature of its twin here and passes the twin's tests. Shapes, throughout:

    k_cache, v_cache   [total_blocks, block_size, num_kv_heads, head_dim]
    block_table        int32 [num_rows, max_blocks_per_row], -1 = no block (never read)
    slot_mapping       int64 [num_tokens], -1 = padding (never written)

The KV of a step's own tokens is in the cache before attention runs, so both attentions read everything by position.
"""

import torch
from torch import Tensor

from blockplane.kernels.masks import cache_mask, causal, causal_active_mask, first_in_reach, in_reach
from blockplane.kernels.slots import slots_of


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Scatter new KV into the cache, in place; slot -1 writes nothing (seed 000, "Slot ID -1").

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], any float dtype; cast to the cache's as `to_cache_dtype` says.
            An FP8 cache holds them divided by scales that its reader multiplies by: kernels know of no scale, since one
            of the keys is a factor of `scale`, and one of the values a factor of the output.
        slot_mapping: int64 [num_tokens].

    Returns:
        The caches, for what reads them next: here the same tensors.
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    k_cache.flatten(0, 1)[slots] = to_cache_dtype(key[written], k_cache.dtype)
    v_cache.flatten(0, 1)[slots] = to_cache_dtype(value[written], v_cache.dtype)
    return k_cache, v_cache


def to_cache_dtype(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the cache's dtype; what FP8 is too narrow for becomes its greatest or least number, and NaN stays NaN.

    Torch's own cast leaves it to its version whether such numbers become NaN.
    """
    if dtype.itemsize == 1:
        greatest = torch.finfo(dtype).max
        kv = kv.clamp(-greatest, greatest)
    return kv.to(dtype)


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
    """Attend from the last few tokens of each row to the row's whole cached context.

    Args:
        query: [num_seqs, num_new_tokens, num_heads, head_dim]; row r's tokens stand at the last positions before
            `seq_lens[r]`. A row with fewer tokens has them at the end: what stands at negative positions is zero.
        seq_lens: int32 [num_seqs], cached tokens of each row, its new ones included; 0 = a padding row, whose output
            is zero.
        scale: factor on query . key.
        sliding_window: a query at position i sees keys at j with i - window < j; None = all.
        attention_chunk_size: a query at position i sees keys at j with i // size == j // size; None = all. It
            overrules `sliding_window`.
        soft_cap: scores become cap * tanh(score / cap); None = untouched.
        sinks: [num_heads], a logit of each head that takes its part of the softmax and gives no value; None = none.
        mask_active: [num_seqs, num_heads, num_new_tokens, num_new_tokens], 1 where a new token sees another, 0 where
            not (seed 000, "mask_active"); None = each sees those before it and itself. A query that sees nothing
            yields zero.

    Returns:
        [num_seqs, num_new_tokens, num_heads, head_dim] in the query's dtype.
    """
    num_seqs, num_new_tokens, num_heads, _ = query.shape
    if mask_active is None:
        mask_active = causal_active_mask(num_seqs, num_heads, num_new_tokens, query.device)
    context_len = block_table.shape[1] * k_cache.shape[1]
    mask_cache = cache_mask(seq_lens[:, None] - num_new_tokens, num_heads, num_new_tokens, context_len)
    output = torch.zeros_like(query)
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            start = seq_len - num_new_tokens
            first = first_in_reach(start, sliding_window, attention_chunk_size)
            keys, values, key_positions = read_context(k_cache, v_cache, block_table[row], first, seq_len)
            # [num_heads, num_new_tokens, seq_len]: the cached tokens, then the new ones at positions from 0 on.
            cached, new = mask_cache[row, :, :, : max(0, start)], mask_active[row, :, :, max(0, -start) :].bool()
            visible = torch.cat((cached, new), dim=-1)[:, :, key_positions]
            query_positions = torch.arange(start, seq_len, device=query.device)
            visible &= in_reach(query_positions, key_positions, sliding_window, attention_chunk_size)
            visible &= query_positions[:, None] >= 0
            output[row] = attend(query[row], keys, values, visible, scale, soft_cap, sinks)
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
    """Attend from packed prefill segments to each request's prior tokens and, causally, to itself.

    Args:
        query: [num_tokens, num_heads, head_dim]; request r owns `query_start_loc[r] : query_start_loc[r + 1]`, what
            lies beyond the last request is padding, whose output is zero.
        query_start_loc: int32 [num_seqs + 1].
        prior_tokens: int32 [num_seqs], tokens already in the cache before this segment (seed 001; per request here).
        kv_segment_size: tokens of prior KV that a kernel reads at a time (`segments` shows how); whatever it is, the
            result is this one. 0 = unsegmented: no prior KV is read, a query sees its own segment alone.
        scale, sliding_window, attention_chunk_size, soft_cap, sinks: as in `decode_attention`.

    Returns:
        [num_tokens, num_heads, head_dim] in the query's dtype.
    """
    output = torch.zeros_like(query)
    bounds = query_start_loc.tolist()
    for row, prior in enumerate(prior_tokens.tolist()):
        segment = slice(bounds[row], bounds[row + 1])
        seq_len = prior + segment.stop - segment.start
        first = first_in_reach(prior, sliding_window, attention_chunk_size) if kv_segment_size else prior
        keys, values, key_positions = read_context(k_cache, v_cache, block_table[row], first, seq_len)
        query_positions = torch.arange(prior, seq_len, device=query.device)
        visible = causal(query_positions, key_positions, sliding_window, attention_chunk_size)
        output[segment] = attend(query[segment], keys, values, visible, scale, soft_cap, sinks)
    return output


def read_context(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, first: int, seq_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather one request's KV from position `first` on: float32 keys and values [num_keys, num_kv_heads, head_dim],
    int64 positions [num_keys].

    Only these slots are read, and none through a -1 entry: what lies in others, NaN included, cannot reach the output.
    """
    positions = torch.arange(first, seq_len, device=block_table.device)
    block_size = k_cache.shape[1]
    positions = positions[block_table[positions // block_size] >= 0]
    slots = slots_of(block_table[None], torch.zeros_like(positions), positions, block_size)
    return k_cache.flatten(0, 1)[slots].float(), v_cache.flatten(0, 1)[slots].float(), positions


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Plain attention of [num_queries, num_heads, head_dim] over given keys, those that `visible` lets each query see.

    `visible` is bool, [num_heads, num_queries, num_keys] or alike for all heads: [num_queries, num_keys].
    """
    scores = attention_scores(query, keys, scale, soft_cap).masked_fill(~visible, float("-inf"))
    num_heads, num_queries, num_keys = scores.shape
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    # Where nothing is visible the softmax is NaN; hidden keys weigh nothing all the same.
    weights = torch.softmax(scores, dim=-1)[..., :num_keys].masked_fill(~visible, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, per_query_head(values, num_heads)).to(query.dtype)


def attention_scores(query: Tensor, keys: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """float32 [num_heads, num_queries, num_keys], before any mask."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), per_query_head(keys, query.shape[1])) * scale
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def per_query_head(kv: Tensor, num_heads: int) -> Tensor:
    """[num_keys, num_kv_heads, head_dim] -> [num_keys, num_heads, head_dim]: heads h * group ... (h + 1) * group - 1
    read KV head h."""
    return kv.repeat_interleave(num_heads // kv.shape[1], dim=1)
