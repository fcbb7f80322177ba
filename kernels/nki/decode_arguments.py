"""The decode kernel's queries, sinks and mask from the reference's, and what it asks of them; torch alone, no kernel.

What is refused here the kernel would compute wrongly, or a compiler refuse with less to say.
"""

import torch
from torch import Tensor

from blockplane.kernels.masks import causal_active_mask
from blockplane.kernels.nki.unsupported import require

NO_SINK = -1e34
"""So low that it is below -2^96 as a score too, of whatever scale or cap."""
HIDDEN = -1e30
MAX_QUERIES = 128
MAX_COLUMNS = 16384
"""Queries of all heads and requests: their mask and their outputs wait in SBUF with them."""


def check_decode(query: Tensor, k_cache: Tensor) -> None:
    """Raises UnsupportedByKernelError: another size than the kernel's."""
    num_seqs, num_new_tokens, num_heads, head_dim = query.shape
    num_queries = num_new_tokens * num_heads // k_cache.shape[1]
    num_columns = num_seqs * num_new_tokens * num_heads
    require(
        head_dim % 32 == 0 and (head_dim <= 128 or head_dim % 128 == 0),
        f"head_dim is {head_dim}: give a multiple of 32 up to 128, or of 128.",
    )
    require(
        num_queries <= MAX_QUERIES,
        f"{num_queries} queries of a request meet a KV head, and {MAX_QUERIES} fit: decode fewer new tokens at a time.",
    )
    require(
        num_columns <= MAX_COLUMNS,
        f"The batch has {num_columns} queries of one head, and {MAX_COLUMNS} fit: decode fewer requests at a time.",
    )


def by_item(by_head: Tensor, num_kv_heads: int) -> Tensor:
    """[num_seqs, num_new_tokens, num_heads, n] -> [num_seqs * num_kv_heads, num_new_tokens * group, n]; the same memory
    for one KV head or one new token."""
    num_seqs, num_new_tokens, _, last = by_head.shape
    grouped = by_head.reshape(num_seqs, num_new_tokens, num_kv_heads, -1, last).transpose(1, 2)
    return grouped.reshape(num_seqs * num_kv_heads, -1, last)


def by_head(by_item: Tensor, shape: torch.Size) -> Tensor:
    """`by_item`'s inverse, to [num_seqs, num_new_tokens, num_heads, n]."""
    num_seqs, num_new_tokens, num_heads, last = shape
    num_kv_heads = by_item.shape[0] // num_seqs
    grouped = by_item.view(num_seqs, num_kv_heads, num_new_tokens, num_heads // num_kv_heads, last)
    return grouped.transpose(1, 2).reshape(shape)


def sinks_of(sinks: Tensor | None, query: Tensor, num_kv_heads: int) -> Tensor:
    """float32 [1, num_columns], each query's."""
    num_seqs, num_new_tokens, num_heads, _ = query.shape
    of_heads = query.new_full((num_heads,), NO_SINK) if sinks is None else sinks
    of_queries = of_heads.float().clamp(min=NO_SINK)[:, None].expand(num_seqs, num_new_tokens, -1, 1)
    return by_item(of_queries, num_kv_heads).reshape(1, -1)


def active_mask_of(
    query: Tensor, seq_lens: Tensor, mask_active: Tensor | None, attention_chunk_size: int | None, num_kv_heads: int
) -> Tensor:
    """bfloat16 [num_new_tokens, num_columns], HIDDEN where a query does not see a new token, else 0.

    What stands at a negative position sees nothing, whatever `mask_active` says.
    """
    num_seqs, num_new_tokens, num_heads, _ = query.shape
    if mask_active is None:
        visible = causal_active_mask(num_seqs, num_heads, num_new_tokens, query.device)
    else:
        visible = mask_active.bool()
    positions = seq_lens[:, None] - num_new_tokens + torch.arange(num_new_tokens, device=query.device)
    visible = visible & (positions >= 0)[:, None, :, None]
    if attention_chunk_size is not None:
        chunks = positions // attention_chunk_size
        visible = visible & (chunks[:, None, :, None] == chunks[:, None, None, :])
    hidden = torch.where(visible, 0.0, HIDDEN).to(torch.bfloat16)
    # By key first, [num_new_tokens, num_items, num_queries].
    return by_item(hidden.transpose(1, 2), num_kv_heads).permute(2, 0, 1).reshape(num_new_tokens, -1)
