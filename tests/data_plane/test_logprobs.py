"""Log-probabilities are those of the model's own softmax, whatever a request asks for beside them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import VOCAB_SIZE, Case, batch_of, cases, changes, temperatures
from sampling_ways import way  # noqa: F401 - a fixture
from told import Entries, lists_of

from blockplane.data_plane import logprobs
from blockplane.data_plane.logprobs import logprobs_of, prompt_logprobs
from blockplane.data_plane.sampler import NO_LOGPROBS, sample


def assert_told(told: list[Entries], logits: torch.Tensor, token_ids: list[int], num_likeliest: list[int]) -> None:
    """Each token first, then its likeliest rivals in order, as an exact log-softmax has them."""
    exact = torch.log_softmax(logits.double(), -1)
    for entries, row, token_id, count in zip(told, exact, token_ids, num_likeliest, strict=True):
        assert [entry_id for entry_id, _ in entries] == [token_id, *row.argsort(descending=True, stable=True)[:count]]
        assert [logprob for _, logprob in entries] == pytest.approx([float(row[i]) for i, _ in entries], abs=1e-5)


@given(seed=st.integers(0, 2**32 - 1), num_likeliest=st.lists(st.integers(0, 20), min_size=3, max_size=3))
def test_each_token_comes_first_and_then_as_many_of_the_likeliest_as_it_asks_for(
    seed: int, num_likeliest: list[int]
) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(seed)) * 4
    told = logprobs_of(logits, torch.tensor([0, 7, 499]), np.array(num_likeliest, np.int32))
    assert_told(lists_of(told), logits, [0, 7, 499], num_likeliest)


def test_a_small_vocabulary_is_told_whole() -> None:
    told = logprobs_of(torch.zeros(2, 3), torch.tensor([2, 1]), np.array([20, 3], np.int32))
    assert [[token_id for token_id, _ in entries] for entries in lists_of(told)] == [[2, 0, 1, 2], [1, 0, 1, 2]]


def test_of_no_token_nothing_is_told() -> None:
    logits = torch.randn(2, 9)
    told = lists_of(logprobs_of(logits, torch.tensor([-1, 4]), np.array([2, 2], np.int32)))
    assert told[0] == []
    assert_told(told[1:], logits[1:], [4], [2])


@given(chosen=st.lists(cases(temperatures, **changes), min_size=2, max_size=5))
def test_a_sampled_token_s_logprob_is_the_unchanged_model_s_and_only_rows_that_ask_are_told(chosen: list[Case]) -> None:
    logits, batch = batch_of(chosen)
    before = logits.clone()
    asks = np.array([NO_LOGPROBS, 2, *[NO_LOGPROBS, 0, 3][: len(chosen) - 2]], np.int32)
    samples = sample(logits, replace(batch, num_logprobs=asks))
    told = lists_of(samples.logprobs)
    assert len(told) == len(chosen)
    rows = np.flatnonzero((asks != NO_LOGPROBS) & (samples.token_ids >= 0))
    assert [index for index, entries in enumerate(told) if entries] == rows.tolist()
    token_ids, counts = samples.token_ids[rows].tolist(), asks[rows].tolist()
    assert_told([told[row] for row in rows], before[torch.from_numpy(rows)], token_ids, counts)


@pytest.mark.parametrize("num_at_once", [1, 3, 128])
def test_prompt_logprobs_are_the_same_in_pieces_of_any_size(num_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "NUM_AT_ONCE", num_at_once)
    hidden, head = torch.randn(10, 8), torch.randn(8, VOCAB_SIZE)
    sizes = []

    def project(states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return states @ head

    told = prompt_logprobs(hidden, torch.arange(10), project, 2)
    assert max(sizes) == min(num_at_once, 10)
    assert_told(lists_of(told), hidden @ head, [*range(10)], [2] * 10)
