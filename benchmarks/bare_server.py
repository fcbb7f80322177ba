"""A gRPC server that does nothing but write: the least that messages to many streams cost one. Knows no service.

    python benchmarks/bare_server.py PORT NUM_BYTES SECONDS

Each call gets a message of so many bytes every so many seconds, all calls at the same moments. Prints an empty line
once it is up, and for each line on its standard input how many messages it has written and its CPU seconds.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

PATH = "/blockplane.benchmark/Write"


class BareServer:
    """Its calls wait for one moment after another."""

    def __init__(self, num_bytes: int, seconds: float) -> None:
        self.num_messages = 0
        self._message, self._seconds = bytes(num_bytes), seconds
        self._moment = asyncio.Event()

    async def write(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await self._moment.wait()
            await context.write(self._message)
            self.num_messages += 1

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            moment, self._moment = self._moment, asyncio.Event()
            moment.set()


async def serve(port: int, num_bytes: int, seconds: float) -> None:
    bare, server = BareServer(num_bytes, seconds), grpc.aio.server()
    service, method = PATH.removeprefix("/").rsplit("/", 1)
    handler = grpc.stream_stream_rpc_method_handler(bare.write)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(flush=True)
    moments = asyncio.create_task(bare.run())
    while await asyncio.to_thread(sys.stdin.readline):
        print(bare.num_messages, time.process_time(), flush=True)
    moments.cancel()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
