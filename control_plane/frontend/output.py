"""What of one request's output its client gets: token ids and their text, up to a stop text; knows no stream."""

from collections.abc import Sequence

from blockplane.control_plane.frontend.stop_texts import StopTexts
from blockplane.control_plane.frontend.text import Continuation


class Output:
    """Grows by tokens; ends with the token that completes a stop text, if one does."""

    def __init__(self, continuation: Continuation, stop_texts: Sequence[str]) -> None:
        self._continuation = continuation
        self._stop_texts = StopTexts(stop_texts)
        self.num_tokens = 0

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text came."""
        return self._stop_texts.found

    def push(self, token_ids: list[int]) -> tuple[list[int], str]:
        """The ids and the text that can be sent now that these tokens came; tokens behind a stop text do not count."""
        if self.has_stopped:
            return [], ""
        text = ""
        for num_tokens, token_id in enumerate(token_ids, 1):
            text += self._stop_texts.push(self._continuation.push([token_id]))
            if self.has_stopped:
                token_ids = token_ids[:num_tokens]
                break
        self.num_tokens += len(token_ids)
        return token_ids, text

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        return self._stop_texts.push(self._continuation.finish()) + self._stop_texts.finish()
