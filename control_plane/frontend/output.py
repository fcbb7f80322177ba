"""What of one request's output its client gets: token ids and their text, up to a stop text; knows no stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockplane.control_plane.frontend.stop_texts import StopTexts
from blockplane.control_plane.frontend.text import Text


@dataclass(frozen=True, slots=True)
class TextParams:
    """How a request wants its output told.

    Attributes:
        stop: texts that end it.
        include_stop_str_in_output: tell the one that did, too.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: where they are told, keep the space that the tokenizer may put between two.
        is_told: tell the text; if not, the ids alone, and text is made only to look for `stop` in it.
        is_whole: tell a sample at its end, all at once.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    is_told: bool = True
    is_whole: bool = False


class Output:
    """Grows by tokens; ends with the token that completes a stop text, if one does."""

    def __init__(self, text: Text, prompt_token_ids: Sequence[int], params: TextParams) -> None:
        self._continuation = None
        if params.is_told or params.stop:
            self._continuation = text.continuation(
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._stop_texts = StopTexts(params.stop, is_told=params.include_stop_str_in_output)
        self.num_tokens = 0

    @property
    def stop_text(self) -> str | None:
        """The stop text that came, if one did."""
        return self._stop_texts.found

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text came."""
        return self._stop_texts.found is not None

    def push(self, token_ids: list[int]) -> tuple[list[int], str]:
        """The ids and the text that can be sent now that these tokens came; tokens behind a stop text do not count."""
        if self.has_stopped:
            return [], ""
        text = ""
        if self._continuation is not None:
            for num_tokens, token_id in enumerate(token_ids, 1):
                text += self._stop_texts.push(self._continuation.push([token_id]))
                if self.has_stopped:
                    token_ids = token_ids[:num_tokens]
                    break
        self.num_tokens += len(token_ids)
        return token_ids, text

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self._continuation is None:
            return ""
        return self._stop_texts.push(self._continuation.finish()) + self._stop_texts.finish()
