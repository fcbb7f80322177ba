"""`blockplane frontend`: starts the frontend process, its health and reflection services included."""

from __future__ import annotations

import asyncio
import logging
import sys

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.service import InferenceService
from blockplane.control_plane.frontend.text import Text
from blockplane.control_plane.serving import listening_server, serve_until_stopped
from blockplane.protos.config import Config
from blockplane.protos.model import ModelInfo
from blockplane.protos.process import run_process
from blockplane.v1 import inference_pb2
from blockplane.v1.inference_pb2_grpc import add_InferenceServicer_to_server

logger = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class Frontend:
    """The process: one link to the engine, the client service, and health that follows what the engine can serve."""

    def __init__(self, config: Config) -> None:
        self._address = config.address
        self._health = HealthServicer()
        self._link = EngineLink(config, self._on_model)
        self._service = InferenceService(self._link, config)
        self._last: tuple[ModelInfo, Text] | None = None

    async def serve(self) -> None:
        server = listening_server(self._address)
        await self._set_health(serving=False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_InferenceServicer_to_server(self._service, server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        logger.info("frontend listening on %s", self._address)
        await serve_until_stopped(server, self._link.run(), drain=self._drain)

    async def _drain(self) -> None:
        # From now on nothing makes it SERVING again.
        await self._health.enter_graceful_shutdown()
        await self._service.drain()

    async def _on_model(self, model: ModelInfo | None) -> None:
        """Serve a model, or none; a tokenizer takes seconds to build, so it is built off the loop and kept."""
        if model is None:
            self._service.serve_model(None)
            await self._set_health(serving=False)
            return
        if self._last is None or self._last[0] != model:
            self._last = (model, await asyncio.to_thread(Text, model))
        self._service.serve_model(self._last)
        await self._set_health(serving=True)

    async def _set_health(self, *, serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)


if __name__ == "__main__":
    sys.exit(run_process("frontend", "Serves clients over gRPC.", lambda config: asyncio.run(Frontend(config).serve())))
