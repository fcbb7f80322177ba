"""Three small tokenizers of the kinds that models have, and their tokens' bytes; knows nothing of deltas."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from blockplane.control_plane.frontend.text import Text
from blockplane.protos.model import GenerationDefaults, ModelInfo

END = "<|end|>"
_WORDS = ("hello", "world", " hello", " world", "  ", "é", "naïve", "�")
_CUT_ANYWHERE = (
    "你好".encode()[2:4],
    "你好".encode()[1:4],
    "x😀".encode()[:3],
    "😀 y".encode()[2:],
    b"a\xff\xe5",
    b"\xbd\xe5",
)
"""Byte strings that begin or end inside a character; large vocabularies do have such tokens."""


@dataclass(frozen=True)
class SmallTokenizer:
    """A tokenizer whose every id is known in bytes: `bytes_of[id]`, empty for special tokens."""

    tokenizer: Tokenizer
    bytes_of: tuple[bytes, ...]
    strips_first_space: bool = False

    def model(self, bos_token_id: int | None = None) -> ModelInfo:
        json = zlib.compress(self.tokenizer.to_str().encode())
        return ModelInfo("small", len(self.bytes_of), 1024, (), bos_token_id, json, GenerationDefaults())

    def text(self, bos_token_id: int | None = None) -> Text:
        return Text(self.model(bos_token_id))

    def id_of(self, piece: bytes) -> int:
        """The id of the token with these bytes; of a word rather than of a byte that means the same."""
        return len(self.bytes_of) - 1 - self.bytes_of[::-1].index(piece)

    def ids(self, *pieces: bytes) -> list[int]:
        return [self.id_of(piece) for piece in pieces]

    @property
    def end(self) -> int:
        return self.tokenizer.token_to_id(END)


def byte_level() -> SmallTokenizer:
    """GPT-2 style: characters stand for bytes, tokens may begin and end inside a character."""
    character_of = _character_of_byte()
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in _WORDS] + list(_CUT_ANYWHERE)
    tokens = list(dict.fromkeys(tokens))
    vocabulary = {"".join(character_of[byte] for byte in token): index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_end(tokenizer, tokens)


def sentencepiece(*, strips: bool) -> SmallTokenizer:
    """Words with U+2581 for a space, and one token for each byte of what has none. Llama strips, Gemma does not."""
    words = [*_WORDS, " ", *"abcdefghijklmnopqrstuvwxyz!", " a", "<0x41", "ı"]
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    names = [f"<0x{byte:02X}>" for byte in range(256)] + [word.replace(" ", "\u2581") for word in words]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    steps: list[decoders.Decoder] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "\u2581")
    if strips:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return _with_end(tokenizer, tokens, strips_first_space=strips)


def _with_end(tokenizer: Tokenizer, tokens: list[bytes], *, strips_first_space: bool = False) -> SmallTokenizer:
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return SmallTokenizer(tokenizer, (*tokens, b""), strips_first_space)


def _character_of_byte() -> dict[int, str]:
    """GPT-2's spelling of bytes, read off what the library makes of a text that holds every byte that UTF-8 knows."""
    text = "".join(map(chr, [*range(0x100), *range(0x100, 0xD800, 0x40), *range(0xE000, 0x110000, 0x1000)]))
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    spelled = dict(zip(text.encode(), "".join(piece for piece, _ in spell(text)), strict=True))
    # Bytes that no text holds are spelled by the character of their number.
    return {byte: spelled.get(byte, chr(byte)) for byte in range(256)}


KINDS: dict[str, Callable[[], SmallTokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": lambda: sentencepiece(strips=False),
    "sentencepiece_strip": lambda: sentencepiece(strips=True),
}
