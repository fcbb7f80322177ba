"""How a control-plane process serves until it is told to stop; knows no service."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

GRACE_SECONDS = 2.0
"""How long open calls may take to hear that they have ended."""

Drain = Callable[[], Coroutine[Any, Any, None]]


async def serve_until_stopped(
    server: grpc.aio.Server, *companions: Coroutine[Any, Any, None], drain: Drain | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, then drain, then end the calls that are open.

    `drain` has the calls end by themselves and returns once they have, or once they had their time; a second signal
    cancels it. `companions` run meanwhile; if one ends, serving ends with it, and what it raised is raised here.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await server.start()
    running = [asyncio.ensure_future(companion) for companion in companions]
    ended = await _first_of(signals.get(), running)
    if not ended and drain is not None:
        draining = asyncio.ensure_future(drain())
        ended = await _first_of(signals.get(), [draining, *running])
        # What it does at its end is for calls that can still hear of it.
        await _cancel([draining])
    await server.stop(GRACE_SECONDS)
    await _cancel(running)
    for task in ended:
        task.result()


async def _first_of(signalled: Coroutine[Any, Any, int], tasks: list[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    """Wait for a signal or a task's end. Returns the tasks that have ended, none where the signal came first."""
    waiting = asyncio.ensure_future(signalled)
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    await _cancel([waiting])
    return [task for task in tasks if task in done]


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
