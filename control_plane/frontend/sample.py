"""One sample's way from the engine's tokens to messages for its client: texts, stops, its end. Knows no gRPC."""

from collections.abc import Callable, Iterator
from itertools import islice

from blockplane.control_plane.frontend.engine_link import TokenStream
from blockplane.control_plane.frontend.output import Output
from blockplane.protos.delivery import Submission
from blockplane.protos.delivery_wire import FINISH_REASON_TO_PROTO
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs import Logprobs
from blockplane.v1 import inference_pb2 as pb


class Sample:
    """Says what its client can be told, whenever it is asked, until it has ended."""

    def __init__(
        self,
        index: int,
        submission: Submission,
        stream: TokenStream,
        output: Output,
        stop: Callable[[TokenStream], None],
    ) -> None:
        """`stop` asks for a stream's end, which is still to be told on it."""
        self._index, self._submission = index, submission
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
        response = pb.GenerateResponse(
            request_id=self._submission.request_id, token_ids=token_ids, text=text, sample_index=self._index
        )
        if news.logprobs is not None:
            response.logprobs.extend(islice(_told(news.logprobs), len(token_ids)))
        if news.prompt_logprobs is not None:
            response.prompt_logprobs.extend(_told(news.prompt_logprobs))
        if reason is not None:
            response.finish_reason = FINISH_REASON_TO_PROTO[reason]
            response.usage.num_prompt_tokens = len(self._submission.prompt_token_ids)
            response.usage.num_output_tokens = output.num_tokens
            response.usage.num_cached_tokens = self._stream.num_cached_tokens
        return response

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
