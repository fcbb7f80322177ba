"""Deltas of a growing output: nothing lost, nothing told twice, no character cut, whatever the tokenizer's kind."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import END, KINDS, SmallTokenizer
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

REPLACEMENT = "\ufffd"
SMALL = {kind: build() for kind, build in KINDS.items()}
TEXT = {kind: small.text() for kind, small in SMALL.items()}

all_kinds = pytest.mark.parametrize("kind", KINDS)


def deltas(kind: str, prompt: list[int], output: list[int]) -> list[str]:
    """One delta for each token of `output`, then what `finish` tells."""
    continuation = TEXT[kind].continuation(prompt)
    return [*(continuation.push([token_id]) for token_id in output), continuation.finish()]


def told(kind: str, prompt: list[int], output: list[int]) -> str:
    return "".join(deltas(kind, prompt, output))


def text_of(small: SmallTokenizer, token_ids: list[int]) -> str:
    """What UTF-8 says of the tokens' bytes; the definition that deltas are held to."""
    return b"".join(small.bytes_of[token_id] for token_id in token_ids).decode(errors="replace")


def without_run_lengths(text: str) -> str:
    """How many replacement characters stand for a run of bytes that are no character is nobody's business."""
    return re.sub(f"{REPLACEMENT}+", REPLACEMENT, text)


