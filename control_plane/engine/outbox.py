"""What one frontend is to be told, gathered until its stream takes it; knows neither requests nor gRPC."""

import asyncio

import numpy as np

from blockplane.protos.delivery import Delivery, Ending, ServingState
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.plan import NO_ROWS, Int32Array


class Outbox:
    """Gathers tokens and endings per stream: a slow frontend gets fewer, larger deliveries, not a longer queue.

    Written by the engine, emptied by the frontend's writer, both in one event loop.
    """

    def __init__(self) -> None:
        self._stream_ids: list[Int32Array] = []
        self._token_ids: list[Int32Array] = []
        self._one_each = False
        """Whether no stream is gathered twice."""
        self._endings: list[Ending] = []
        self._serving: ServingState | None = None
        self._error: BlockplaneError | None = None
        self._filled = asyncio.Event()

    def put_tokens(self, stream_ids: Int32Array, token_ids: Int32Array, *, one_each: bool = False) -> None:
        """Per new token its stream; a stream's tokens stand together, in order. `one_each`: every stream got one."""
        if stream_ids.size:
            self._one_each = one_each and not self._stream_ids
            self._stream_ids.append(stream_ids)
            self._token_ids.append(token_ids)

    def put_ending(self, ending: Ending) -> None:
        self._endings.append(ending)

    def put_serving(self, serving: ServingState) -> None:
        self._serving = serving

    def flush(self) -> None:
        """Let the writer see what was put; called once the next plan is sent, so that delivery never delays it."""
        if self._token_ids or self._endings or self._serving is not None:
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
        num_tokens = None
        if self._one_each:
            stream_ids, token_ids = self._stream_ids[0], self._token_ids[0]
        else:
            stream_ids, num_tokens, token_ids = _by_stream(self._stream_ids, self._token_ids)
        endings, self._endings = tuple(self._endings), []
        serving, self._serving = self._serving, None
        self._stream_ids, self._token_ids, self._one_each = [], [], False
        return Delivery(stream_ids, num_tokens, token_ids, endings, serving)


def _by_stream(stream_ids: list[Int32Array], token_ids: list[Int32Array]) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Gather steps' tokens by stream: the streams, how many tokens each got, and all the tokens end to end, int32."""
    if not stream_ids:
        return NO_ROWS, NO_ROWS, NO_ROWS
    streams, tokens = np.concatenate(stream_ids), np.concatenate(token_ids)
    order = np.argsort(streams, kind="stable")
    streams, tokens = streams[order], tokens[order]
    starts = np.flatnonzero(np.concatenate(([True], streams[1:] != streams[:-1])))
    return streams[starts], np.diff(starts, append=len(streams)).astype(np.int32), tokens
