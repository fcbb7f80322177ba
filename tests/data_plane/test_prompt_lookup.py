"""Drafts from a row's own text: an index that is kept up as the text grows finds what a search of all of it finds."""

import numpy as np
import pytest
from drafting import planes_with, text_of
from hypothesis import given
from hypothesis import strategies as st
from test_graphs import TinyModel

from blockplane.data_plane.prompt_lookup import MAX_RUN, PromptLookup, RunIndex
from blockplane.data_plane.rows import Rows
from blockplane.protos.plan import Admission, Configure, Int32Array, StepPlan
from blockplane.protos.sampling import SamplingParams

CONFIGURE = Configure(4, 100, 64, (64,), (4,), num_draft_tokens=5)


def column(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def naive_place(text: list[int]) -> int:
    """Behind the latest earlier occurrence of the longest run that ends the text; 0 = none."""
    for length in range(min(MAX_RUN, len(text)), 0, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == text[-length:]:
                return place
    return 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_an_index_finds_what_a_search_of_the_whole_text_finds_however_the_text_grew(
    text: list[int], data: st.DataObject
) -> None:
    index, length = RunIndex(), 0
    while length < len(text):
        length = data.draw(st.integers(length + 1, len(text)))
        index.catch_up(column(*text[:length]))
        assert index.find(column(*text[:length])) == naive_place(text[:length])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 40))
def test_catching_up_with_less_than_is_known_changes_nothing(text: list[int], length: int) -> None:
    index = RunIndex()
    index.catch_up(column(*text))
    index.catch_up(column(*text[:length]))
    assert index.find(column(*text)) == naive_place(text)


def lookup(texts: dict[int, list[int]]) -> tuple[Rows, PromptLookup]:
    """Rows that hold these texts, and the source over them."""
    rows = Rows(CONFIGURE)
    source = PromptLookup(rows)
    apply(rows, source, StepPlan(1, admissions=admissions(texts)))
    return rows, source


def admissions(texts: dict[int, list[int]]) -> tuple[Admission, ...]:
    return tuple(Admission(row, column(*text), len(text), 0, SamplingParams(1), 0) for row, text in texts.items())


def apply(rows: Rows, source: PromptLookup, plan: StepPlan) -> None:
    rows.apply(plan)
    source.apply(plan)


def drafts_of(rows: Rows, source: PromptLookup, chosen: Int32Array, most: Int32Array) -> list[list[int]]:
    """What is proposed for each row."""
    counts = source.propose(chosen, most)
    assert counts.dtype == np.int32
    known = rows.num_tokens[chosen]
    return [
        rows.token_ids[row, start : start + count].tolist()
        for row, start, count in zip(chosen.tolist(), known.tolist(), counts.tolist(), strict=True)
    ]


def test_each_row_gets_what_followed_the_last_time_in_its_own_text_up_to_its_room() -> None:
    rows, source = lookup({2: [1, 2, 3, 4, 1, 2], 0: [7, 8, 9], 3: [1, 5, 6, 1, 7, 8, 1]})
    chosen = column(2, 0, 3)
    assert drafts_of(rows, source, chosen, column(3, 3, 3)) == [[3, 4, 1], [], [7, 8, 1]]
    assert drafts_of(rows, source, chosen, column(0, 2, 1)) == [[], [], [7]]


def test_the_longest_run_wins_over_a_later_place_of_a_shorter_one() -> None:
    rows, source = lookup({0: [1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3]})
    assert drafts_of(rows, source, column(0), column(1)) == [[9]]


@pytest.mark.parametrize(("text", "drafts"), [([4, 4], [4] * 5), ([1, 2, 1, 2], [1, 2, 1, 2, 1]), ([5], [])])
def test_a_text_that_repeats_itself_is_taken_to_go_on_so(text: list[int], drafts: list[int]) -> None:
    assert drafts_of(*lookup({1: text}), column(1), column(5)) == [drafts]


def test_drafts_come_from_known_tokens_alone_and_from_those_that_a_row_has_gained() -> None:
    """Drafts of the step before still lie behind the text; they were never said."""
    rows, source = lookup({1: [1, 2, 3, 1]})
    assert drafts_of(rows, source, column(1), column(4)) == [[2, 3, 1, 2]]
    rows.append(column(1), column(9))
    assert drafts_of(rows, source, column(1), column(4)) == [[]]
    rows.append(column(1), column(1, 9), column(2))
    assert drafts_of(rows, source, column(1), column(3)) == [[1, 9, 1]]


def test_a_row_that_nobody_has_keeps_no_index() -> None:
    rows, source = lookup({1: [1, 2, 3, 1], 2: [4]})
    apply(rows, source, StepPlan(2, released_rows=column(1)))
    assert source._indexes.keys() == {2}


def test_a_prompt_is_indexed_segment_by_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no step waits for all of a long one; the first decode finds only its newest token to take in."""
    lengths: list[int] = []
    catch_up = RunIndex.catch_up

    def spy(index: RunIndex, token_ids: Int32Array) -> None:
        lengths.append(len(token_ids))
        catch_up(index, token_ids)

    monkeypatch.setattr(RunIndex, "catch_up", spy)
    planes = planes_with(2, model=TinyModel(), num_batched_tokens_buckets=(16,))
    text_of(planes, range(40), SamplingParams(2, ignore_eos=True))
    assert lengths == [16, 32, 40, 41]


def test_a_row_that_changes_hands_forgets_its_text() -> None:
    rows, source = lookup({1: [1, 2, 3, 1]})
    source.propose(column(1), column(1))
    apply(rows, source, StepPlan(2, released_rows=column(1), admissions=admissions({1: [3, 1]})))
    assert drafts_of(rows, source, column(1), column(4)) == [[]]
