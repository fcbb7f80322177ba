"""How a control-plane process stops: real signals, a drain, and companions that end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from blockplane.control_plane.serving import serve_until_stopped
from blockplane.protos.errors import ProtocolError
from blockplane.protos.listening import listening_server

SECONDS = 10


def stop_us() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Awaitable[None]]:
    return lambda *companions, **how: serve_until_stopped(
        listening_server(f"unix:{tmp_path}/server.sock"), *companions, **how
    )


def test_a_signal_drains_and_serving_ends_with_the_drain(serve: Any) -> None:
    async def main() -> None:
        events = []

        async def companion() -> None:
            try:
                await asyncio.sleep(SECONDS)
            finally:
                events.append("companion ended")

        async def drain() -> None:
            await asyncio.sleep(0.05)
            events.append("drained")

        asyncio.get_running_loop().call_later(0.05, stop_us)
        await asyncio.wait_for(serve(companion(), drain=drain), SECONDS)
        assert events == ["drained", "companion ended"]

    asyncio.run(main())


def test_a_second_signal_ends_the_drain_at_once(serve: Any) -> None:
    async def main() -> None:
        events = []

        async def drain() -> None:
            asyncio.get_running_loop().call_later(0.05, stop_us)
            try:
                await asyncio.sleep(SECONDS)
            finally:
                events.append("cut short")

        asyncio.get_running_loop().call_later(0.05, stop_us)
        begin = time.monotonic()
        await serve(drain=drain)
        assert (events, time.monotonic() - begin < SECONDS / 2) == (["cut short"], True)

    asyncio.run(main())


@pytest.mark.parametrize("while_draining", [False, True])
def test_a_companion_that_fails_ends_serving_with_its_error(serve: Any, while_draining: bool) -> None:
    async def main() -> None:
        is_draining = asyncio.Event()

        async def companion() -> None:
            if while_draining:
                await is_draining.wait()
            raise ProtocolError("run the same version.")

        async def drain() -> None:
            is_draining.set()
            await asyncio.sleep(SECONDS)

        if while_draining:
            asyncio.get_running_loop().call_later(0.05, stop_us)
        with pytest.raises(ProtocolError):
            await asyncio.wait_for(serve(companion(), drain=drain), SECONDS)
        assert is_draining.is_set() == while_draining

    asyncio.run(main())


def test_a_drain_that_fails_is_not_taken_for_one_that_succeeded(serve: Any) -> None:
    async def main() -> None:
        async def drain() -> None:
            raise ProtocolError("a fault of the drain's.")

        asyncio.get_running_loop().call_later(0.05, stop_us)
        with pytest.raises(ProtocolError):
            await asyncio.wait_for(serve(drain=drain), SECONDS)

    asyncio.run(main())
