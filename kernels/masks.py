"""Who sees whom: attention's masks, from lengths and positions alone; knows no keys, no values and no blocks.

True means visible; `cache_mask` and `causal_active_mask` have the shapes of seed 000, "Cache Masking".
"""

import torch
from torch import Tensor


def cache_mask(cache_lens: Tensor, num_heads: int, num_new_tokens: int, context_len: int) -> Tensor:
    """The history mask: each new token sees the positions below its row's cache length.

    Args:
        cache_lens: integer [num_seqs, 1], tokens in the cache before this step.

    Returns:
        bool [num_seqs, num_heads, num_new_tokens, context_len].
    """
    history = torch.arange(context_len, device=cache_lens.device) < cache_lens
    return history[:, None, None, :].expand(-1, num_heads, num_new_tokens, -1)


def causal_active_mask(num_seqs: int, num_heads: int, num_new_tokens: int, device: torch.device) -> Tensor:
    """The active mask of a chain of drafts: a new token sees those before it and itself.

    Returns:
        bool [num_seqs, num_heads, num_new_tokens, num_new_tokens].
    """
    triangle = torch.ones(num_new_tokens, num_new_tokens, dtype=torch.bool, device=device).tril()
    return triangle.expand(num_seqs, num_heads, -1, -1)


def in_reach(
    query_positions: Tensor, key_positions: Tensor, sliding_window: int | None, attention_chunk_size: int | None
) -> Tensor:
    """bool [num_queries, num_keys]: the keys near enough for their layer, whether before or after the query.

    A window of w reaches w - 1 tokens back; a chunk holds the positions of one multiple of its size. Where both limits
    are given the chunk's holds.
    """
    queries = query_positions[:, None]
    if attention_chunk_size is not None:
        return key_positions // attention_chunk_size == queries // attention_chunk_size
    if sliding_window is not None:
        return key_positions > queries - sliding_window
    return torch.ones(len(query_positions), len(key_positions), dtype=torch.bool, device=key_positions.device)


def causal(
    query_positions: Tensor, key_positions: Tensor, sliding_window: int | None, attention_chunk_size: int | None
) -> Tensor:
    """bool [num_queries, num_keys]: the keys in reach that are not after the query."""
    not_after = key_positions <= query_positions[:, None]
    if sliding_window is None and attention_chunk_size is None:
        return not_after
    return not_after & in_reach(query_positions, key_positions, sliding_window, attention_chunk_size)


def first_in_reach(position: int, sliding_window: int | None, attention_chunk_size: int | None) -> int:
    """The first position in reach of a query at `position`: no later query sees what lies before."""
    if attention_chunk_size is not None:
        return max(0, position) // attention_chunk_size * attention_chunk_size
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)
