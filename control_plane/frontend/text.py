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
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token_id: token.content for token_id, token in added.items() if token.special}
        """What each of them is called, by id."""

    def encode(self, text: str, max_tokens: int | None = None, *, add_bos_token: bool = True) -> list[int]:
        """Token ids of a prompt, behind the model's BOS token where it wants one; of the prompt its last so that all
        are at most `max_tokens`, 1 or more; None = all of it. What spells the BOS token is sent without another.
        """
        prefix = self._prefix if add_bos_token else []
        # Of its ways the only one that lets other threads run, and the fastest: it does not say where tokens lie.
        token_ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if max_tokens is not None:
            token_ids = token_ids[max(0, len(token_ids) + len(prefix) - max_tokens) :]
        return prefix + token_ids

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

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def name_of(self, token_id: int) -> str | None:
        """What the vocabulary calls a token; None = it has none of that id."""
        return self._tokenizer.id_to_token(token_id)

    def continuation(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> "Continuation":
        return Continuation(self, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)

    def piece(self, token_id: int, *, is_first: bool = False, skip_special_tokens: bool = True) -> bytes:
        """What one token adds to a text, as UTF-8, which may begin or end inside a character; nothing if it is skipped.

        A decoder may strip the space before the first token of all, so that any other is decoded behind some text.
        """
        if is_first:
            text = self.decode([token_id], skip_special_tokens=skip_special_tokens)
        else:
            text = self.decode([*self._lead, token_id], skip_special_tokens=skip_special_tokens)[self._lead_len :]
        if _REPLACEMENT not in text:
            return text.encode()
        # No whole character by itself: only the token's name tells its bytes.
        return _spelled_bytes(self.name_of(token_id) or "")


class Continuation:
    """Turns a growing output into text deltas that never end inside a character.

    The tokens' bytes go through one incremental UTF-8 decoder: it holds back a character that is not finished, and
    tells bytes that are no character as replacement characters as soon as they cannot become one.
    """

    def __init__(
        self,
        text: Text,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._text, self._skips = text, skip_special_tokens
        self._closed_up = {} if skip_special_tokens or spaces_between_special_tokens else text.special_tokens
        """Tokens that stand close to one of their like, by id."""
        self._was_closed_up = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = (text.piece(token_id, skip_special_tokens=skip_special_tokens) for token_id in prompt_token_ids)
        self._has_begun = any(pieces)
        # What the prompt says is told already, but for a character that it leaves open.
        for token_id in prompt_token_ids[-_MAX_OPEN_TOKENS:]:
            self._decoder.decode(text.piece(token_id, skip_special_tokens=skip_special_tokens))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be told now that these tokens came."""
        return "".join([self._decoder.decode(self._piece(token_id)) for token_id in token_ids])

    def finish(self) -> str:
        """What was held back: a replacement character if the output ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _piece(self, token_id: int) -> bytes:
        if self._closed_up:
            was_closed_up, self._was_closed_up = self._was_closed_up, token_id in self._closed_up
            if was_closed_up and self._was_closed_up:
                return self._closed_up[token_id].encode()
        piece = self._text.piece(token_id, skip_special_tokens=self._skips)
        if piece and not self._has_begun:
            self._has_begun = True
            return self._text.piece(token_id, is_first=True, skip_special_tokens=self._skips)
        return piece


def _spelled_bytes(token: str) -> bytes:
    """The bytes that a vocabulary names: one as `<0xE4>`, several by a character each, or the text itself."""
    if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    if all(character in _BYTE_OF_CHARACTER for character in token):
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    return token.encode()
