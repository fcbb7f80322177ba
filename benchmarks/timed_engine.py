"""An engine whose server keeps the times of its round trips, and a bare ping on the same server; knows no worker."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.protos.config import load_config
from blockplane.protos.listening import listening_server
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import add_EngineServicer_to_server

MAX_NUM_SEQS, BLOCK_SIZE = 256, 16
PING = "/blockplane.benchmark/Ping"


class TimedEngineServer(EngineServer):
    """Keeps the seconds from each plan that goes out to the result that comes in next."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.round_trips: list[float] = []
        self._sent: float | None = None

    async def AttachWorker(  # type: ignore[override]  # noqa: N802 - named by the .proto
        self, request_iterator: AsyncIterator[pb.AttachWorkerRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await super().AttachWorker(self._timed(request_iterator), TimedContext(context, self.plan_goes))  # type: ignore[arg-type]

    def plan_goes(self) -> None:
        self._sent = time.perf_counter()

    async def _timed(self, messages: AsyncIterator[pb.AttachWorkerRequest]) -> AsyncIterator[pb.AttachWorkerRequest]:
        async for message in messages:
            if message.WhichOneof("message") == "result" and self._sent is not None:
                self.round_trips.append(time.perf_counter() - self._sent)
                self._sent = None
            yield message


class TimedContext:
    """gRPC's, and a word before each message that goes out."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], on_write: Callable[[], None]) -> None:
        self._context, self._on_write = context, on_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: pb.AttachWorkerResponse) -> None:
        self._on_write()
        await self._context.write(message)


class EngineAndPing:
    """The engine's process: serves the engine and a bare ping, and tells both their times in turns."""

    def __init__(self, address: str, max_model_len: int) -> None:
        """To be called in the event loop that is to serve."""
        settings = {
            "block_size": BLOCK_SIZE,
            "max_model_len": max_model_len,
            "num_seqs_buckets": str(MAX_NUM_SEQS),
            "max_waiting_tokens": 1 << 40,
        }
        self._engine_server = TimedEngineServer(Engine(load_config(settings, {})))
        self._turns: list[dict[str, list[float]]] = []
        self._server = listening_server(address)
        add_EngineServicer_to_server(self._engine_server, self._server)
        handler = grpc.stream_stream_rpc_method_handler(self._ping)
        service, method = PING.rsplit("/", 1)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service.removeprefix("/"), {method: handler})]
        )

    async def run(self) -> None:
        await self._server.start()
        print("{}", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            turns, self._turns = self._turns, []
            print(json.dumps({"turns": turns}), flush=True)
        await self._server.stop(0)

    async def _ping(
        self, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        """Send as many bytes as often as the first message says, each time once the last ones are answered."""
        told = json.loads(await anext(requests))
        seconds = []
        for _ in range(told["num_pings"]):
            sent = time.perf_counter()
            yield bytes(told["num_bytes"])
            await anext(requests)
            seconds.append(time.perf_counter() - sent)
        round_trips, self._engine_server.round_trips = self._engine_server.round_trips, []
        self._turns.append({"steps": round_trips, "pings": seconds})


async def serve_engine(address: str, max_model_len: int) -> None:
    await EngineAndPing(address, max_model_len).run()
