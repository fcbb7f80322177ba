"""Tokenizers rebuilt from GGUF metadata: against transformers' conversion on Gemma, and piece by piece on tiny ones."""

import pytest
from tokenizers import Tokenizer

from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.loading.gguf_tokenizer import adds_bos, tokenizer_json
from blockplane.protos.errors import ModelError

LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def metadata(**keys: object) -> dict[str, object]:
    return {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece(tokens: list[str], scores: list[float], **keys: object) -> dict[str, object]:
    tokens = ["<unk>", "<s>", *BYTES, *tokens]
    scores = [0.0] * 258 + scores
    kinds = [2, 3] + [6] * 256 + [1] * (len(tokens) - 258)
    return metadata(model="llama", tokens=tokens, scores=scores, token_type=kinds, unknown_token_id=0, **keys)


def byte_level(pre: str, tokens: list[str], merges: list[str]) -> dict[str, object]:
    tokens = ["<|end|>", *LETTERS, "Ġ", *tokens]
    return metadata(model="gpt2", pre=pre, tokens=tokens, merges=merges, token_type=[3] + [1] * (len(tokens) - 1))


def pieces(keys: dict[str, object], text: str) -> list[str]:
    return Tokenizer.from_str(tokenizer_json(keys).decode()).encode(text).tokens


def round_trip(keys: dict[str, object], text: str) -> str:
    tokenizer = Tokenizer.from_str(tokenizer_json(keys).decode())
    return tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)


def test_the_better_score_merges_first():
    tokens = ["a", "b", "c", "ab", "bc"]
    assert pieces(sentencepiece(tokens, [-9, -9, -9, -1, -2], add_space_prefix=False), "abc") == ["ab", "c"]
    assert pieces(sentencepiece(tokens, [-9, -9, -9, -2, -1], add_space_prefix=False), "abc") == ["a", "bc"]


def test_a_space_is_put_before_the_text_only_where_the_file_says_so():
    tokens, scores = ["▁", "a", "▁a"], [-1.0, -2.0, -3.0]
    assert pieces(sentencepiece(tokens, scores), "a a") == ["▁a", "▁a"]
    assert pieces(sentencepiece(tokens, scores, add_space_prefix=False), "a a") == ["a", "▁a"]
    assert round_trip(sentencepiece(tokens, scores), "a a") == "a a"


def test_what_the_vocabulary_lacks_falls_back_to_bytes():
    keys = sentencepiece(["a"], [-1.0], add_space_prefix=False)
    assert pieces(keys, "a€") == ["a", "<0xE2>", "<0x82>", "<0xAC>"]
    assert round_trip(keys, "a€") == "a€"


def test_control_tokens_are_matched_whole_and_the_document_adds_none():
    keys = sentencepiece(["a"], [-1.0], add_space_prefix=False)
    assert pieces(keys, "a<s>a") == ["a", "<s>", "a"]
    assert pieces(keys, "a") == ["a"]


def test_llama3_groups_three_digits_and_qwen2_none():
    tokens, merges = ["12", "123"], ["1 2", "12 3"]
    assert pieces(byte_level("llama-bpe", tokens, merges), "1234") == ["123", "4"]
    assert pieces(byte_level("qwen2", tokens, merges), "1234") == ["1", "2", "3", "4"]


def test_byte_level_text_round_trips():
    keys = byte_level("qwen2", ["ab", "Ġab"], ["a b", "Ġ ab"])
    assert pieces(keys, "ab ab<|end|>") == ["ab", "Ġab", "<|end|>"]
    assert round_trip(keys, "ab ab<|end|>") == "ab ab<|end|>"


def test_bos_is_added_as_the_file_says_or_its_kind_implies():
    assert adds_bos(metadata(model="llama"))
    assert adds_bos(metadata(model="gpt2", pre="llama-bpe"))
    assert not adds_bos(metadata(model="gpt2", pre="qwen2"))
    assert not adds_bos(metadata(model="llama", add_bos_token=False))
    assert adds_bos(metadata(model="gpt2", pre="qwen2", add_bos_token=True))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (metadata(model="bert"), "bert"),
        (metadata(model="gpt2", pre="tekken", tokens=["a"], merges=[]), "tekken"),
        (metadata(model="llama"), r"tokenizer\.ggml\.tokens"),
    ],
)
def test_an_unknown_tokenizer_is_named(keys, named):
    with pytest.raises(ModelError, match=named):
        tokenizer_json(keys)


TEXTS = [
    "Hello, world!",
    "  two  spaces   three    four and trailing   ",
    "line\nline\n\n\nline\r\n\ttab\t\ttabs",
    "3.14159 and 1,000,000 and 2024-01-02T03:04:05Z",
    "Ünïcödé — naïve café, Straße, ﬁne ligature, e\u0301 combining",
    "人工智能 日本語のテキスト 한국어 العربية עברית ไทย हिन्दी",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 emoji 🫠🧑🏽‍🚀",
    "<bos>special<eos> <start_of_turn>user\nhi<end_of_turn>\n<unused5><pad><mask>[multimodal]",
    "<table><tr><td>html</td></tr></table> <h1>x</h1>",
    "def f(x):\n    if x:\n        return [x ** 2 for _ in range(10)]  # comment\n",
    "\u2581literal \u2581\u2581 meta spaces",
    "\x00\x01\x7f control \ufffd \U0010ffff \u200b\ufeff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa supercalifragilisticexpialidocious",
    "",
    " ",
    "\n",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gemma_tokenizes_as_transformers_converts_it():
    from transformers import AutoTokenizer

    from blockplane.data_plane.loading.checkpoint import _assemble_demo_model

    path = _assemble_demo_model()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    checkpoint = open_checkpoint("gemma3-270m")
    ours = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    assert checkpoint.bos_token_id == theirs.bos_token_id
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
