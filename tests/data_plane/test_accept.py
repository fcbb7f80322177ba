"""Which drafts the target takes: in each row those before the first that it would not have said itself."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockplane.data_plane.drafts import accept
from blockplane.data_plane.graphs import Shape
from blockplane.data_plane.inputs import StepInputs
from blockplane.data_plane.sampler import NOT_FINITE
from blockplane.protos.plan import Int32Array

WIDTH = 4


def column(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def decode_of(texts: list[list[int]]) -> StepInputs:
    """The inputs of rows that compute these tokens each: the newest, and drafts; padded in front, and by one row."""
    padded = [[0] * (WIDTH - len(text)) + text for text in [*texts, []]]
    is_token = [[offset >= WIDTH - len(text) for offset in range(WIDTH)] for text in [*texts, []]]
    return StepInputs(
        shape=Shape(WIDTH * len(padded), len(padded)),
        rows=np.arange(len(texts)),
        num_scheduled_tokens=column(*map(len, texts)),
        sampled_rows=np.repeat(np.arange(len(texts)), [*map(len, texts)]),
        input_ids=torch.tensor(padded).flatten(),
        positions=torch.zeros(WIDTH * len(padded), dtype=torch.int64),
        logits_indices=torch.tensor(is_token).flatten().nonzero().flatten(),
        first_indices=np.arange(1, len(texts) + 1) * WIDTH - column(*map(len, texts)),
        batches=(),
    )


def naive_accept(text: list[int], sampled: list[int]) -> int:
    """How many of a row's samples count: all whose text before them was said."""
    count = 1
    while count < len(text) and text[count] == sampled[count - 1]:
        count += 1
    return count


rows_of_tokens = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(NOT_FINITE, 2)), min_size=1, max_size=WIDTH), min_size=1
)


@given(rows_of_tokens)
def test_a_row_gets_its_samples_up_to_the_first_that_its_drafts_did_not_foresee(
    rows: list[list[tuple[int, int]]],
) -> None:
    texts = [[token for token, _ in row] for row in rows]
    samples = [[sample for _, sample in row] for row in rows]
    is_new, num_new = accept(decode_of(texts), column(*[sample for row in samples for sample in row]))
    expected = [naive_accept(text, sampled) for text, sampled in zip(texts, samples, strict=True)]
    assert num_new.tolist() == expected
    assert num_new.dtype == np.int32
    flags = [index < count for text, count in zip(texts, expected, strict=True) for index in range(len(text))]
    assert is_new.tolist() == flags


def test_a_right_draft_behind_a_wrong_one_does_not_count() -> None:
    is_new, num_new = accept(decode_of([[1, 2, 3, 4]]), column(2, 9, 4, 5))
    assert (is_new.tolist(), num_new.tolist()) == ([True, True, False, False], [2])


def test_a_sample_that_is_not_finite_is_its_row_s_last() -> None:
    is_new, num_new = accept(decode_of([[1, 2, 3], [4]]), column(2, NOT_FINITE, 3, 5))
    assert (is_new.tolist(), num_new.tolist()) == ([True, True, False, True], [2, 1])


def test_a_sample_that_equals_the_next_row_s_token_is_no_draft_s() -> None:
    is_new, num_new = accept(decode_of([[1], [2, 3]]), column(2, 3, 9))
    assert (is_new.tolist(), num_new.tolist()) == ([True, True, True], [1, 2])
