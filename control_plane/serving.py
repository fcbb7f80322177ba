"""How a control-plane process listens and stops; knows no service."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import grpc

from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.errors import ConfigurationError

GRACE_SECONDS = 2.0
"""How long open calls may take to end once the process is told to stop."""


def listening_server(address: str) -> grpc.aio.Server:
    """A server bound to `address`, not started yet. Raises ConfigurationError if the address cannot be had."""
    server = grpc.aio.server(options=PEER_OPTIONS)
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigurationError(f"cannot listen on {address}: it is taken or not ours; choose another.") from None
    return server


async def serve_until_stopped(server: grpc.aio.Server, *companions: Coroutine[Any, Any, None]) -> None:
    """Serve until SIGINT or SIGTERM, then end open calls within the grace time.

    `companions` run meanwhile; if one ends first, serving ends with it, and what it raised is raised here.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await server.start()
    tasks = [asyncio.ensure_future(coroutine) for coroutine in (stopped.wait(), *companions)]
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await server.stop(GRACE_SECONDS)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()
