"""One sample's way from the engine's tokens to messages for its client: texts, stops, its end. Knows no gRPC."""

from collections.abc import Callable, Iterator
from itertools import islice

from blockplane.control_plane.frontend.output import Output
from blockplane.control_plane.frontend.token_stream import TokenStream
from blockplane.protos.delivery_wire import FINISH_REASON_TO_PROTO
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs import Logprobs
from blockplane.v1 import inference_pb2 as pb


class Sample:
    """Says what its client can be told, whenever it is asked, until it has ended."""

    def __init__(
        self,
        request_id: str,
        index: int,
        num_prompt_tokens: int,
        stream: TokenStream,
        output: Output,
        stop: Callable[[TokenStream], None],
    ) -> None:
        """`stop` asks for a stream's end, which is still to be told on it."""
        self._request_id, self._index, self._num_prompt_tokens = request_id, index, num_prompt_tokens
        self._stream, self._output, self._stop = stream, output, stop
        self.has_ended = False
        self.failure: BlockplaneError | None = None
        """What ended it early, once all that came before is told."""

    def advance(self) -> pb.GenerateResponse | None:
        """A message of what has come; None where there is nothing to tell."""
        news, output = self._stream.take(), self._output
        had_stopped = output.has_stopped
        token_ids, text = output.push(news.token_ids)
        reason = None
        if news.outcome is not None:
            self.has_ended = True
            held, reason = self._end(news.outcome)
            text += held
        elif output.has_stopped and not had_stopped:
            self._stop(self._stream)
        if not token_ids and reason is None and news.prompt_logprobs is None:
            return None
        response = self._response(token_ids, text)
        if news.logprobs is not None:
            response.logprobs.extend(islice(_told(news.logprobs), len(token_ids)))
        if news.prompt_logprobs is not None:
            response.prompt_logprobs.extend(_told(news.prompt_logprobs))
        if reason is not None:
            response.finish_reason = FINISH_REASON_TO_PROTO[reason]
            response.usage.num_prompt_tokens = self._num_prompt_tokens
            response.usage.num_output_tokens = output.num_tokens
            response.usage.num_cached_tokens = self._stream.num_cached_tokens
        return response

    def tell(self, token_ids: list[int]) -> pb.GenerateResponse | None:
        """A message of tokens that did not come on the stream but before all that does; None where there are none."""
        token_ids, text = self._output.push(token_ids)
        if self._output.has_stopped:
            self._stop(self._stream)
        return self._response(token_ids, text) if token_ids else None

    def _response(self, token_ids: list[int], text: str) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            request_id=self._request_id, token_ids=token_ids, text=text, sample_index=self._index
        )

    def _end(self, outcome: FinishReason | BlockplaneError) -> tuple[str, FinishReason | None]:
        """The text that was held back, and why the sample ended; None = it failed."""
        held = "" if isinstance(outcome, BlockplaneError) else self._output.finish()
        if self._output.has_stopped:
            # Whatever the engine says of it: it was over before.
            return held, "stop"
        if isinstance(outcome, BlockplaneError):
            self.failure = outcome
            return "", None
        return held, outcome


def _told(logprobs: Logprobs) -> Iterator[pb.TokenLogprobs]:
    """Token after token; the first of its entries is its own."""
    token_ids, values, start = logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), 0
    for num_entries in logprobs.num_entries.tolist():
        stop = start + num_entries
        yield pb.TokenLogprobs(
            token_id=token_ids[start],
            logprob=values[start],
            top_token_ids=token_ids[start + 1 : stop],
            top_logprobs=values[start + 1 : stop],
        )
        start = stop
