"""Prior KV in pieces: which are read, and that each is folded in rightly."""

import pytest
import torch
from poisoned_cache import Cache, Shape

from blockplane.kernels import reference, segments
from blockplane.protos.buckets import num_kv_segments, num_partial_segment_tokens


@pytest.mark.parametrize("prior_tokens", [0, 1, 512, 3584, 4096])
def test_as_many_whole_pieces_are_read_as_the_seed_counts_and_the_last_is_masked(prior_tokens: int) -> None:
    *prior, own = segments.pieces(0, prior_tokens, prior_tokens + 7, kv_segment_size=1024)
    assert len(prior) == num_kv_segments(prior_tokens, 1024)
    assert {len(positions) for positions, _ in prior} <= {1024}, "one compiled shape"
    assert own[0].tolist() == list(range(prior_tokens, prior_tokens + 7))
    held = [int((positions < end).sum()) for positions, end in prior]
    assert sum(held) == prior_tokens
    if prior_tokens % 1024:
        assert held[-1] == num_partial_segment_tokens(prior_tokens, 1024)


def test_pieces_that_no_query_reaches_are_left_out() -> None:
    starts = [int(positions[0]) for positions, _ in segments.pieces(2500, 4096, 4100, kv_segment_size=1024)]
    assert starts == [2048, 3072, 4096]


def test_what_a_piece_does_not_hold_is_zeros() -> None:
    cache = Cache(reference, Shape(4, 1, 1), [10])
    cache.block_table[0, 1] = -1
    keys, values, held = segments.load_piece(
        cache.k_cache, cache.v_cache, cache.block_table[0], torch.arange(16), first=2, end=10
    )
    assert held.nonzero().flatten().tolist() == [2, 3, 8, 9]
    assert torch.equal(keys[held], cache.keys[0][[2, 3, 8, 9]])
    assert torch.equal(values[held], cache.values[0][[2, 3, 8, 9]])
    assert not keys[~held].any()
    assert not values[~held].any()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_the_order_of_pieces_does_not_matter_even_where_scores_are_great(order: list[int]) -> None:
    """Weights would overflow, were they not relative to the greatest score."""
    torch.manual_seed(0)
    scores, values = torch.randn(2, 3, 12) * 300, torch.randn(12, 1, 8)
    visible = torch.rand(3, 12) < 0.6
    visible[1] = False
    softmax = segments.OnlineSoftmax(torch.zeros(3, 2, 8), sinks=None)
    for piece in order:
        keys = slice(4 * piece, 4 * piece + 4)
        softmax.fold(scores[..., keys], values[keys], visible[:, keys])
    weights = torch.softmax(scores.double().masked_fill(~visible, -torch.inf), -1).nan_to_num()
    expected = torch.einsum("hqk,kd->qhd", weights, values[:, 0].double())
    torch.testing.assert_close(softmax.output().double(), expected, rtol=1e-5, atol=1e-5)
    assert not softmax.output()[1].any(), "a query that saw nothing"
