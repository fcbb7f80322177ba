"""The specification of every kernel: a loop over requests and one plain attention in float32. Dumb on purpose.

An accelerated kernel has the signature of its twin here and passes the twin's tests. Shapes, throughout:

    k_cache, v_cache   [total_blocks, block_size, num_kv_heads, head_dim]
    block_table        int32 [num_rows, max_blocks_per_row], -1 = no block (never read)
    slot_mapping       int64 [num_tokens], -1 = padding (never written)

The KV of a step's own tokens is in the cache before attention runs, so both attentions read everything by position.
"""

import torch
from torch import Tensor

from blockplane.kernels.slots import slots_of


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Scatter new KV into the cache, in place; slot -1 writes nothing (seed 000, "Slot ID -1").

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], any float dtype; cast to the cache's.
        slot_mapping: int64 [num_tokens].
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    k_cache.flatten(0, 1)[slots] = key[written].to(k_cache.dtype)
    v_cache.flatten(0, 1)[slots] = value[written].to(v_cache.dtype)


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
    """Attend from the last few tokens of each row to the row's whole cached context.

    Args:
        query: [num_seqs, num_new_tokens, num_heads, head_dim]; row r's tokens stand at the last positions before
            `seq_lens[r]`.
        seq_lens: int32 [num_seqs], cached tokens of each row, its new ones included; 0 = a padding row, whose output
            is zero.
        scale: factor on query . key.
        sliding_window: a query at position i sees keys at j with i - window < j <= i; None = all j <= i.
        soft_cap: scores become cap * tanh(score / cap); None = untouched.

    Returns:
        [num_seqs, num_new_tokens, num_heads, head_dim] in the query's dtype.
    """
    output = torch.zeros_like(query)
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            start = seq_len - query.shape[1]
            context = read_context(k_cache, v_cache, block_table[row], start, seq_len, sliding_window)
            output[row] = attend(query[row], *context, start, scale, sliding_window, soft_cap)
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
    """Attend from packed prefill segments to each request's prior tokens and, causally, to itself.

    Args:
        query: [num_tokens, num_heads, head_dim]; request r owns `query_start_loc[r] : query_start_loc[r + 1]`, what
            lies beyond the last request is padding, whose output is zero.
        query_start_loc: int32 [num_seqs + 1].
        prior_tokens: int32 [num_seqs], tokens already in the cache before this segment (seed 001; per request here).
        scale, sliding_window, soft_cap: as in `decode_attention`.

    Returns:
        [num_tokens, num_heads, head_dim] in the query's dtype.
    """
    output = torch.zeros_like(query)
    bounds = query_start_loc.tolist()
    for row, prior in enumerate(prior_tokens.tolist()):
        segment = slice(bounds[row], bounds[row + 1])
        seq_len = prior + segment.stop - segment.start
        context = read_context(k_cache, v_cache, block_table[row], prior, seq_len, sliding_window)
        output[segment] = attend(query[segment], *context, prior, scale, sliding_window, soft_cap)
    return output


def read_context(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, start: int, seq_len: int, sliding_window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather one request's visible KV: float32 keys and values [num_keys, num_kv_heads, head_dim], int64 positions.

    Only slots that some query at `start` or later may see are read, and none through a -1 entry: what lies in other
    slots, NaN included, cannot reach the output.
    """
    first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
    positions = torch.arange(first, seq_len, device=block_table.device)
    block_size = k_cache.shape[1]
    positions = positions[block_table[positions // block_size] >= 0]
    slots = slots_of(block_table[None], torch.zeros_like(positions), positions, block_size)
    return k_cache.flatten(0, 1)[slots].float(), v_cache.flatten(0, 1)[slots].float(), positions


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_positions: Tensor,
    start: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Plain attention of [num_queries, num_heads, head_dim] at positions `start`, `start + 1`, ... over given keys."""
    # Query heads h * group .. (h + 1) * group - 1 read KV head h.
    grouped = query.float().view(query.shape[0], keys.shape[1], -1, query.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_positions = torch.arange(start, start + query.shape[0], device=query.device)[:, None]
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible &= key_positions > query_positions - sliding_window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2).to(query.dtype)
