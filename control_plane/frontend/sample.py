"""One sample's way from the engine's tokens to what its client is told: texts, stops, its end. Knows no messages."""

from collections.abc import Callable

import numpy as np

from blockplane.control_plane.frontend.delta import Delta, Usage, join
from blockplane.control_plane.frontend.output import Output
from blockplane.control_plane.frontend.token_stream import TokenStream
from blockplane.protos.errors import BlockplaneError


class Sample:
    """Says what its client can be told, whenever it is asked, until it has ended."""

    def __init__(
        self,
        index: int,
        num_prompt_tokens: int,
        stream: TokenStream,
        output: Output,
        stop: Callable[[TokenStream], None],
        is_whole: bool = False,
    ) -> None:
        """`stop` asks for a stream's end, which is still to be told on it. `is_whole`: tell all at the end, at once."""
        self.index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._stream, self._output, self._stop = stream, output, stop
        self._held: list[Delta] | None = [] if is_whole else None
        """What is told at the end."""
        self.has_ended = False
        self.failure: BlockplaneError | None = None
        """What ended it early, once all that came before is told."""

    def advance(self) -> Delta | None:
        """What has come; None where there is nothing to tell."""
        token_ids, outcome, logprobs, prompt_logprobs = self._stream.take()
        output = self._output
        had_stopped, num_new = output.has_stopped, len(token_ids)
        token_ids, text = output.push(token_ids)
        if logprobs is not None and len(token_ids) < num_new:
            # Nothing is told of what stands behind a stop text.
            logprobs = logprobs.take(np.arange(len(token_ids)))
        if outcome is not None:
            return self._tell(self._last(Delta(token_ids, text, logprobs, prompt_logprobs, outcome)))
        if output.has_stopped and not had_stopped:
            self._stop(self._stream)
        if not token_ids and prompt_logprobs is None:
            return None
        return self._tell(Delta(token_ids, text, logprobs, prompt_logprobs))

    def tell(self, token_ids: list[int]) -> Delta | None:
        """What tokens say that did not come on the stream but before all that does; None where there are none."""
        token_ids, text = self._output.push(token_ids)
        if self._output.has_stopped:
            self._stop(self._stream)
        return self._tell(Delta(token_ids, text)) if token_ids else None

    def _tell(self, delta: Delta) -> Delta | None:
        if self._held is None:
            return delta
        self._held.append(delta)
        return join(self._held) if self.has_ended else None

    def _last(self, delta: Delta) -> Delta:
        """A sample's end as its client is told: with the text that was held back, and with the reason that counts."""
        self.has_ended, output, outcome = True, self._output, delta.outcome
        if not isinstance(outcome, BlockplaneError):
            delta = delta._replace(text=delta.text + output.finish())
        if output.has_stopped:
            # Whatever the engine says of it: it was over before.
            outcome = "stop"
        elif isinstance(outcome, BlockplaneError):
            self.failure = outcome
        usage = Usage(self._num_prompt_tokens, output.num_tokens, self._stream.num_cached_tokens)
        if self._stream.stopwatch is not None and outcome is not None:
            self._stream.stopwatch.ended(outcome, usage)
        return delta._replace(outcome=outcome, usage=usage, stop_text=output.stop_text)
