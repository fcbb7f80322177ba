"""Texts that end an output, found in it piece by piece; knows neither tokens nor streams."""

from collections.abc import Sequence

from blockplane.protos.errors import invalid_parameter

MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_LENGTH = 256
"""Characters."""


class StopTexts:
    """Cuts a growing text where the first of its stop texts to be complete begins.

    Text is held back while it may be the beginning of a stop text: what follows one is never told, nor is it itself
    unless it is to be. Of two that become complete with the same character the longer counts. Where a text is cut does
    not depend on the pieces in which it comes.
    """

    def __init__(self, stop_texts: Sequence[str], *, is_told: bool = False) -> None:
        """`stop_texts`: as `check_stop_texts` allows them; none = nothing is held back. `is_told`: tell what came."""
        self._stop_texts = tuple(stop_texts)
        self._is_told = is_told
        self._first_characters = frozenset(stop_text[0] for stop_text in self._stop_texts)
        self._held = ""
        self.found: str | None = None
        """The stop text that came; from then on nothing is told."""

    def push(self, delta: str) -> str:
        """The text that can be told now that `delta` came."""
        if not self._stop_texts:
            return delta
        if self.found is not None:
            return ""
        # What was told before is no beginning of a stop text: whatever `delta` completes begins in the held text.
        text, self._held = self._held + delta, ""
        if (cut := self._cut(text)) is not None:
            start, self.found = cut
            return text[: start + len(self.found)] if self._is_told else text[:start]
        start = self._start_of_held(text)
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str) -> tuple[int, str] | None:
        """Where the stop text begins that is complete first, and it, the longest of such; None where there is none."""
        starts = [(text.find(stop_text), stop_text) for stop_text in self._stop_texts]
        found = [(start + len(stop_text), start, stop_text) for start, stop_text in starts if start >= 0]
        return min(found)[1:] if found else None

    def _start_of_held(self, text: str) -> int:
        """Where the longest end of `text` starts with which a stop text may begin; its length where there is none."""
        for start, character in enumerate(text):
            if character in self._first_characters:
                end = text[start:]
                if any(stop_text.startswith(end) for stop_text in self._stop_texts):
                    return start
        return len(text)


def check_stop_texts(stop_texts: Sequence[str]) -> None:
    """Raise InvalidRequestError if these are too many, or one is empty or too long."""
    if len(stop_texts) > MAX_STOP_TEXTS:
        raise invalid_parameter("stop", f"stop holds {len(stop_texts)} texts; send {MAX_STOP_TEXTS} at most.")
    for stop_text in stop_texts:
        if not stop_text:
            raise invalid_parameter("stop", "stop holds an empty text; leave it out, or send one that can be found.")
        if len(stop_text) > MAX_STOP_TEXT_LENGTH:
            raise invalid_parameter(
                "stop", f"stop holds a text of {len(stop_text)} characters; send {MAX_STOP_TEXT_LENGTH} at most."
            )
