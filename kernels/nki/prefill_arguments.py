"""The segmented kernel's block table and what it asks of its other arguments; torch alone, and no kernel is run.

What is refused here the kernel would compute wrongly, or a compiler refuse with less to say.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockplane.kernels.nki.query_groups import TILE, QueryGroups
from blockplane.kernels.nki.segmented import SEGMENT_SIZES
from blockplane.kernels.nki.unsupported import is_power_of_two, require
from blockplane.kernels.slots import SKIP_BLOCK_ID

MAX_BLOCK_SIZE = 128
MAX_CACHE_ROWS = 2**31
MAX_POSITIONS = 2**24
"""Positions are compared as float32, which holds every whole number up to here."""


def check_cache(cache: Tensor) -> None:
    """Raises UnsupportedByKernelError: blocks or caches that row ids, which are int32 and shifted, cannot count."""
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    require(
        is_power_of_two(block_size) and block_size <= MAX_BLOCK_SIZE,
        f"block_size is {block_size}: give a power of 2 up to {MAX_BLOCK_SIZE}.",
    )
    num_rows = num_blocks * num_kv_heads * block_size
    require(
        num_rows < MAX_CACHE_ROWS,
        f"The cache has {num_rows} rows of one head and position, and kernels count fewer than {MAX_CACHE_ROWS}: give "
        "it fewer blocks.",
    )


def check_queries(query: Tensor, prior_tokens: Tensor, block_size: int, kv_segment_size: int) -> None:
    """Raises UnsupportedByKernelError: another size or alignment than the kernel's."""
    head_dim = query.shape[-1]
    require(head_dim <= TILE or head_dim == 2 * TILE, f"head_dim is {head_dim}: give up to {TILE}, or {2 * TILE}.")
    require(
        kv_segment_size in (0, *SEGMENT_SIZES),
        f"kv_segment_size is {kv_segment_size}: give 0 or one of {SEGMENT_SIZES}.",
    )
    require(
        not bool((prior_tokens % block_size).any()),
        f"Prior tokens {prior_tokens.tolist()} are not all multiples of block_size, {block_size}: end every segment "
        "but a prompt's last at the end of a block.",
    )


def table_of(
    groups: QueryGroups,
    block_table: Tensor,
    block_size: int,
    kv_segment_size: int,
    sliding_window: int | None,
    attention_chunk_size: int | None,
) -> Tensor:
    """int32 [num_groups, width], each group's row of the block table, as wide as the kernel reads.

    Raises:
        UnsupportedByKernelError: a row lacks a block that a query sees, or is too long.
    """
    end = int(groups.prior_tokens.max()) + groups.token_ids.shape[1]
    require(end < MAX_POSITIONS, f"A query may stand at position {end}: give fewer than {MAX_POSITIONS} tokens.")
    segment_blocks = max(1, kv_segment_size // block_size)
    width = max(block_table.shape[1], -(-end // block_size))
    width = -(-width // segment_blocks) * segment_blocks
    table = pad(block_table[groups.rows], (0, width - block_table.shape[1]), value=SKIP_BLOCK_ID)
    first = _first_in_reach(groups.prior_tokens, kv_segment_size, sliding_window, attention_chunk_size)
    positions = torch.arange(width, device=table.device) * block_size
    is_seen = (positions > first - block_size) & (positions < groups.prior_tokens + groups.num_tokens)
    lacking = sorted(set(groups.rows[(is_seen & (table < 0)).any(dim=1)].tolist()))
    require(
        not lacking,
        f"Requests {lacking} lack a block between the first key that they see and their last token, and the "
        "segmented kernel hides no such hole: give it, or compute by `reference`.",
    )
    return table.to(torch.int32)


def _first_in_reach(
    prior_tokens: Tensor, kv_segment_size: int, sliding_window: int | None, attention_chunk_size: int | None
) -> Tensor:
    """`masks.first_in_reach` of every group's first query, [num_groups, 1]; without segments its own position."""
    if not kv_segment_size:
        return prior_tokens
    if attention_chunk_size is not None:
        return prior_tokens // attention_chunk_size * attention_chunk_size
    if sliding_window is not None:
        return (prior_tokens - sliding_window + 1).clamp(min=0)
    return torch.zeros_like(prior_tokens)
