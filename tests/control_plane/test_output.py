"""An output's ids and text: both end with the token that completes a stop text, and nothing before it is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import END, KINDS

from blockplane.control_plane.frontend.output import Output, TextParams

SMALL = {kind: build() for kind, build in KINDS.items()}
TEXT = {kind: small.text() for kind, small in SMALL.items()}

all_kinds = pytest.mark.parametrize("kind", KINDS)


def output_of(kind: str, *stop_texts: str) -> Output:
    return Output(TEXT[kind], SMALL[kind].ids(b"hello"), TextParams(stop_texts))


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
def test_a_stop_text_that_is_to_be_told_is_told_with_its_last_token(kind: str) -> None:
    params = TextParams(("b,c",), include_stop_str_in_output=True)
    output = Output(TEXT[kind], SMALL[kind].ids(b"hello"), params)
    token_ids = ids_of_bytes(kind, "ab,cde")
    assert [output.push([token_id])[1] for token_id in token_ids] == ["a", "", "", "b,c", "", ""]
    assert (output.stop_text, output.num_tokens, output.finish()) == ("b,c", 4, "")


@all_kinds
def test_whose_text_nobody_wants_has_ids_alone_and_its_stop_texts_count_all_the_same(kind: str) -> None:
    token_ids = ids_of_bytes(kind, "ab,cde")
    output = Output(TEXT[kind], [], TextParams(is_told=False))
    assert (output.push(token_ids), output.num_tokens, output.finish()) == ((token_ids, ""), 6, "")
    output = Output(TEXT[kind], [], TextParams(("b,c",), is_told=False))
    assert output.push(token_ids)[0] == token_ids[:4]
    assert output.stop_text == "b,c"


@all_kinds
@pytest.mark.parametrize("skips", [True, False])
def test_a_stop_text_is_looked_for_in_the_text_as_it_is_told(kind: str, skips: bool) -> None:
    output = Output(TEXT[kind], [], TextParams((END,), skip_special_tokens=skips))
    output.push([*ids_of_bytes(kind, "a"), SMALL[kind].end])
    assert output.has_stopped == (not skips)


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
