"""What one frontend is to be told, gathered until its stream takes it; knows neither requests nor gRPC."""

import asyncio

import numpy as np

from blockplane.protos.delivery import Delivery, Ending, ServingState
from blockplane.protos.errors import BlockplaneError


class Outbox:
    """Gathers tokens and endings per stream: a slow frontend gets fewer, larger deliveries, not a longer queue.

    Written by the engine, emptied by the frontend's writer, both in one event loop.
    """

    def __init__(self) -> None:
        self._token_ids: dict[int, list[int]] = {}
        self._endings: list[Ending] = []
        self._serving: ServingState | None = None
        self._error: BlockplaneError | None = None
        self._filled = asyncio.Event()

    def put_token(self, stream_id: int, token_id: int) -> None:
        self._token_ids.setdefault(stream_id, []).append(token_id)

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
        tokens, self._token_ids = self._token_ids, {}
        endings, self._endings = self._endings, []
        serving, self._serving = self._serving, None
        return Delivery(
            stream_ids=np.fromiter(tokens.keys(), np.int32, len(tokens)),
            num_tokens=np.fromiter(map(len, tokens.values()), np.int32, len(tokens)),
            token_ids=np.array([token_id for ids in tokens.values() for token_id in ids], np.int32),
            endings=tuple(endings),
            serving=serving,
        )
