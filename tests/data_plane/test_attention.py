"""A layer's attention, block KV and all, against the dense attention that its spec describes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockplane.data_plane.attention import Attention, AttentionSpec, DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.cpu import CPU

PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.4)
SPECS = {
    "plain": PLAIN,
    "window": replace(PLAIN, sliding_window=3),
    "chunks": replace(PLAIN, attention_chunk_size=4),
    "soft cap": replace(PLAIN, soft_cap=0.5),
    "sinks": replace(PLAIN, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}
NUM_TOKENS = 11


def dense(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """float64 [num_tokens, num_heads, head_dim], of one sequence from its first token on."""
    group = spec.num_heads // spec.num_kv_heads
    key, value = (kv.double().repeat_interleave(group, dim=1) for kv in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(NUM_TOKENS)[:, None] - torch.arange(NUM_TOKENS)
    hidden = (distance < 0) | (distance >= (spec.sliding_window or NUM_TOKENS))
    if spec.attention_chunk_size is not None:
        chunks = torch.arange(NUM_TOKENS) // spec.attention_chunk_size
        hidden |= chunks[:, None] != chunks
    weights = scores.exp().masked_fill(hidden, 0.0)
    sinks = torch.zeros(spec.num_heads) if spec.sinks is None else spec.sinks.exp()
    return torch.einsum("hqk,khd->qhd", weights / (weights.sum(-1, keepdim=True) + sinks[:, None, None]), value)


@pytest.mark.parametrize("num_prefilled", [6, 8])
@pytest.mark.parametrize("num_new_tokens", [1, 3])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_two_segments_and_decodes_are_what_the_spec_says(
    spec: AttentionSpec, num_prefilled: int, num_new_tokens: int
) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(NUM_TOKENS, heads, 8) for heads in (4, 2, 2))
    attention = Attention(spec)
    attention.bind_kv_cache(*(torch.full((7, 2, 2, 8), float("nan")) for _ in range(2)), CPU.kernels)
    block_table = torch.tensor([[5, 1, 4, 2, 6, 3]], dtype=torch.int32)
    slots = block_table[0].long().repeat_interleave(2) * 2 + torch.arange(12) % 2
    outputs = []
    for start, end in ((0, 4), (4, num_prefilled)):
        bounds, prior = torch.tensor([0, end - start]).int(), torch.tensor([start]).int()
        batch = PrefillBatch(slots[start:end], block_table, bounds, prior, kv_segment_size=2)
        outputs.append(attention(query[start:end], key[start:end], value[start:end], (batch,)))
    for start in range(num_prefilled, NUM_TOKENS - num_new_tokens + 1, num_new_tokens):
        new = slice(start, start + num_new_tokens)
        batch = DecodeBatch(slots[new], block_table, torch.tensor([new.stop]).int())
        outputs.append(attention(query[new], key[new], value[new], (batch,)))
    output = torch.cat(outputs)
    assert len(output) > NUM_TOKENS - num_new_tokens
    expected = dense(spec, query, key, value)[: len(output)]
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_unsegmented_prefill_computes_a_prompt_at_once() -> None:
    torch.manual_seed(2)
    query, key, value = (torch.randn(NUM_TOKENS, heads, 8) for heads in (4, 2, 2))
    attention = Attention(PLAIN)
    attention.bind_kv_cache(*(torch.full((7, 2, 2, 8), float("nan")) for _ in range(2)), CPU.kernels)
    bounds, prior = torch.tensor([0, NUM_TOKENS]).int(), torch.tensor([0]).int()
    table = torch.arange(1, 7)[None].int()
    batch = PrefillBatch(torch.arange(2, 2 + NUM_TOKENS), table, bounds, prior, kv_segment_size=0)
    output = attention(query, key, value, (batch,))
    torch.testing.assert_close(output.double(), dense(PLAIN, query, key, value), rtol=1e-5, atol=1e-5)
