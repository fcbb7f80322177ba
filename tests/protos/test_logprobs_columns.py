"""Columns of log-probabilities are picked, split and joined as the lists that they stand for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from told import Entries, columns_of, lists_of

from blockplane.protos.logprobs import join, join_told

entries = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=4)
tokens = st.lists(entries, max_size=8)


@given(tokens=tokens, data=st.data())
def test_some_tokens_are_taken_in_any_order_with_their_own_entries(tokens: list[Entries], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=10) if tokens else st.just([]))
    taken = columns_of(tokens).take(np.array(indices, np.int64))
    assert lists_of(taken) == [tokens[index] for index in indices]
    assert [column.dtype for column in (taken.num_entries, taken.token_ids, taken.logprobs)] == ["i4", "i4", "f4"]


@given(runs=st.lists(tokens, max_size=5))
def test_what_is_split_is_the_same_when_it_is_joined_again(runs: list[list[Entries]]) -> None:
    whole = [entries for run in runs for entries in run]
    parts = columns_of(whole).split([len(run) for run in runs])
    assert [lists_of(part) for part in parts] == runs
    if parts:
        assert lists_of(join(parts)) == whole


@given(runs=st.lists(st.tuples(tokens, st.booleans()), max_size=5))
def test_runs_of_which_nothing_is_told_keep_their_places_empty(
    runs: list[tuple[list[Entries], bool]],
) -> None:
    joined = join_told([(len(run), columns_of(run) if is_told else None) for run, is_told in runs])
    expected = [entries if is_told else [] for run, is_told in runs for entries in run]
    if any(expected):
        assert lists_of(joined) == expected
    else:
        assert joined is None
