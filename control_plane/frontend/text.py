"""Text to token ids and back, piece by piece; knows neither requests nor streams."""

import zlib
from collections.abc import Sequence

from tokenizers import Tokenizer

from blockplane.protos.model import ModelInfo

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4
"""A character is at most four bytes of UTF-8, so at most four byte tokens."""
_NUM_CONTEXT_TOKENS = 8
"""Prompt tokens that the first output token is decoded behind, so that its leading space is kept."""
_MAX_WINDOW = 16
"""Tokens; bounds the window where a model emits special tokens without end."""


class Text:
    """A model's tokenizer, as its worker sent it."""

    def __init__(self, model: ModelInfo) -> None:
        self._tokenizer = Tokenizer.from_buffer(zlib.decompress(model.tokenizer_json_zlib))
        self._prefix = [] if model.bos_token_id is None else [model.bos_token_id]

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, behind the model's BOS token where it wants one."""
        return self._prefix + self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole sequence, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def continuation(self, prompt_token_ids: Sequence[int]) -> "Continuation":
        return Continuation(self, prompt_token_ids)


class Continuation:
    """Turns a growing output into text deltas that never end inside a character.

    Deltas are found by decoding a short window twice, with and without the new token: what a token adds depends on the
    ones before it (leading spaces, bytes of one character). The window starts where an earlier delta ended, since a
    decoder may spoil a whole run of byte tokens of which it sees only the tail.
    """

    def __init__(self, text: Text, prompt_token_ids: Sequence[int]) -> None:
        self._text = text
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_told = len(self._window)
        self._told = text.decode(self._window).rstrip(_REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be told now that these tokens came."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The text that was held back; it ends with replacement characters if the output ends inside a character."""
        return self._tell(self._text.decode(self._window))

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text.decode(self._window)
        is_open = text.endswith(_REPLACEMENT) and len(self._window) - self._num_told < _MAX_CHARACTER_TOKENS
        return "" if is_open else self._tell(text)

    def _tell(self, text: str) -> str:
        delta = text[len(self._told) :]
        if text.endswith(_REPLACEMENT):
            # Bytes that are no character: with them before it, a decoder would spoil the next one too.
            self._window = []
        elif delta or len(self._window) > _MAX_WINDOW:
            # What was told last is the context of what comes; a token without text, such as a special one, is none.
            self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._text.decode(self._window)
        return delta
