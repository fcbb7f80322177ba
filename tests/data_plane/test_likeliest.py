"""The prefilters are exact: what they find, and what is drawn behind them, is as if every row had been sorted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockplane.data_plane import drawing
from blockplane.data_plane.drawing import Truncation, draw_from_likeliest
from blockplane.data_plane.likeliest import BLOCK_SIZE, likeliest, likeliest_one

FEW_VALUES = np.array([-1e30, -2.5, -1.0, -0.0, 0.0, 1e-40, 1.0, 1.5, 3e38, -np.inf], np.float32)


def sorted_ids(logits: torch.Tensor) -> list[list[int]]:
    """Every row's ids, the larger logit first, and the lower id among equals."""
    return [sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id)) for row in logits.tolist()]


@given(
    vocab_size=st.integers(1, 12 * BLOCK_SIZE),
    k=st.integers(1, 14),
    seed=st.integers(0, 2**32 - 1),
    alike=st.booleans(),
)
def test_the_likeliest_are_the_first_of_the_sorted_row(vocab_size: int, k: int, seed: int, alike: bool) -> None:
    rng = np.random.default_rng(seed)
    shape = (2, vocab_size)
    values = rng.choice(FEW_VALUES, shape) if alike else rng.normal(size=shape).astype(np.float32)
    logits = torch.from_numpy(values)
    found = likeliest(logits, k)
    assert found.token_ids.tolist() == [ids[:k] for ids in sorted_ids(logits)]
    assert torch.equal(found.logits, logits.gather(1, found.token_ids))


@given(vocab_size=st.integers(1, 2100), seed=st.integers(0, 2**32 - 1), alike=st.booleans())
def test_the_likeliest_one_is_the_arg_max(vocab_size: int, seed: int, alike: bool) -> None:
    rng = np.random.default_rng(seed)
    shape = (3, vocab_size)
    values = rng.choice(FEW_VALUES, shape) if alike else rng.normal(size=shape).astype(np.float32)
    logits = torch.from_numpy(values)
    assert likeliest_one(logits).tolist() == [ids[0] for ids in sorted_ids(logits)]


@pytest.mark.parametrize("place", [0, 600, 1029])
def test_the_likeliest_one_of_a_row_with_a_nan_is_an_id_all_the_same(place: int) -> None:
    logits = torch.full((1, 1030), -torch.inf)
    logits[0, place] = torch.nan
    assert 0 <= likeliest_one(logits).item() < 1030


def test_rows_that_lie_apart_in_memory_are_read_as_they_are() -> None:
    logits = torch.randn(4, 700)[::2, 3:]
    assert likeliest(logits, 5).token_ids.tolist() == [ids[:5] for ids in sorted_ids(logits)]


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    top_k=st.lists(st.sampled_from([0, 0, 1, 3, 40, 90, 700]), min_size=4, max_size=4),
    top_p=st.lists(st.just(1.0) | st.floats(1e-3, 1), min_size=4, max_size=4),
    min_p=st.lists(st.just(0.0) | st.floats(0, 1), min_size=4, max_size=4),
)
def test_a_draw_behind_few_candidates_is_the_draw_behind_a_full_sort(
    seed: int, spread: float, top_k: list[int], top_p: list[float], min_p: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.round(rng.normal(size=(4, 700)) * spread, 1).astype(np.float32))
    columns = torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p, dtype=torch.float64)
    rows = logits, torch.from_numpy(rng.uniform(0.3, 2, 4)), torch.from_numpy(rng.uniform(size=4))
    drawn = []
    for few, many in ((1, 1), (5, 50), (64, 64), (0, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawing, "FEW_CANDIDATES", few or 1)
            patch.setattr(drawing, "MANY_CANDIDATES", many)
            drawn.append(draw_from_likeliest(*rows, Truncation(*columns)).tolist())
    assert drawn == [drawn[-1]] * 4


def test_a_vocabulary_is_sorted_only_for_rows_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 draws from its three likeliest; in row 1 all are alike, so that half of them hold half the probability."""
    asked: list[tuple[int, int]] = []

    def counted(logits: torch.Tensor, k: int) -> object:
        asked.append((len(logits), k))
        return likeliest(logits, k)

    monkeypatch.setattr(drawing, "likeliest", counted)
    logits = torch.zeros(2, 2000)
    logits[0, :3] = 50.0
    half, one = torch.full((2,), 0.5, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    truncation = Truncation(torch.zeros(2, dtype=torch.int64), half, 0 * one)
    tokens = draw_from_likeliest(logits, one, half, truncation).tolist()
    assert asked == [(2, drawing.FEW_CANDIDATES), (1, 16 * drawing.FEW_CANDIDATES)]
    # The candidates in order are the ids in order; the noise points to the middle of the first two, and of 1000.
    assert tokens == [1, 500]
