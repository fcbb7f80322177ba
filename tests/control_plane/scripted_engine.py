"""An engine that does as a test says, on a real socket, and a frontend's link that runs against it; knows no text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.protos import delivery_wire as wire
from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.config import Config
from blockplane.protos.delivery import Delivery, Ending, FrontendBatch, ServingState
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.model import GenerationDefaults, ModelInfo
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

MODEL = ModelInfo("m", 100, 64, (1,), None, b"z", GenerationDefaults())
SECONDS = 10


class ScriptedEngine(EngineServicer):
    """Collects what the frontend sends and sends what the test puts; None ends the stream, an error refuses it."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[FrontendBatch] = asyncio.Queue()
        self.to_send: asyncio.Queue[Delivery | BlockplaneError | None] = asyncio.Queue()

    async def AttachFrontend(  # noqa: N802 - named by the .proto
        self, request_iterator: AsyncIterator[pb.AttachFrontendRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.AttachFrontendResponse]:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (item := await self.to_send.get()) is not None:
                if isinstance(item, BlockplaneError):
                    await context.abort(item.status, str(item))
                yield wire.delivery_to_proto(item)
        finally:
            reader.cancel()

    async def _read(self, batches: AsyncIterator[pb.AttachFrontendRequest]) -> None:
        async for batch in batches:
            self.batches.put_nowait(wire.frontend_batch_from_proto(batch))

    async def next_batch(self) -> FrontendBatch:
        return await asyncio.wait_for(self.batches.get(), SECONDS)


class Linked:
    """A scripted engine, a link that runs against it, and the models that the link told of."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.address = f"unix:{folder}/engine.sock"
        self.config = Config(engine_address=self.address, **settings)
        self.engine = ScriptedEngine()
        self.models: asyncio.Queue[ModelInfo | None] = asyncio.Queue()
        self.link = EngineLink(self.config, self.models.put)
        self.running = asyncio.create_task(self.link.run())

    async def listen(self) -> None:
        self.server = grpc.aio.server(options=PEER_OPTIONS)
        add_EngineServicer_to_server(self.engine, self.server)
        self.server.add_insecure_port(self.address)
        await self.server.start()

    async def attach(self) -> None:
        self.engine.to_send.put_nowait(Delivery(serving=ServingState(MODEL)))
        assert await self.next_model() == MODEL
        assert await self.engine.next_batch() == FrontendBatch()

    async def next_model(self) -> ModelInfo | None:
        return await asyncio.wait_for(self.models.get(), SECONDS)

    def deliver(self, tokens: dict[int, list[int]], *endings: Ending) -> None:
        columns = [*tokens], [len(ids) for ids in tokens.values()], [*chain(*tokens.values())]
        self.engine.to_send.put_nowait(Delivery(*(np.array(column, np.int32) for column in columns), endings))

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.server.stop(0)
