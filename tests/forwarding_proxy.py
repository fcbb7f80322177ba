"""A TCP proxy on loopback that delays, stalls and resets what it forwards; knows nothing of what that is.

    python tests/forwarding_proxy.py TARGET [--delay SECONDS]

prints the address that it listens on and forwards until its standard input ends.
"""

import argparse
import asyncio
import selectors
import sys
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class ForwardingProxy:
    """Listens on a port of its own, in a thread of its own, while it is entered; any thread may call it.

    Attributes:
        address: where it listens, host:port.
        delay_seconds: how much later each side gets what the other sent; may be changed at any time.
        num_bytes: forwarded towards the target, and back.
        num_connections: accepted so far.
    """

    def __init__(self, target: str, delay_seconds: float = 0.0) -> None:
        """`target` is host:port or unix:PATH, dialled anew for each connection."""
        self.address = ""
        self.delay_seconds = delay_seconds
        self.num_bytes = [0, 0]
        self.num_connections = 0
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._ways: set[asyncio.Task[None]] = set()
        # Its timers are exact to microseconds; those of the default selector are rounded up to milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="forwarding proxy", daemon=True)
        self._flowing = asyncio.Event()
        self._flowing.set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._in_loop(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._in_loop(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stall(self) -> None:
        """Keep connections, and accept new ones, but forward nothing until `flow`; nothing is lost."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def flow(self) -> None:
        self._loop.call_soon_threadsafe(self._flowing.set)

    def reset(self) -> None:
        """Drop every connection at once, with all that is on its way; new ones are accepted."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def _in_loop(self, coroutine: object) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)  # type: ignore[arg-type]
        future.result(timeout=10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        self._abort_all()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        for way in self._ways:
            way.cancel()

    async def _accept(self, near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            far_reader, far_writer = await self._dial()
        except OSError:
            near_writer.transport.abort()
            return
        writers = {near_writer, far_writer}
        ways = {
            asyncio.create_task(self._forward(near_reader, far_writer, 0)),
            asyncio.create_task(self._forward(far_reader, near_writer, 1)),
        }
        self._writers |= writers
        self._ways |= ways
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers -= writers
            self._ways -= ways
            for way in ways:
                way.cancel()
            for writer in writers:
                writer.close()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("unix:"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix:"))
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        """One way of a connection, until its sender closes it and all has been passed on."""
        on_its_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        passing = asyncio.create_task(self._pass_on(on_its_way, writer))
        try:
            while data := await reader.read(_CHUNK):
                self.num_bytes[way] += len(data)
                on_its_way.put_nowait((self._loop.time() + self.delay_seconds, data))
            await on_its_way.join()
        finally:
            passing.cancel()

    async def _pass_on(self, on_its_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await on_its_way.get()
            await asyncio.sleep(due - self._loop.time())
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
            on_its_way.task_done()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="host:port or unix:PATH")
    parser.add_argument("--delay", metavar="SECONDS", type=float, default=0.0, help="each way")
    flags = parser.parse_args()
    with ForwardingProxy(flags.target, flags.delay) as proxy:
        print(proxy.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
