"""`reference.segmented_attention` as an accelerator computes it: prior KV in pieces, folded by an online softmax.

States the iteration, not the result: the reference is the specification of that. Every piece has the shape of a whole
one, so that one compiled loop body serves them all; a partial last piece is masked (seed 001, "Partial KV Segment
Handling").
"""

import torch
from torch import Tensor

from blockplane.kernels.masks import causal, first_in_reach
from blockplane.kernels.reference import attention_scores, per_query_head
from blockplane.kernels.slots import slots_of


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
    """As `reference.segmented_attention`."""
    output = torch.zeros_like(query)
    bounds = query_start_loc.tolist()
    for row, prior in enumerate(prior_tokens.tolist()):
        queries = query[bounds[row] : bounds[row + 1]]
        seq_len = prior + len(queries)
        query_positions = torch.arange(prior, seq_len, device=query.device)
        first = first_in_reach(prior, sliding_window, attention_chunk_size)
        softmax = OnlineSoftmax(queries, sinks)
        for positions, end in pieces(first, prior, seq_len, kv_segment_size):
            key_positions = positions.to(query.device)
            keys, values, held = load_piece(k_cache, v_cache, block_table[row], key_positions, first, end)
            visible = held & causal(query_positions, key_positions, sliding_window, attention_chunk_size)
            softmax.fold(attention_scores(queries, keys, scale, soft_cap), values, visible)
        output[bounds[row] : bounds[row + 1]] = softmax.output().to(query.dtype)
    return output


def pieces(first: int, prior_tokens: int, seq_len: int, kv_segment_size: int) -> list[tuple[Tensor, int]]:
    """The pieces that one request reads, each as its int64 positions and the end of what is valid among them.

    `kv_segment_size` positions each of the prior tokens from the piece that holds `first` on, the last perhaps partial;
    then the request's own tokens. Unsegmented, size 0: these alone.
    """
    own = [(torch.arange(prior_tokens, seq_len), seq_len)] if seq_len > prior_tokens else []
    if not kv_segment_size:
        return own
    starts = range(first // kv_segment_size * kv_segment_size, prior_tokens, kv_segment_size)
    return [*((torch.arange(start, start + kv_segment_size), prior_tokens) for start in starts), *own]


def load_piece(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, positions: Tensor, first: int, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 keys and values [num_positions, num_kv_heads, head_dim] and which of them are held, bool [num_positions].

    Not held are positions before `first`, from `end` on, or of a skipped block: zeros stand there and nothing is read.
    """
    block_size = k_cache.shape[1]
    held = (positions >= first) & (positions < end)
    held &= block_table[torch.where(held, positions, 0) // block_size] >= 0
    valid = positions[held]
    slots = slots_of(block_table[None], torch.zeros_like(valid), valid, block_size)
    keys, values = (torch.zeros(len(positions), *cache.shape[2:], device=cache.device) for cache in (k_cache, v_cache))
    keys[held], values[held] = k_cache.flatten(0, 1)[slots].float(), v_cache.flatten(0, 1)[slots].float()
    return keys, values, held


class OnlineSoftmax:
    """Attention over keys that come in pieces (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Holds the greatest score so far, and the sum of weights and the weighted sum of values relative to it. A sink is a
    first key of no value.
    """

    def __init__(self, query: Tensor, sinks: Tensor | None) -> None:
        """`query`: [num_queries, num_heads, head_dim]; `sinks`: [num_heads]."""
        num_queries, num_heads, head_dim = query.shape
        # Finite, so that a query that has seen nothing yet rescales by 1.
        lowest = torch.full((num_heads,), torch.finfo(torch.float32).min, device=query.device)
        top = lowest if sinks is None else sinks.float()
        self._top = top[:, None].expand(-1, num_queries)
        self._weight = torch.full_like(self._top, 0.0 if sinks is None else 1.0)
        self._value = torch.zeros(num_heads, num_queries, head_dim, device=query.device)

    def fold(self, scores: Tensor, values: Tensor, visible: Tensor) -> None:
        """Add a piece: scores [num_heads, num_queries, num_keys], values [num_keys, num_kv_heads, head_dim], visible
        bool [num_queries, num_keys]."""
        lowest = torch.finfo(torch.float32).min
        top = torch.maximum(self._top, scores.masked_fill(~visible, lowest).amax(dim=-1))
        weights = torch.exp(scores - top[..., None]).masked_fill(~visible, 0.0)
        shrink = torch.exp(self._top - top)
        self._weight = self._weight * shrink + weights.sum(dim=-1)
        added = torch.einsum("hqk,khd->hqd", weights, per_query_head(values, len(scores)))
        self._value = self._value * shrink[..., None] + added
        self._top = top

    def output(self) -> Tensor:
        """float32 [num_queries, num_heads, head_dim]; zero where nothing was visible."""
        weight = torch.where(self._weight > 0, self._weight, 1.0)
        return (self._value / weight[..., None]).transpose(0, 1)
