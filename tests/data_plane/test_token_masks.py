"""Masks over logits: each bit is its id's, rows without one stay bitwise as they are, and other changes come after."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockplane.data_plane.logit_changes import LogitChanges, TokenMasks, entries
from blockplane.data_plane.sampler import NO_LOGPROBS, NOT_FINITE, SamplingBatch, sample

NO_CHANGES = LogitChanges(None, None, None, np.zeros(0), None, np.zeros(0, np.int64), np.zeros((0, 3)))


def masks_of(allowed: dict[int, set[int]], vocab_size: int) -> TokenMasks:
    """By batch index what may come, bit by bit."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32)), np.uint32)
    for mask, token_ids in zip(bits, allowed.values(), strict=True):
        for token_id in token_ids:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return TokenMasks(np.array(list(allowed), np.int64), bits.view(np.int32))


@given(st.data(), st.sampled_from([1, 31, 32, 33, 258]), st.integers(1, 5))
def test_a_masked_row_keeps_what_its_mask_lets_come_and_others_keep_every_bit(
    data: st.DataObject, vocab_size: int, num_rows: int
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, num_rows - 1), min_size=1)))
    allowed = {row: data.draw(st.sets(st.integers(0, vocab_size - 1))) for row in rows}
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for row, token_ids in allowed.items():
        for token_id in set(range(vocab_size)) - token_ids:
            expected[row, token_id] = -torch.inf
    masks_of(allowed, vocab_size).apply(logits)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


def batch(changes: LogitChanges, num_rows: int) -> SamplingBatch:
    zeros, ones = np.zeros(num_rows), np.ones(num_rows)
    return SamplingBatch(
        seed=np.arange(num_rows, dtype=np.uint64),
        positions=np.arange(num_rows),
        temperature=zeros,
        top_k=zeros.astype(np.int64),
        top_p=ones,
        min_p=zeros,
        num_logprobs=np.full(num_rows, NO_LOGPROBS, np.int32),
        logit_changes=changes,
    )


def test_a_bias_and_a_penalty_work_on_what_the_mask_left() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    biased = entries([(0, np.array([0, 2]))])
    penalized = entries([(0, np.array([0, 2]))])
    changes = replace(
        NO_CHANGES,
        masks=masks_of({0: {1, 2}}, 4),
        biased=biased,
        biases=np.array([50.0, 1.5]),
        penalized=penalized,
        output_counts=np.array([1, 1]),
        penalties=np.array([[2.0, 0.25, 0.25]] * 2),
    )
    changes.apply(logits)
    assert logits.tolist() == [[-torch.inf, 4.0, 1.75, -torch.inf]]


@pytest.mark.parametrize("why", ["nothing may come", "the rest is banned"])
def test_a_row_to_which_no_id_is_left_fails_alone(why: str) -> None:
    allowed = {0: set[int]() if why == "nothing may come" else {2}, 1: {1}}
    changes = replace(NO_CHANGES, masks=masks_of(allowed, 4), banned=entries([(0, np.array([2]))]))
    samples = sample(torch.tensor([[5.0, 4.0, 3.0, 2.0]] * 3), batch(changes, 3))
    assert samples.token_ids.tolist() == [NOT_FINITE, 1, 0]
