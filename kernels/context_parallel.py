"""Attention over the positions that one rank keeps, and how the ranks' parts make the whole; knows no collectives.

A part is, for each query, the mean of the values that it sees, weighted by exp(score), and the log of the sum of these
weights, its log-sum-exp. Parts over disjoint keys add up to attention over all of them:

    lse = log(sum_r exp(lse_r))        output = sum_r exp(lse_r - lse) output_r

This is the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) with the keys divided among those that
compute at one time, as in Flash-Decoding (Dao, Haziza, Massa and Sizov 2023). A sink is a part of its own, lse = sink,
that has no value: it is no rank's and counts once, in `combine`.

Shapes are those of `reference`, but a block has `block_size` places in each rank's caches and spans block_size *
world_size positions of the sequence, so that one block table serves all ranks. A context is read by whole blocks, and
query heads that share a KV head go through one matrix product, as in `cpu`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockplane.kernels import masks
from blockplane.kernels.cpu import to_float32
from blockplane.kernels.slots import ContextParallel

Part = tuple[Tensor, Tensor]
"""float32 outputs [..., num_heads, head_dim] and log-sum-exps [..., num_heads], of queries [...]; zero and -inf where a
query sees none of the rank's keys."""


def decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    context_parallel: ContextParallel,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> Part:
    """A rank's part of `reference.decode_attention`, of [num_seqs, num_new_tokens] queries.

    Args:
        query: of all heads whose KV the ranks share, not of the rank's own alone.
        seq_lens: int32 [num_seqs], tokens of the whole sequences, whoever keeps them.
    """
    attend = _PartialAttention(k_cache, v_cache, context_parallel, sliding_window, attention_chunk_size, soft_cap)
    scaled, (output, lse) = query.float() * scale, _nothing_seen(query)
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            output[row], lse[row] = attend(scaled[row], block_table[row], seq_len)
    return output, lse


def segmented_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    prior_tokens: Tensor,
    *,
    context_parallel: ContextParallel,
    kv_segment_size: int,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> Part:
    """A rank's part of `reference.segmented_attention`, of [num_tokens] queries; all prior KV is read at once."""
    attend = _PartialAttention(k_cache, v_cache, context_parallel, sliding_window, attention_chunk_size, soft_cap)
    scaled, (output, lse) = query.float() * scale, _nothing_seen(query)
    bounds = query_start_loc.tolist()
    for row, prior in enumerate(prior_tokens.tolist()):
        segment = slice(bounds[row], bounds[row + 1])
        seq_len = prior + segment.stop - segment.start
        if seq_len > prior:
            least = 0 if kv_segment_size else prior
            output[segment], lse[segment] = attend(scaled[segment], block_table[row], seq_len, least)
    return output, lse


def combine(outputs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The ranks' parts as attention over all keys.

    Args:
        outputs: float32 [world_size, ..., num_heads, head_dim]. lses: float32 [world_size, ..., num_heads].
        sinks: [num_heads]; None = none.

    Returns:
        float32 [..., num_heads, head_dim]; zero where no rank's keys are seen.
    """
    parts = lses if sinks is None else torch.cat((lses, sinks.float().expand_as(lses[:1])))
    # Where nothing is seen the softmax is NaN; what sees nothing weighs nothing all the same.
    weights = torch.softmax(parts, dim=0).masked_fill(parts == float("-inf"), 0.0)
    return (weights[: len(outputs), ..., None] * outputs).sum(dim=0)


def _nothing_seen(query: Tensor) -> Part:
    output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    return output, torch.full_like(output[..., 0], float("-inf"))


@dataclass(frozen=True, slots=True)
class _PartialAttention:
    """One layer's attention over a rank's caches, a request at a time; fields as in `decode_attention`.

    Queries are float32 and scaled already.
    """

    k_cache: Tensor
    v_cache: Tensor
    context_parallel: ContextParallel
    sliding_window: int | None
    attention_chunk_size: int | None
    soft_cap: float | None

    def __call__(self, query: Tensor, block_table: Tensor, seq_len: int, least: int = 0) -> Part:
        """One request's queries [num_queries, num_heads, head_dim] at the last positions before `seq_len`, which see
        no key before position `least`."""
        num_queries, num_heads, head_dim = query.shape
        start = seq_len - num_queries
        first = max(least, masks.first_in_reach(start, self.sliding_window, self.attention_chunk_size))
        keys, values, positions = self._read(block_table, first, seq_len)
        num_kv_heads, num_keys, _ = keys.shape
        by_kv_head = (num_kv_heads, num_heads // num_kv_heads, num_queries)
        grouped = query.view(num_queries, *by_kv_head[:2], head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(grouped, keys.transpose(1, 2))
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if num_queries > 1:
            hidden = ~self._visible(torch.arange(start, seq_len), positions)
            scores.view(*by_kv_head, num_keys).masked_fill_(hidden, float("-inf"))
        # [num_kv_heads, group * num_queries]: a KV head's query heads, one after another.
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
        output = torch.bmm(weights, values).view(*by_kv_head, head_dim)
        return output.permute(2, 0, 1, 3).flatten(1, 2), lse.view(by_kv_head).permute(2, 0, 1).flatten(1)

    def _read(self, block_table: Tensor, first: int, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the rank keeps of positions first .. seq_len - 1, but in blocks of -1: float32 keys and values
        [num_kv_heads, num_keys, head_dim], int64 positions [num_keys]. No other slot reaches the output."""
        block_size, share = self.k_cache.shape[1], self.context_parallel
        places = torch.arange(share.num_kept(first), share.num_kept(seq_len))
        first_block = share.num_kept(first) // block_size
        blocks = block_table[first_block : -(-share.num_kept(seq_len) // block_size)]
        skipped, start = blocks < 0, share.num_kept(first) - first_block * block_size
        keys, values = (
            cache.index_select(0, blocks.clamp_min(0)).flatten(0, 1)[start : start + len(places)]
            for cache in (self.k_cache, self.v_cache)
        )
        if bool(skipped.any()):
            held = ~skipped.repeat_interleave(block_size)[start : start + len(places)]
            places, keys, values = places[held], keys[held], values[held]
        keys, values = to_float32(keys).transpose(0, 1), to_float32(values).transpose(0, 1)
        return keys, values, self.context_parallel.positions(places)

    def _visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return masks.causal(query_positions, key_positions, self.sliding_window, self.attention_chunk_size)
