"""What samples gain as messages of the public vLLM engine protocol: chunks, and one end each. Knows no streams."""

from collections.abc import Iterator, Sequence
from itertools import chain

from smg_grpc_proto import vllm_engine_pb2 as vllm

from blockplane.control_plane.frontend.delta import Delta
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import AbortedError, InvalidRequestError
from blockplane.protos.logprobs import Logprobs

MAX_MESSAGE_BYTES = (4 << 20) - 1024
"""Clients that leave gRPC's limit as it is take no more; the rest is for what frames a message."""


class Responses:
    """Makes the messages of one call.

    A stream has the tokens in chunks, and each sample's end without any; a call that does not stream has only the ends,
    with all the tokens. What is told of the prompt comes with the first tokens of the first sample.
    """

    def __init__(self, submission: Submission, *, is_stream: bool) -> None:
        self._prompt = submission.prompt_token_ids.tolist()
        self._stop_token_ids = submission.params.stop_token_ids
        self._is_stream = is_stream
        self._prompt_logprobs: list[Logprobs] = []
        """What is told of the prompt, as long as there is no chunk for it."""
        self._last_token_ids: dict[int, int] = {}
        """By sample."""

    def of(self, index: int, delta: Delta) -> Iterator[vllm.GenerateResponse]:
        """Messages of what sample `index` gained. Raises InvalidRequestError if one is too large for the protocol."""
        if delta.token_ids:
            self._last_token_ids[index] = delta.token_ids[-1]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.append(delta.prompt_logprobs)
        if self._is_stream and delta.token_ids:
            yield vllm.GenerateResponse(chunk=self._chunk(index, delta))
        # An abort is an end, here; any other failure is the call's.
        if isinstance(delta.outcome, str | AbortedError):
            yield vllm.GenerateResponse(complete=self._complete(index, delta))

    def _chunk(self, index: int, delta: Delta) -> vllm.GenerateStreamChunk:
        chunk = vllm.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(delta.token_ids),
            output_logprobs=_output_logprobs(delta.logprobs),
            index=index,
        )
        if self._prompt_logprobs:
            chunk.input_logprobs.CopyFrom(self._input_logprobs())
            _check_size(chunk)
        return chunk

    def _complete(self, index: int, delta: Delta) -> vllm.GenerateComplete:
        assert delta.usage is not None
        complete = vllm.GenerateComplete(
            finish_reason=_finish_reason(delta),
            prompt_tokens=delta.usage.num_prompt_tokens,
            completion_tokens=delta.usage.num_output_tokens,
            cached_tokens=delta.usage.num_cached_tokens,
            index=index,
        )
        if delta.stop_text is not None:
            complete.matched_stop_str = delta.stop_text
        elif delta.outcome == "stop" and (last := self._last_token_ids.get(index)) in self._stop_token_ids:
            complete.matched_token_id = last
        if not self._is_stream:
            complete.output_ids.extend(delta.token_ids)
            if delta.logprobs is not None:
                complete.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs))
            if self._prompt_logprobs:
                complete.input_logprobs.CopyFrom(self._input_logprobs())
            _check_size(complete)
        return complete

    def _input_logprobs(self) -> vllm.InputLogProbs:
        """Of the whole prompt, of whose first token nothing is known."""
        told, self._prompt_logprobs = list(chain.from_iterable(part.by_token() for part in self._prompt_logprobs)), []
        values = [vllm.InputTokenLogProb(), *(vllm.InputTokenLogProb(value=values[0]) for _, values in told)]
        top = [vllm.TopLogProbs(), *(_top(token_ids, values) for token_ids, values in told)]
        return vllm.InputLogProbs(token_logprobs=values, token_ids=self._prompt, top_logprobs=top)


def _finish_reason(delta: Delta) -> str:
    if isinstance(delta.outcome, AbortedError):
        return "abort"
    # The protocol has no word for a cache that is full; its clients know that a limit was met.
    return "stop" if delta.outcome == "stop" else "length"


def _output_logprobs(logprobs: Logprobs | None) -> vllm.OutputLogProbs | None:
    if logprobs is None:
        return None
    told = list(logprobs.by_token())
    return vllm.OutputLogProbs(
        token_logprobs=[values[0] for _, values in told],
        token_ids=[token_ids[0] for token_ids, _ in told],
        top_logprobs=[_top(token_ids, values) for token_ids, values in told],
    )


def _top(token_ids: Sequence[int], values: Sequence[float]) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(values=values[1:], token_ids=token_ids[1:])


def _check_size(message: vllm.GenerateStreamChunk | vllm.GenerateComplete) -> None:
    if (num_bytes := message.ByteSize()) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the answer takes {num_bytes} bytes at once, and clients of this protocol take {MAX_MESSAGE_BYTES}; ask"
            " for fewer log-probabilities or tokens, or stream the output."
        )
