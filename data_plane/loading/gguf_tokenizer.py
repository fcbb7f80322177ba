"""GGUF metadata -> a `tokenizers` JSON document; knows two kinds of tokenizer: SentencePiece BPE and byte-level BPE.

The document adds no special tokens by itself. What GGUF leaves out, the merges of a SentencePiece vocabulary, is
derived from the order of its tokens.
"""

import json
from collections.abc import Mapping
from typing import Any

from blockplane.protos.errors import ModelError

_SPACE = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4

# How each vocabulary's training split text into words: https://huggingface.co/Qwen and /meta-llama, tokenizer.json.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

Metadata = Mapping[str, Any]


def tokenizer_json(metadata: Metadata) -> bytes:
    """Build the document.

    Raises:
        ModelError: the tokenizer's kind, or the way it splits words, is unknown; the message names it.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        document = _sentencepiece(metadata)
    elif kind == "gpt2":
        document = _byte_level(metadata)
    else:
        raise ModelError(f"The GGUF file's tokenizer is {kind}, which is unknown; Blockplane reads llama and gpt2.")
    document |= {"version": "1.0", "truncation": None, "padding": None, "post_processor": None}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def adds_bos(metadata: Metadata) -> bool:
    """Whether a text begins with the BOS token; where the file does not say, SentencePiece and Llama 3 add it."""
    implied = metadata.get("tokenizer.ggml.model") == "llama" or _split_name(metadata) in _LLAMA3_NAMES
    return bool(metadata.get("tokenizer.ggml.add_bos_token", implied))


def _sentencepiece(metadata: Metadata) -> dict[str, Any]:
    tokens = [_SPACE * len(token) if _is_blank(token) else token for token in _tokens(metadata)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    is_gemma = metadata.get("general.architecture") == "gemma3"
    # Gemma's scores do not follow the order of its merges, the order of its tokens does.
    scores = None if is_gemma else metadata["tokenizer.ggml.scores"]
    prepends = metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
    normalizers = [{"type": "Prepend", "prepend": _SPACE}] if prepends else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepends else []
    return {
        "added_tokens": _added_tokens(metadata),
        "normalizer": _sequence("normalizers", [*normalizers, _replace(" ", _SPACE)]),
        "pre_tokenizer": None,
        "decoder": _sequence("decoders", [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]),
        "model": _bpe(
            tokens,
            _derived_merges(tokens, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _byte_level(metadata: Metadata) -> dict[str, Any]:
    tokens, name = _tokens(metadata), _split_name(metadata)
    if name not in (*_LLAMA3_NAMES, "qwen2"):
        raise ModelError(f"The GGUF file splits words by {name}, which is unknown; Blockplane has llama-bpe and qwen2.")
    is_llama3 = name in _LLAMA3_NAMES
    pattern = {"Regex": _LLAMA3_SPLIT if is_llama3 else _QWEN2_SPLIT}
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "added_tokens": _added_tokens(metadata),
        "normalizer": None if is_llama3 else {"type": "NFC"},
        "pre_tokenizer": _sequence("pretokenizers", [split, bytes_of_text]),
        "decoder": bytes_of_text,
        "model": _bpe(tokens, merges, ignore_merges=is_llama3),
    }


def _derived_merges(tokens: list[str], scores: list[float] | None) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best first: by score, None = by id, then by the longer left part."""
    vocabulary = set(tokens)
    order = range(len(tokens)) if scores is None else sorted(range(len(tokens)), key=lambda index: -scores[index])
    return [
        (left, right)
        for token in map(tokens.__getitem__, order)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in vocabulary and (right := token[cut:]) in vocabulary
    ]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    defaults = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    affixes = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return {"type": "BPE", **defaults, **affixes, **settings, "vocab": vocabulary, "merges": merges}


def _added_tokens(metadata: Metadata) -> list[dict[str, Any]]:
    """Control tokens, which decoding may skip, and tokens that are matched whole before the text is split.

    Runs of spaces are not among them: the normalizer respells spaces, and merging then finds the run.
    """
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(_tokens(metadata), kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and not _is_blank(token)
    ]


def _tokens(metadata: Metadata) -> list[str]:
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError("The GGUF file lacks tokenizer.ggml.tokens; choose a file that holds its tokenizer.")
    return tokens


def _is_blank(token: str) -> bool:
    return not token.strip(" ")


def _split_name(metadata: Metadata) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _sequence(field: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", field: parts}
