"""Stop texts: nothing of one is told, nothing else is lost, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.frontend.stop_texts import (
    MAX_STOP_TEXT_LENGTH,
    MAX_STOP_TEXTS,
    StopTexts,
    check_stop_texts,
)
from blockplane.protos.errors import InvalidRequestError


def told(stop_texts: list[str], pieces: list[str], *, is_told: bool = False) -> list[str]:
    """What is told after each piece, and at the end."""
    stops = StopTexts(stop_texts, is_told=is_told)
    return [*(stops.push(piece) for piece in pieces), stops.finish()]


def naive_cut(stop_texts: list[str], text: str) -> int | None:
    """Read the text character by character: where does what ends it begin?"""
    for end in range(1, len(text) + 1):
        complete = [stop_text for stop_text in stop_texts if text[:end].endswith(stop_text)]
        if complete:
            return end - max(map(len, complete))
    return None


# -- examples ----------------------------------------------------------------------------------------------------------


def test_nothing_of_a_stop_text_that_comes_letter_by_letter_is_told() -> None:
    stops = StopTexts(["DEFGHIJ"])
    assert [stops.push(letter) for letter in "ABCDEFGHIJ"] == ["A", "B", "C", *[""] * 7]
    assert stops.found
    assert stops.push("KLM") == stops.finish() == ""


def test_a_near_miss_is_released_whole_with_the_letter_that_tells_it() -> None:
    assert told(["DEFGHIJ"], [*"ABCDEFGHIX"]) == ["A", "B", "C", *[""] * 6, "DEFGHIX", ""]


def test_a_stop_text_over_three_pieces_is_found() -> None:
    assert told(["b,c"], ["a b", ",", "c d"]) == ["a ", "", "", ""]


def test_a_stop_text_inside_one_piece_is_found() -> None:
    assert told(["b,c"], ["ab,cd"]) == ["a", ""]


def test_what_is_held_at_the_end_is_told() -> None:
    assert told(["DEFGHIJ"], ["ABCDEF"]) == ["ABC", "DEF"]


def test_a_miss_that_begins_a_stop_text_anew_is_held_from_there() -> None:
    assert told(["aab"], ["a", "a", "a", "b"]) == ["", "", "a", "", ""]
    assert told(["abac"], ["aba", "bac"]) == ["", "ab", ""]


def test_the_first_to_be_complete_ends_the_text() -> None:
    assert told(["bcdef", "cd"], ["abcdef"]) == ["ab", ""]
    assert told(["cd", "abcd"], [*"abcd"]) == ["", "", "", "", ""], "of two with one end the longer"
    assert told(["ab", "abc"], ["xabc"]) == ["x", ""]


def test_without_stop_texts_nothing_is_held() -> None:
    assert told([], ["a", "", "bc"]) == ["a", "", "bc", ""]


# -- any text ----------------------------------------------------------------------------------------------------------

few_letters = st.sampled_from("ab")


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(st.text(few_letters, max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=30)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(st.lists(st.text(few_letters, min_size=1, max_size=6), max_size=4), cut_texts())
def test_a_text_is_cut_where_the_first_to_be_complete_begins(stop_texts: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert "".join(told(stop_texts, pieces)) == text[: naive_cut(stop_texts, text)]


@given(st.text(few_letters, min_size=1, max_size=6), cut_texts())
def test_of_one_stop_text_the_earliest_occurrence_counts(stop_text: str, pieces: list[str]) -> None:
    assert "".join(told([stop_text], pieces)) == "".join(pieces).split(stop_text)[0]


@given(st.lists(st.text(few_letters, min_size=1, max_size=6), max_size=4), cut_texts())
def test_only_what_may_begin_a_stop_text_is_held(stop_texts: list[str], pieces: list[str]) -> None:
    stops, text, shown = StopTexts(stop_texts), "", ""
    for piece in pieces:
        text, shown = text + piece, shown + stops.push(piece)
        if stops.found:
            break
        held = text[len(shown) :]
        assert not held or any(stop_text.startswith(held) for stop_text in stop_texts)
        ends = [text[start:] for start in range(len(text))]
        longest = max((len(end) for end in ends for stop in stop_texts if stop.startswith(end)), default=0)
        assert len(held) == longest


@given(st.lists(st.text(few_letters, min_size=1, max_size=6), max_size=4), cut_texts())
def test_it_is_found_with_the_piece_that_completes_it(stop_texts: list[str], pieces: list[str]) -> None:
    stops, text = StopTexts(stop_texts), ""
    for piece in pieces:
        text += piece
        stops.push(piece)
        assert (stops.found is not None) == any(stop_text in text for stop_text in stop_texts)


@given(st.lists(st.text(few_letters, min_size=1, max_size=6), max_size=4), cut_texts())
def test_the_one_that_came_is_named_and_told_where_it_is_to_be(stop_texts: list[str], pieces: list[str]) -> None:
    text, stops = "".join(pieces), StopTexts(stop_texts)
    for piece in pieces:
        stops.push(piece)
    start = naive_cut(stop_texts, text)
    assert (stops.found is None) == (start is None)
    shown = "".join(told(stop_texts, pieces, is_told=True))
    assert shown == (text if start is None else text[:start] + (stops.found or ""))


# -- limits ------------------------------------------------------------------------------------------------------------


def test_as_many_and_as_long_as_the_limits_say_are_taken() -> None:
    check_stop_texts(["x" * MAX_STOP_TEXT_LENGTH] * MAX_STOP_TEXTS)
    check_stop_texts([])


@pytest.mark.parametrize(
    ("stop_texts", "sentence"),
    [
        (["x"] * 17, "stop holds 17 texts; send 16 at most."),
        (["x", ""], "stop holds an empty text; leave it out, or send one that can be found."),
        (["x" * 257], "stop holds a text of 257 characters; send 256 at most."),
    ],
)
def test_what_is_beyond_the_limits_is_refused_by_its_field(stop_texts: list[str], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_stop_texts(stop_texts)
    assert str(refused.value) == sentence
