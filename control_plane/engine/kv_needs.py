"""How many KV blocks a request of so many tokens needs at least, over all groups; knows no pool and no requests."""

import sys
from bisect import bisect_right
from collections.abc import Sequence

from blockplane.protos.kv_cache import KVCacheGroup


def num_blocks_needed(
    groups: Sequence[KVCacheGroup], num_tokens: int, block_size: int, num_segment_tokens: int = 1
) -> int:
    """Blocks without which a request of `num_tokens` tokens cannot be computed, the null block not counted.

    A full-attention group holds all tokens. A window or chunk group holds, at most, what the first query of a segment
    sees before itself (one token less than it reaches) and the segment; these tokens may begin and end inside a block,
    so they can touch one block more than they fill.

    Args:
        num_tokens: prompt and output together.
        num_segment_tokens: tokens that one step computes.
    """
    return _blocks_of_groups(groups, -(-num_tokens // block_size), block_size, num_segment_tokens)


def longest_fit(
    groups: Sequence[KVCacheGroup], num_usable_blocks: int, block_size: int, num_segment_tokens: int = 1
) -> int:
    """The most tokens whose request `num_blocks_needed` gives at most `num_usable_blocks`, in whole blocks.

    `sys.maxsize` where no group is full attention and the blocks hold what the windows and chunks reach: then a request
    may grow for ever.
    """

    def needed(num_logical_blocks: int) -> int:
        return _blocks_of_groups(groups, num_logical_blocks, block_size, num_segment_tokens)

    if needed(sys.maxsize) <= num_usable_blocks:
        return sys.maxsize
    # Some group holds every one of the logical blocks that fit, so there are no more of them than usable blocks.
    return (bisect_right(range(num_usable_blocks + 1), num_usable_blocks, key=needed) - 1) * block_size


def _blocks_of_groups(
    groups: Sequence[KVCacheGroup], num_logical_blocks: int, block_size: int, num_segment_tokens: int
) -> int:
    return sum(min(num_logical_blocks, _most_blocks(group, block_size, num_segment_tokens)) for group in groups)


def _most_blocks(group: KVCacheGroup, block_size: int, num_segment_tokens: int) -> int:
    """The most blocks that a group ever needs for one request; `sys.maxsize` for full attention."""
    # Where both are given the chunk rules, as in `first_visible`.
    reach = group.sliding_window if group.attention_chunk_size is None else group.attention_chunk_size
    return sys.maxsize if reach is None else -(-(reach - 1 + num_segment_tokens) // block_size) + 1
