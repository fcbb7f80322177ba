"""The token sequences that keep a bad word out: those of the word in a text, whatever the tokenizer does to spaces."""

import json

import pytest
from small_tokenizers import KINDS, SmallTokenizer
from tokenizers import Tokenizer

from blockplane.control_plane.frontend.text import Text

all_kinds = pytest.mark.parametrize("kind", KINDS)


def merging(kind: str) -> tuple[Tokenizer, Text]:
    """A tokenizer that makes one token of `hello`, and another of it with the space before."""
    document = json.loads(KINDS[kind]().tokenizer.to_str())
    space = "\u0120" if kind == "byte_level" else "\u2581"
    vocabulary = document["model"]["vocab"]
    document["model"]["merges"] = [["h", "e"], ["he", "l"], ["hel", "l"], ["hell", "o"], [space, "hello"]]
    # Where bytes have names of their own, letters have ids besides.
    for token in ("h", "e", "l", "o", "he", "hel", "hell", "hello", f"{space}hello"):
        vocabulary.setdefault(token, len(vocabulary) + 1)
    tokenizer = Tokenizer.from_str(json.dumps(document))
    return tokenizer, Text(SmallTokenizer(tokenizer, (b"",) * (len(vocabulary) + 2)).model())


@all_kinds
@pytest.mark.parametrize("word", ["hello", " hello", "  hello"])
def test_a_word_is_spelled_behind_a_space_and_behind_none(kind: str, word: str) -> None:
    tokenizer, text = merging(kind)
    space = "\u0120" if kind == "byte_level" else "\u2581"
    assert text.spellings(word) == [[tokenizer.token_to_id("hello")], [tokenizer.token_to_id(f"{space}hello")]]


@all_kinds
@pytest.mark.parametrize("context", ["a{}", "(a {})", "a\n{} a", "({})"])
@pytest.mark.parametrize("word", ["hello", "helloes", "no hello", "é", "!", "\n"])
def test_a_text_that_holds_the_word_completes_one_of_its_spellings(kind: str, context: str, word: str) -> None:
    tokenizer, text = merging(kind)
    ids = tokenizer.encode(context.format(word), add_special_tokens=False).ids
    assert any(
        ids[start : start + len(spelling)] == spelling for spelling in text.spellings(word) for start in range(len(ids))
    )


@all_kinds
def test_a_spelling_that_ends_with_another_is_left_out(kind: str) -> None:
    tokenizer, text = merging(kind)
    (spelling,) = text.spellings("!hello")
    assert spelling[-1] == tokenizer.token_to_id("hello")
    assert tokenizer.decode(spelling) == "!hello"


def test_a_word_of_spaces_stays_one() -> None:
    tokenizer, text = merging("byte_level")
    (spelling,) = text.spellings("  ")
    assert spelling == [tokenizer.token_to_id("\u0120")] * 2
