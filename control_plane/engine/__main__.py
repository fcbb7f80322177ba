"""`blockplane engine`: starts the engine process."""

import asyncio
import logging
import sys

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.control_plane.serving import listening_server, serve_until_stopped
from blockplane.protos.channel import peer_options
from blockplane.protos.config import Config
from blockplane.protos.process import run_process
from blockplane.v1.engine_pb2_grpc import add_EngineServicer_to_server


async def serve(config: Config) -> None:
    server = listening_server(config.engine_address, peer_options(config.worker_timeout_seconds))
    engine = Engine(config)
    add_EngineServicer_to_server(EngineServer(engine), server)
    logging.getLogger(__name__).info("engine listening on %s", config.engine_address)
    try:
        await serve_until_stopped(server, drain=engine.drain)
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(run_process("engine", "Schedules requests and owns KV blocks.", lambda config: asyncio.run(serve(config))))