def token_ids(kind: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Any tokens at all, those inside characters more often than their number says."""
    small = SMALL[kind]
    ordinary = st.integers(0, len(small.bytes_of) - 1)
    broken = st.sampled_from([index for index, piece in enumerate(small.bytes_of) if REPLACEMENT in _lossy(piece)])
    words = st.sampled_from(range(256, len(small.bytes_of)))
    return st.lists(ordinary | broken | words, max_size=max_size)


def _lossy(piece: bytes) -> str:
    return piece.decode(errors="replace")


characters = st.sampled_from("a é你好😀ı\n�\u2581") | st.characters(codec="utf-8")
texts = st.text(characters, max_size=12)


@st.composite
def cut_texts(draw: st.DrawFn, kind: str) -> list[int]:
    """A valid text as tokens, cut in any way that the vocabulary allows, special tokens thrown in."""
    small, rest, ids = SMALL[kind], draw(texts).encode(), list[int]()
    while rest:
        choices = [index for index, piece in enumerate(small.bytes_of) if piece and rest.startswith(piece)]
        ids.append(draw(st.sampled_from(choices)))
        rest = rest[len(small.bytes_of[ids[-1]]) :]
        ids += [small.end] * draw(st.sampled_from([0, 0, 0, 1, 5]))
    return ids


# -- valid text --------------------------------------------------------------------------------------------------------


@all_kinds
@given(data=st.data())
def test_deltas_join_to_the_text_however_it_is_cut_into_tokens(kind: str, data: st.DataObject) -> None:
    small = SMALL[kind]
    prompt, output = small.ids(b"hello"), data.draw(cut_texts(kind))
    assert told(kind, prompt, output) == text_of(small, output)


@all_kinds
@given(prompt=texts, output=texts)
def test_deltas_join_to_what_decoding_the_whole_adds_to_the_prompt(kind: str, prompt: str, output: str) -> None:
    tokenizer = SMALL[kind].tokenizer
    whole = tokenizer.encode(prompt + output).ids
    prompt_ids = whole[: len(tokenizer.encode(prompt).ids)]
    before = tokenizer.decode(prompt_ids)
    assert before + told(kind, prompt_ids, whole[len(prompt_ids) :]) == tokenizer.decode(whole) == prompt + output


@all_kinds
@given(data=st.data())
def test_no_delta_of_a_valid_text_holds_a_replacement_character(kind: str, data: st.DataObject) -> None:
    small = SMALL[kind]
    output = [token_id for token_id in data.draw(cut_texts(kind)) if small.bytes_of[token_id] != REPLACEMENT.encode()]
    *pushed, rest = deltas(kind, small.ids(b"hello"), output)
    if REPLACEMENT not in text_of(small, output):
        assert all(REPLACEMENT not in delta for delta in pushed)
        assert rest == ""


@all_kinds
def test_an_emoji_of_four_byte_tokens_arrives_as_one_delta(kind: str) -> None:
    emoji = SMALL[kind].ids(*(bytes([byte]) for byte in "😀".encode()))
    assert len(emoji) == 4
    assert deltas(kind, SMALL[kind].ids(b"hello"), emoji * 2) == ["", "", "", "😀"] * 2 + [""]
    assert deltas(kind, [], emoji) == ["", "", "", "😀", ""]


@all_kinds
def test_text_arrives_with_its_own_token(kind: str) -> None:
    output = SMALL[kind].ids(b" hello", b"  ", b"world", b"\xc3", b"\xa9", b" ")
    assert deltas(kind, SMALL[kind].ids(b"hello"), output) == [" hello", "  ", "world", "", "é", " ", ""]


def test_a_token_that_ends_inside_a_character_tells_what_comes_before_it() -> None:
    small = SMALL["byte_level"]
    output = small.ids("x😀".encode()[:3], b"\x98", b"\x80", b"\xe4", "你好".encode()[1:4], b"\xa5", b"\xbd")
    assert deltas("byte_level", [], output) == ["x", "", "😀", "", "你", "", "好", ""]


# -- spaces ------------------------------------------------------------------------------------------------------------


@all_kinds
def test_the_space_between_prompt_and_output_is_kept(kind: str) -> None:
    small = SMALL[kind]
    assert told(kind, small.ids(b"hello"), small.ids(b" world")) == " world"
    assert told(kind, [*small.ids(b"hello"), *[small.end] * 20], small.ids(b" world")) == " world"
    assert told(kind, small.ids(b"hello", b"world"), small.ids(b"world")) == "world"


@all_kinds
@pytest.mark.parametrize("prompt", [[], ["end"]], ids=["empty", "special"])
def test_a_decoder_that_strips_does_so_at_the_very_start_only(kind: str, prompt: list[str]) -> None:
    small = SMALL[kind]
    prompt_ids = [small.end] * len(prompt)
    space = "" if small.strips_first_space else " "
    assert told(kind, prompt_ids, small.ids(b" hello", b" world")) == f"{space}hello world"
    assert told(kind, prompt_ids, small.ids(b" ", b" hello")) == f"{space} hello"
    assert told(kind, prompt_ids, [small.end, *small.ids(b" hello")]) == f"{space}hello"


@all_kinds
@pytest.mark.parametrize("num_tokens", [1, 4, 20])
def test_special_tokens_yield_no_text_and_spoil_no_space_or_character(kind: str, num_tokens: int) -> None:
    small, pause = SMALL[kind], [SMALL[kind].end] * num_tokens
    prompt = small.ids(b"hello")
    assert deltas(kind, prompt, pause) == [""] * (num_tokens + 1)
    assert told(kind, prompt, [*pause, *small.ids(b" world")]) == " world"
    output = [*small.ids(b" world", b"\xe4"), *pause, *small.ids(b"\xbd"), *pause, *small.ids(b"\xa0", b" hello")]
    assert told(kind, prompt, output) == " world你 hello"


@all_kinds
def test_ids_beyond_the_tokenizer_yield_no_text(kind: str) -> None:
    beyond = len(SMALL[kind].bytes_of) + 7
    assert told(kind, SMALL[kind].ids(b"hello"), [beyond, *SMALL[kind].ids(b" world"), beyond]) == " world"


# -- bytes that are no text --------------------------------------------------------------------------------------------


@all_kinds
@given(data=st.data())
def test_any_tokens_are_told_as_utf8_says(kind: str, data: st.DataObject) -> None:
    small, output = SMALL[kind], data.draw(token_ids(kind))
    joined = told(kind, small.ids(b"hello"), output)
    assert without_run_lengths(joined) == without_run_lengths(text_of(small, output))


@given(data=st.data())
def test_byte_level_deltas_join_to_the_library_s_decoding_even_of_garbage(data: st.DataObject) -> None:
    output = data.draw(token_ids("byte_level"))
    assert told("byte_level", [], output) == SMALL["byte_level"].tokenizer.decode(output)


@all_kinds
def test_bytes_that_are_no_character_are_told_within_four_tokens_and_stall_nothing(kind: str) -> None:
    small = SMALL[kind]
    continuation = TEXT[kind].continuation(small.ids(b"hello"))
    for _ in range(50):
        delta = continuation.push(small.ids(*[b"\xff"] * 4))
        assert set(delta) == {REPLACEMENT}
    assert continuation.push(small.ids(b" world")).lstrip(REPLACEMENT) == " world"
    assert continuation.finish() == ""


@all_kinds
@pytest.mark.parametrize("broken", [b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xff\xff", b"\x80\x80\x80"])
@pytest.mark.parametrize("after", ["é", "你!", "😀", " world", "é你"])
def test_broken_bytes_spoil_neither_what_was_told_nor_what_follows(kind: str, broken: bytes, after: str) -> None:
    small = SMALL[kind]
    tail = small.ids(b" world") if after == " world" else small.ids(*(bytes([byte]) for byte in after.encode()))
    output = [
        *small.ids(b"\xc3", b"\xa9"),
        *small.ids(*(bytes([byte]) for byte in broken)),
        *tail,
        *small.ids(b" hello"),
    ]
    joined = without_run_lengths(told(kind, small.ids(b"hello"), output))
    assert joined == f"é{REPLACEMENT}{after} hello"


@all_kinds
def test_an_output_that_ends_inside_a_character_ends_with_a_replacement_character(kind: str) -> None:
    *pushed, rest = deltas(kind, SMALL[kind].ids(b"hello"), SMALL[kind].ids(b" world", b"\xf0", b"\x9f"))
    assert pushed == [" world", "", ""]
    assert without_run_lengths(rest) == REPLACEMENT


@all_kinds
def test_a_replacement_character_that_is_the_text_itself_is_told_once(kind: str) -> None:
    small = SMALL[kind]
    mark = small.ids(REPLACEMENT.encode())
    assert told(kind, small.ids(b"hello"), [*mark, *small.ids(b" world"), *mark, *mark]) == "� world��"
    assert told(kind, [*small.ids(b"hello"), *mark], small.ids(b" world")) == " world"


# -- the prompt's end --------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("character", "é你😀")
@pytest.mark.parametrize("num_characters", [1, 2, 3, 9])
@pytest.mark.parametrize("first", [b" world", "é".encode()])
def test_a_prompt_that_ends_in_byte_tokens_leaves_the_output_whole(
    kind: str, character: str, num_characters: int, first: bytes
) -> None:
    small = SMALL[kind]
    prompt = small.ids(b"hello", *(bytes([byte]) for byte in (character * num_characters).encode()))
    output = small.ids(first) if first == b" world" else small.ids(*(bytes([byte]) for byte in first))
    assert told(kind, prompt, [*output, *small.ids(b" hello")]) == first.decode() + " hello"


@all_kinds
@pytest.mark.parametrize("num_in_prompt", [1, 2, 3])
def test_a_character_that_begins_in_the_prompt_is_completed_by_the_output(kind: str, num_in_prompt: int) -> None:
    small = SMALL[kind]
    emoji = small.ids(*(bytes([byte]) for byte in "😀".encode()))
    prompt, output = [*small.ids(b"hello"), *emoji[:num_in_prompt]], [*emoji[num_in_prompt:], *small.ids(b" world")]
    *held, last, after, rest = deltas(kind, prompt, output)
    assert [*held, last, after, rest] == [""] * (3 - num_in_prompt) + ["😀", " world", ""]


# -- batches, ids ------------------------------------------------------------------------------------------------------


@all_kinds
@given(data=st.data())
def test_coalesced_pushes_tell_what_single_pushes_tell(kind: str, data: st.DataObject) -> None:
    prompt, output = data.draw(token_ids(kind, 10)), data.draw(token_ids(kind))
    cut = data.draw(st.integers(0, len(output)))
    continuation = TEXT[kind].continuation(prompt)
    parts = [continuation.push(output[:cut]), continuation.push([]), continuation.push(output[cut:])]
    single = deltas(kind, prompt, output)
    assert parts == ["".join(single[:cut]), "", "".join(single[cut:-1])]
    assert continuation.finish() == single[-1]


@all_kinds
def test_a_text_prompt_has_the_bos_token_before_it_only_where_the_model_wants_one(kind: str) -> None:
    small = SMALL[kind]
    ids = small.tokenizer.encode("hello world", add_special_tokens=False).ids
    assert small.text().encode("hello world") == ids
    assert small.text(bos_token_id=5).encode("hello world") == [5, *ids]
    assert small.text(bos_token_id=0).encode("") == [0]


@all_kinds
def test_decode_leaves_special_tokens_out(kind: str) -> None:
    small = SMALL[kind]
    assert TEXT[kind].decode([*small.ids(b"hello"), small.end, *small.ids(b" world")]) == "hello world"
    assert small.tokenizer.token_to_id("<|end|>") == small.end == len(small.bytes_of) - 1


def test_the_small_byte_level_tokenizer_spells_bytes_with_the_library_s_alphabet() -> None:
    vocabulary = SMALL["byte_level"].tokenizer.get_vocab()
    assert {token for token in vocabulary if len(token) == 1} == set(pre_tokenizers.ByteLevel.alphabet())


# -- special tokens ----------------------------------------------------------------------------------------------------


@all_kinds
def test_special_tokens_are_told_by_their_names_where_they_are_not_skipped(kind: str) -> None:
    small = SMALL[kind]
    end, word = small.end, small.ids(b" world")
    continuation = TEXT[kind].continuation(small.ids(b"hello"), skip_special_tokens=False)
    assert [continuation.push([token_id]) for token_id in (end, *word, end, end)] == [END, " world", END, END]
    first_of_all = TEXT[kind].continuation([], skip_special_tokens=False)
    assert [first_of_all.push([token_id]) for token_id in (end, *word)] == [END, " world"]


@pytest.mark.parametrize(("keeps_spaces", "expected"), [(True, "a <s> <s> b <s>"), (False, "a <s><s> b <s>")])
def test_a_space_that_a_tokenizer_puts_between_special_tokens_is_kept_or_left_out(
    keeps_spaces: bool, expected: str
) -> None:
    """A tokenizer without a decoder joins its tokens with spaces."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "\n": 2}, "a"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    text = SmallTokenizer(tokenizer, (b"a", b"b", b"", b"")).text()
    for skips in (False, True):
        continuation = text.continuation([], skip_special_tokens=skips, spaces_between_special_tokens=keeps_spaces)
        told = "".join(continuation.push([token_id]) for token_id in (0, 3, 3, 1, 3))
        assert told == ("a b" if skips else expected)
