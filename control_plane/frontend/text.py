"""Text to token ids and back, piece by piece; knows neither requests nor streams."""

import codecs
import re
import zlib
from collections.abc import Sequence

from tokenizers import Tokenizer

from blockplane.protos.model import ModelInfo

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BREAK = "\n"
"""Behind it a word is spelled as anywhere inside a text."""
_MAX_OPEN_TOKENS = 3
"""A character is at most four bytes of UTF-8, so one that is not finished is at most three tokens."""

# Byte-level vocabularies spell a byte by the character of its number where that shows, and else by the next one from
# U+0100 on (https://github.com/openai/gpt-2, encoder.py).
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(0x100) if byte not in _SHOWN]
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _SHOWN} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}


class Text:
    """A model's tokenizer, as its worker sent it."""

    def __init__(self, model: ModelInfo) -> None:
        self._tokenizer = Tokenizer.from_buffer(zlib.decompress(model.tokenizer_json_zlib))
        self._prefix = [] if model.bos_token_id is None else [model.bos_token_id]
        self._break = self._tokenizer.encode(_BREAK, add_special_tokens=False).ids
        self._lead = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._lead_len = len(self.decode(self._lead))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, behind the model's BOS token where it wants one."""
        return self._prefix + self._tokenizer.encode(text, add_special_tokens=False).ids

    def spellings(self, word: str) -> list[list[int]]:
        """The token sequences with which a word may come inside a text: behind no space and behind one.

        One that ends with the other is left out, since it cannot come where that does not.
        """
        bare = word.lstrip(" ") or word
        apart, spaced = self._encode_on(bare), self._encode_on(" " + bare)
        return [apart] if spaced[-len(apart) :] == apart else [apart, spaced]

    def _encode_on(self, text: str) -> list[int]:
        """Token ids of text that goes on; some tokenizers put a space before text that begins."""
        token_ids = self._tokenizer.encode(_BREAK + text, add_special_tokens=False).ids
        if token_ids[: len(self._break)] == self._break:
            return token_ids[len(self._break) :]
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole sequence, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def continuation(self, prompt_token_ids: Sequence[int]) -> "Continuation":
        return Continuation(self, prompt_token_ids)

    def piece(self, token_id: int, *, is_first: bool = False) -> bytes:
        """What one token adds to a text, as UTF-8, which may begin or end inside a character; nothing if it is special.

        A decoder may strip the space before the first token of all, so that any other is decoded behind some text.
        """
        text = self.decode([token_id]) if is_first else self.decode([*self._lead, token_id])[self._lead_len :]
        if _REPLACEMENT not in text:
            return text.encode()
        # No whole character by itself: only the token's name tells its bytes.
        return _spelled_bytes(self._tokenizer.id_to_token(token_id) or "")


class Continuation:
    """Turns a growing output into text deltas that never end inside a character.

    The tokens' bytes go through one incremental UTF-8 decoder: it holds back a character that is not finished, and
    tells bytes that are no character as replacement characters as soon as they cannot become one.
    """

    def __init__(self, text: Text, prompt_token_ids: Sequence[int]) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_begun = any(text.piece(token_id) for token_id in prompt_token_ids)
        # What the prompt says is told already, but for a character that it leaves open.
        for token_id in prompt_token_ids[-_MAX_OPEN_TOKENS:]:
            self._decoder.decode(text.piece(token_id))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be told now that these tokens came."""
        return "".join([self._decoder.decode(self._piece(token_id)) for token_id in token_ids])

    def finish(self) -> str:
        """What was held back: a replacement character if the output ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _piece(self, token_id: int) -> bytes:
        piece = self._text.piece(token_id)
        if piece and not self._has_begun:
            self._has_begun = True
            return self._text.piece(token_id, is_first=True)
        return piece


def _spelled_bytes(token: str) -> bytes:
    """The bytes that a vocabulary names: one as `<0xE4>`, several by a character each, or the text itself."""
    if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    if all(character in _BYTE_OF_CHARACTER for character in token):
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    return token.encode()
