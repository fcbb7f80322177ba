"""Log-probabilities are those of the model's own softmax, whatever a request asks for beside them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import VOCAB_SIZE, Case, batch_of, cases, changes, temperatures

from blockplane.data_plane.logprobs import logprobs_of, prompt_logprobs
from blockplane.data_plane.sampler import NO_LOGPROBS, sample


@given(seed=st.integers(0, 2**32 - 1), num_top=st.integers(0, 20))
def test_logprobs_are_the_log_softmax_and_the_likeliest_come_first(seed: int, num_top: int) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(seed)) * 4
    token_ids = torch.tensor([0, 7, 499])
    told = logprobs_of(logits, token_ids, num_top)
    exact = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(told.logprobs.double(), exact[range(3), token_ids], atol=1e-5)
    values, ids = exact.topk(num_top, -1)
    assert told.top_token_ids.tolist() == ids.tolist()
    assert torch.allclose(told.top_logprobs.double(), values, atol=1e-5)


@given(chosen=st.lists(cases(temperatures, **changes), min_size=2, max_size=5))
def test_a_sampled_token_s_logprob_is_the_unchanged_model_s_and_only_rows_that_ask_are_told(chosen: list[Case]) -> None:
    logits, batch = batch_of(chosen)
    before = logits.clone()
    asks = np.array([NO_LOGPROBS, 2, *[NO_LOGPROBS, 0, 3][: len(chosen) - 2]], np.int32)
    samples = sample(logits, replace(batch, num_logprobs=asks))
    assert samples.logprobs is not None
    rows = np.flatnonzero(asks != NO_LOGPROBS)
    assert samples.logprobs.top_logprobs.shape == (len(rows), asks.max())
    exact = torch.log_softmax(before.double(), -1)
    for row, told in zip(rows.tolist(), samples.logprobs.logprobs.tolist(), strict=True):
        token_id = int(samples.token_ids[row])
        assert np.isnan(told) if token_id < 0 else told == pytest.approx(float(exact[row, token_id]), abs=1e-5)


@pytest.mark.parametrize("num_at_once", [1, 3, 128])
def test_prompt_logprobs_are_the_same_in_pieces_of_any_size(num_at_once: int) -> None:
    hidden, head = torch.randn(10, 8), torch.randn(8, VOCAB_SIZE)
    following = torch.arange(10)
    sizes = []

    def project(states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return states @ head

    told = prompt_logprobs(hidden, following, project, 2, num_at_once)
    exact = torch.log_softmax((hidden @ head).double(), -1)
    assert max(sizes) == min(num_at_once, 10)
    assert torch.allclose(told.logprobs.double(), exact[range(10), following], atol=1e-4)
    assert told.top_token_ids.tolist() == exact.topk(2, -1).indices.tolist()
