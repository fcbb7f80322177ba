"""What one frontend is to be told, gathered until its stream takes it; knows neither requests nor gRPC."""

import asyncio
from typing import TypeAlias

import numpy as np

from blockplane.protos.delivery import Delivery, Ending, PromptLogprobs, Resumed, ServingState
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.logprobs import Logprobs, join_told
from blockplane.protos.plan import NO_ROWS, Int32Array

_Tokens: TypeAlias = tuple[Int32Array, Int32Array, Logprobs | None]
"""A step's: per new token its stream, the token, and what is told of all of them."""


class Outbox:
    """Gathers tokens and endings per stream: a slow frontend gets fewer, larger deliveries, not a longer queue.

    Written by the engine, emptied by the frontend's writer, both in one event loop.
    """

    def __init__(self) -> None:
        self._steps: list[_Tokens] = []
        self._one_each = False
        """Whether no stream is gathered twice."""
        self._resumed: list[Resumed] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._endings: list[Ending] = []
        self._serving: ServingState | None = None
        self._error: BlockplaneError | None = None
        self._filled = asyncio.Event()

    def put_tokens(
        self,
        stream_ids: Int32Array,
        token_ids: Int32Array,
        logprobs: Logprobs | None = None,
        *,
        one_each: bool = False,
    ) -> None:
        """Per new token its stream; a stream's tokens stand together, in order. `one_each`: every stream got one."""
        if stream_ids.size:
            self._one_each = one_each and not self._steps
            self._steps.append((stream_ids, token_ids, logprobs))

    def put_resumed(self, resumed: Resumed) -> None:
        """Of a stream that nothing was put of before."""
        self._resumed.append(resumed)

    def put_prompt_logprobs(self, told: PromptLogprobs) -> None:
        self._prompt_logprobs.append(told)

    def put_ending(self, ending: Ending) -> None:
        self._endings.append(ending)

    def put_serving(self, serving: ServingState) -> None:
        self._serving = serving

    def flush(self) -> None:
        """Let the writer see what was put; called once the next plan is sent, so that delivery never delays it."""
        if self._steps or self._endings or self._resumed or self._prompt_logprobs or self._serving is not None:
            self._filled.set()

    def close(self, error: BlockplaneError) -> None:
        """Let the writer end with `error`, in place of what is left."""
        self._error = error
        self._filled.set()

    async def take(self) -> Delivery:
        """Wait for something flushed and take all there is; raises the error that the outbox was closed with."""
        await self._filled.wait()
        if self._error is not None:
            raise self._error
        self._filled.clear()
        return self.empty()

    def empty(self) -> Delivery:
        """Take all there is."""
        steps, self._steps = self._steps, []
        if self._one_each:
            ((stream_ids, token_ids, logprobs),), num_tokens = steps, None
        else:
            stream_ids, num_tokens, token_ids, logprobs = _by_stream(steps)
        self._one_each = False
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        endings, self._endings = tuple(self._endings), []
        serving, self._serving = self._serving, None
        resumed, self._resumed = tuple(self._resumed), []
        return Delivery(stream_ids, num_tokens, token_ids, endings, serving, logprobs, prompt_logprobs, resumed)


def _by_stream(steps: list[_Tokens]) -> tuple[Int32Array, Int32Array, Int32Array, Logprobs | None]:
    """Gather steps' tokens by stream: the streams, how many tokens each got, all the tokens end to end, int32, and what
    is told of those.
    """
    if not steps:
        return NO_ROWS, NO_ROWS, NO_ROWS, None
    streams = np.concatenate([stream_ids for stream_ids, _, _ in steps])
    tokens = np.concatenate([token_ids for _, token_ids, _ in steps])
    logprobs = join_told([(len(token_ids), logprobs) for _, token_ids, logprobs in steps])
    order = np.argsort(streams, kind="stable")
    streams, tokens = streams[order], tokens[order]
    starts = np.flatnonzero(np.concatenate(([True], streams[1:] != streams[:-1])))
    num_tokens = np.diff(starts, append=len(streams)).astype(np.int32)
    return streams[starts], num_tokens, tokens, None if logprobs is None else logprobs.take(order)
