"""`blockplane engine`: starts the engine process."""

import asyncio
import logging
import sys

from blockplane.control_plane.engine.admin import AdminServer
from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.control_plane.health import HEALTH, Health
from blockplane.control_plane.introspection import add_introspection
from blockplane.control_plane.on_loop import on_loop
from blockplane.control_plane.serving import serve_until_stopped
from blockplane.protos.channel import peer_options
from blockplane.protos.config import Config
from blockplane.protos.listening import listening_server
from blockplane.protos.metrics_port import MetricsPort
from blockplane.protos.process import run_process
from blockplane.v1 import admin_pb2, engine_pb2
from blockplane.v1.admin_pb2_grpc import add_AdminServicer_to_server
from blockplane.v1.engine_pb2_grpc import add_EngineServicer_to_server

SERVICES = (
    engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


async def serve(config: Config) -> None:
    address = config.engine_address
    server = listening_server(address, peer_options(config.worker_timeout_seconds), config)
    engine, health = Engine(config), Health(SERVICES)
    if config.metrics_address:
        MetricsPort(config, "engine").add(on_loop(engine.metrics))
    add_EngineServicer_to_server(EngineServer(engine), server)
    add_AdminServicer_to_server(AdminServer(engine), server)
    await health.add_to(server)
    await health.set_serving(True)
    add_introspection(server, (*SERVICES, HEALTH), address, config)

    async def drain() -> None:
        await health.stop()
        await engine.drain()

    logging.getLogger(__name__).info("engine listening on %s", address)
    try:
        await serve_until_stopped(server, drain=drain)
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(run_process("engine", "Schedules requests and owns KV blocks.", lambda config: asyncio.run(serve(config))))
