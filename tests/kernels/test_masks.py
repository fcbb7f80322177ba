"""The masks of attention against the sentences that define them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockplane.kernels import masks
from blockplane.protos.kv_cache import first_visible

LIMITS = st.one_of(st.none(), st.integers(1, 12))


def test_the_history_mask_is_true_below_each_rows_cache_length() -> None:
    mask = masks.cache_mask(torch.tensor([[5], [0], [8], [-2]], dtype=torch.int32), 3, 2, 8)
    assert mask.shape == (4, 3, 2, 8)
    assert mask.dtype == torch.bool
    for row, length in enumerate([5, 0, 8, 0]):
        expected = torch.tensor([position < length for position in range(8)])
        assert (mask[row] == expected).all()


def test_in_a_chain_a_new_token_sees_those_before_it_and_itself() -> None:
    mask = masks.causal_active_mask(2, 3, 4, torch.device("cpu"))
    assert mask.shape == (2, 3, 4, 4)
    assert mask[1, 2].tolist() == [[seen <= token for seen in range(4)] for token in range(4)]


@given(
    first=st.integers(0, 30), num_queries=st.integers(1, 5), num_keys=st.integers(0, 40), window=LIMITS, chunk=LIMITS
)
def test_reach_and_order_are_what_a_loop_says(
    first: int, num_queries: int, num_keys: int, window: int | None, chunk: int | None
) -> None:
    queries, keys = torch.arange(first, first + num_queries), torch.arange(num_keys)
    reached, seen = (mask(queries, keys, window, chunk) for mask in (masks.in_reach, masks.causal))
    assert reached.shape == seen.shape == (num_queries, num_keys)
    for row, query in enumerate(queries.tolist()):
        for key in range(num_keys):
            near = window is None or query - key < window
            if chunk is not None:
                near = key // chunk == query // chunk
            assert reached[row, key] == near
            assert seen[row, key] == (near and key <= query)


@given(position=st.integers(0, 40), window=LIMITS, chunk=LIMITS)
def test_what_is_kept_for_a_query_is_what_it_sees(position: int, window: int | None, chunk: int | None) -> None:
    """The planes keep from `first_visible` on, the kernels read from `first_in_reach` on, and the mask agrees."""
    first = masks.first_in_reach(position, window, chunk)
    assert first == first_visible(position, window, chunk)
    seen = masks.causal(torch.tensor([position]), torch.arange(position + 1), window, chunk)[0]
    assert seen.nonzero()[0].item() == first
    assert seen[first:].all()


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4)])
def test_a_query_before_position_0_sees_nothing(window: int | None, chunk: int | None) -> None:
    assert masks.first_in_reach(-2, window, chunk) == 0
    assert not masks.causal(torch.tensor([-2, -1]), torch.arange(6), window, chunk).any()
