"""`blockplane frontend`: starts the frontend process, its health and reflection services included."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from blockplane.control_plane.frontend.calls import Calls
from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.metrics import frontend_metrics
from blockplane.control_plane.frontend.service import InferenceService
from blockplane.control_plane.frontend.text import Text
from blockplane.control_plane.frontend.vllm_engine import VllmEngineService
from blockplane.control_plane.health import HEALTH, Health
from blockplane.control_plane.introspection import add_introspection
from blockplane.control_plane.on_loop import on_loop
from blockplane.control_plane.serving import serve_until_stopped
from blockplane.protos.channel import CLIENT_OPTIONS
from blockplane.protos.config import Config
from blockplane.protos.listening import listening_server
from blockplane.protos.metrics_port import MetricsPort
from blockplane.protos.model import ModelInfo
from blockplane.protos.process import run_process
from blockplane.v1 import inference_pb2
from blockplane.v1.inference_pb2_grpc import add_InferenceServicer_to_server

logger = logging.getLogger(__name__)

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name,
)


class Frontend:
    """The process: one link to the engine, the services of clients, and health that follows what can be served."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._health = Health(SERVICES)
        self._link = EngineLink(config, self._on_model)
        self._calls = Calls(self._link, config)
        self._last: tuple[ModelInfo, Text] | None = None

    async def serve(self) -> None:
        if self._config.metrics_address:
            MetricsPort(self._config, "frontend").add(on_loop(partial(frontend_metrics, self._calls)))
        server = listening_server(self._config.address, CLIENT_OPTIONS, self._config)
        await self._health.add_to(server)
        add_InferenceServicer_to_server(InferenceService(self._calls), server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineService(self._calls, self._config), server)
        add_introspection(server, (*SERVICES, HEALTH), self._config.address, self._config)
        logger.info("frontend listening on %s", self._config.address)
        await serve_until_stopped(server, self._link.run(), drain=self._drain)

    async def _drain(self) -> None:
        await self._health.stop()
        await self._calls.drain()

    async def _on_model(self, model: ModelInfo | None) -> None:
        """Serve a model, or none; a tokenizer takes seconds to build, so it is built off the loop and kept."""
        if model is None:
            self._calls.serve_model(None)
            await self._health.set_serving(False)
            return
        if self._last is None or self._last[0] != model:
            self._last = (model, await asyncio.to_thread(Text, model))
        self._calls.serve_model(self._last)
        await self._health.set_serving(True)


if __name__ == "__main__":
    sys.exit(run_process("frontend", "Serves clients over gRPC.", lambda config: asyncio.run(Frontend(config).serve())))
