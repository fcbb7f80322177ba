"""An output's ids and text: both end with the token that completes a stop text, and nothing before it is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import KINDS

from blockplane.control_plane.frontend.output import Output

SMALL = {kind: build() for kind, build in KINDS.items()}
TEXT = {kind: small.text() for kind, small in SMALL.items()}

all_kinds = pytest.mark.parametrize("kind", KINDS)


def output_of(kind: str, *stop_texts: str) -> Output:
    return Output(TEXT[kind].continuation(SMALL[kind].ids(b"hello")), stop_texts)


def ids_of_bytes(kind: str, text: str) -> list[int]:
    return SMALL[kind].ids(*(bytes([byte]) for byte in text.encode()))


@all_kinds
def test_tokens_behind_the_one_that_completes_a_stop_text_are_neither_told_nor_counted(kind: str) -> None:
    output = output_of(kind, "b,c")
    first, rest = ids_of_bytes(kind, "a"), ids_of_bytes(kind, "b,cde")
    assert output.push(first) == (first, "a")
    assert not output.has_stopped
    assert output.push(rest) == (rest[:3], "")
    assert output.has_stopped
    assert output.num_tokens == 4
    assert output.finish() == ""


@all_kinds
def test_ids_are_told_while_their_text_is_held(kind: str) -> None:
    output = output_of(kind, "bcd")
    token_ids = ids_of_bytes(kind, "abce")
    assert output.push(token_ids[:3]) == (token_ids[:3], "a")
    assert output.push(token_ids[3:]) == (token_ids[3:], "bce")
    assert output.num_tokens == 4


@all_kinds
def test_text_that_is_held_at_the_end_is_told(kind: str) -> None:
    output = output_of(kind, "bcd")
    assert output.push(ids_of_bytes(kind, "abc"))[1] == "a"
    assert output.finish() == "bc"
    assert not output.has_stopped


@all_kinds
def test_a_stop_text_of_several_characters_of_several_tokens_is_found(kind: str) -> None:
    output = output_of(kind, "é😀")
    token_ids = ids_of_bytes(kind, "aé😀b")
    assert output.push(token_ids) == (token_ids[:-1], "a")
    assert output.has_stopped


@all_kinds
def test_a_stop_text_may_be_completed_by_an_unfinished_character_at_the_end(kind: str) -> None:
    output = output_of(kind, "a\ufffd")
    assert output.push([*ids_of_bytes(kind, "xa"), *SMALL[kind].ids(b"\xf0")])[1] == "x"
    assert output.finish() == ""
    assert output.has_stopped


@all_kinds
@given(data=st.data())
def test_coalesced_tokens_tell_what_single_ones_tell(kind: str, data: st.DataObject) -> None:
    token_ids = ids_of_bytes(kind, data.draw(st.text("abé", max_size=20)))
    stop_texts = data.draw(st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
    together, single = output_of(kind, *stop_texts), output_of(kind, *stop_texts)
    told_ids, told_text = together.push(token_ids)
    one_by_one: list[tuple[list[int], str]] = []
    for token_id in token_ids:
        if not single.has_stopped:
            one_by_one.append(single.push([token_id]))
    assert told_ids == [token_id for ids, _ in one_by_one for token_id in ids]
    assert told_text + together.finish() == "".join(text for _, text in one_by_one) + single.finish()
    assert together.num_tokens == single.num_tokens == len(told_ids)
