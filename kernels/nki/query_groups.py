"""Lays packed requests out as groups of equal size, as the segmented kernel takes them, and back; torch alone.

A group holds neighbouring tokens of one request, from a position that is a multiple of 128 tokens behind the request's
first. An earlier group of the same request is prior KV to a later one: it is in the cache before attention runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Where each group's queries come from.

    Attributes:
        token_ids: int64 [num_groups, num_queries], each query's place among the packed tokens; -1 for padding.
        rows: int64 [num_groups], each group's request.
        prior_tokens: int32 [num_groups, 1], the position of a group's first query.
        num_tokens: int32 [num_groups, 1], a group's valid queries, which come first.
    """

    token_ids: Tensor
    rows: Tensor
    prior_tokens: Tensor
    num_tokens: Tensor

    def pack(self, query: Tensor) -> Tensor:
        """[num_groups, num_queries, num_heads, head_dim] of packed tokens [num_tokens, num_heads, head_dim]; padding
        is zero."""
        return torch.cat((query, query.new_zeros(1, *query.shape[1:])))[self.token_ids]

    def unpack(self, grouped: Tensor, like: Tensor) -> Tensor:
        """The inverse of `pack`, in the shape and dtype of `like`; tokens of no group are zero."""
        output = like.new_zeros(len(like) + 1, *like.shape[1:])
        output[self.token_ids.flatten()] = grouped.flatten(0, 1).to(like.dtype)
        return output[:-1]


def group_queries(query_start_loc: Tensor, prior_tokens: Tensor, max_queries: int) -> QueryGroups:
    """Divide requests into groups of the longest's length, rounded up to 128 and not above `max_queries`.

    Args:
        query_start_loc: int32 [num_seqs + 1]. prior_tokens: int32 [num_seqs]. As `reference.segmented_attention`'s.
        max_queries: a multiple of 128.
    """
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    longest = int((ends - starts).max()) if len(starts) else 0
    num_queries = min(max_queries, max(1, -(-longest // TILE)) * TILE)
    counts = (ends - starts + num_queries - 1) // num_queries
    rows = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), counts)
    # How many groups of the same request come before.
    earlier = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    behind = earlier * num_queries
    token_ids = (starts[rows] + behind)[:, None] + torch.arange(num_queries, device=rows.device)
    is_padding = token_ids >= ends[rows][:, None]
    return QueryGroups(
        token_ids.masked_fill(is_padding, -1),
        rows,
        (prior_tokens[rows] + behind).to(torch.int32)[:, None],
        (~is_padding).sum(dim=1, keepdim=True).to(torch.int32),
    )
