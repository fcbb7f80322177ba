"""The processes between which benchmarks/capacity.py measures: an engine, all of its workers, clients that only read.

    python benchmarks/capacity_peers.py KIND ADDRESS SETTINGS-AS-JSON

Each prints a line of JSON once it is up, then one for each line of JSON on its standard input, with whose end it ends:
what it has counted until then, and the CPU seconds of its process. What is made of it they do not know.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
from bare_http2 import Reader
from wire_peers import BYTES_PER_BLOCK, LAYER, VOCAB_SIZE, Script, say

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.protos import wire
from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.config import load_config
from blockplane.protos.delivery import FrontendBatch, Submission
from blockplane.protos.listening import listening_server
from blockplane.protos.model import ModelInfo
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1 import inference_pb2
from blockplane.v1.engine_pb2_grpc import EngineStub, add_EngineServicer_to_server

MIN_PROMPT_LENGTH, MAX_PROMPT_LENGTH = 64, 192
"""Rows reach new blocks at random phases."""
DROP_SECONDS = 0.25
LATE_SECONDS = 1e-3

# -- the engine --------------------------------------------------------------------------------------------------------


class LocalFrontend:
    """Keeps streams open in the engine's own process and drops what they bring: nothing is delivered."""

    def __init__(self, engine: Engine, max_model_len: int) -> None:
        self._engine, self._owner = engine, engine.attach_frontend()
        self._params = SamplingParams(max_model_len, ignore_eos=True, seed=0)
        self._random = np.random.default_rng(0)
        self.num_streams = 0

    async def open(self, num_streams: int) -> None:
        for number in range(self.num_streams, num_streams):
            prompt = self._random.integers(
                VOCAB_SIZE - 1, size=self._random.integers(MIN_PROMPT_LENGTH, MAX_PROMPT_LENGTH), dtype=np.int32
            )
            submission = Submission(number, f"request-{number}", prompt, self._params)
            self._engine.take_batch(self._owner, FrontendBatch((submission,)))
            await asyncio.sleep(0)
        self.num_streams = num_streams

    async def drop(self) -> None:
        while True:
            await asyncio.sleep(DROP_SECONDS)
            self._engine.outbox(self._owner).empty()


async def serve_engine(address: str, settings: dict[str, Any]) -> None:
    engine, server = Engine(load_config(settings, {})), listening_server(address)
    add_EngineServicer_to_server(EngineServer(engine), server)
    await server.start()
    say({})
    frontend, dropping = None, None
    async for told in commands():
        if "num_streams" in told:
            if frontend is None:
                frontend = LocalFrontend(engine, settings["max_model_len"])
                dropping = asyncio.create_task(frontend.drop())
            await frontend.open(told["num_streams"])
        groups = engine.statistics().groups.values()
        running, waiting = [group.num_running for group in groups], sum(group.num_waiting for group in groups)
        report(num_groups=len(groups), num_running=sum(running), num_waiting=waiting)
    if dropping is not None:
        dropping.cancel()
    await server.stop(0)


# -- its workers -------------------------------------------------------------------------------------------------------


class TimedWorker:
    """A worker whose steps take their time one after the other, as a device's do, and compute nothing.

    Attributes:
        num_steps, num_tokens: that were answered, and sampled in them.
        num_late, late_seconds: steps whose plan came after the end of the one before, and by how much in all.
        behind_seconds: the most by which this process was late with an answer itself, since that was last asked.
    """

    def __init__(self, address: str, model: ModelInfo, num_blocks: int, step_seconds: float) -> None:
        options = [*PEER_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._model, self._num_blocks, self._step_seconds = model, num_blocks, step_seconds
        self._answers: asyncio.Queue[tuple[float, pb.AttachWorkerRequest]] = asyncio.Queue()
        self.num_steps = self.num_tokens = self.num_late = 0
        self.late_seconds = self.behind_seconds = 0.0

    async def attach(self) -> None:
        call = self._call = EngineStub(self._channel).AttachWorker()
        hello = pb.WorkerHello(
            protocol_version=wire.PROTOCOL_VERSION,
            model=wire.model_info_to_proto(self._model),
            layers=[LAYER],
            available_memory=BYTES_PER_BLOCK * self._num_blocks,
        )
        await call.write(pb.AttachWorkerRequest(hello=hello))
        told = (await call.read()).configure
        self._script = Script(wire.configure_from_proto(told))
        names = pb.WorkerReady.DESCRIPTOR.fields_by_name
        await call.write(pb.AttachWorkerRequest(ready=pb.WorkerReady(**{name: getattr(told, name) for name in names})))
        beats = self._beat(told.heartbeat_milliseconds / 1000)
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._answer(), beats)]

    async def _read(self) -> None:
        free_at = 0.0
        while (message := await self._call.read()) is not grpc.aio.EOF:
            now, result = time.perf_counter(), self._script.answer(wire.plan_from_proto(message.plan))
            if free_at and now - free_at > LATE_SECONDS:
                self.num_late += 1
                self.late_seconds += now - free_at
            free_at = max(now, free_at) + self._step_seconds
            self._answers.put_nowait((free_at, pb.AttachWorkerRequest(result=wire.result_to_proto(result))))
        raise SystemExit(f"the engine ended a worker's stream: {await self._call.details()}")

    async def _answer(self) -> None:
        while True:
            due, message = await self._answers.get()
            await asyncio.sleep(due - time.perf_counter())
            if message.WhichOneof("message") == "result":
                self.behind_seconds = max(self.behind_seconds, time.perf_counter() - due)
                self.num_steps += 1
            await self._call.write(message)
            self.num_tokens += len(message.result.token_ids) // 4

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            # A stream has one writer.
            self._answers.put_nowait((time.perf_counter(), pb.AttachWorkerRequest(heartbeat=pb.Heartbeat())))


async def serve_workers(address: str, settings: dict[str, Any]) -> None:
    """As many as are told, each with a connection of its own."""
    # The engine's process has no torch, and is not to have it here.
    from blockplane.data_plane.models.synthetic import synthetic_model_info

    num_groups = settings.pop("num_groups")
    # A frontend needs a tokenizer.
    model = replace(synthetic_model_info(1), name="m", max_model_len=settings.pop("max_model_len"))
    workers = [TimedWorker(address, model, **settings) for _ in range(num_groups)]
    for worker in workers:
        await worker.attach()
    say({})
    names = "num_steps", "num_tokens", "num_late", "late_seconds"
    async for _ in commands():
        behind = max(worker.behind_seconds for worker in workers)
        for worker in workers:
            worker.behind_seconds = 0.0
        report(**{name: sum(getattr(worker, name) for worker in workers) for name in names}, behind_seconds=behind)


# -- clients -----------------------------------------------------------------------------------------------------------


async def serve_readers(address: str, settings: dict[str, Any]) -> None:
    """As many streams as are told, each on a connection of its own."""
    host, port = address.rsplit(":", 1)
    random, readers = np.random.default_rng(1), list[Reader]()
    path = "/blockplane.v1.Inference/Generate"
    say({})
    async for told in commands():
        while len(readers) < told.get("num_streams", 0):
            ids = random.integers(VOCAB_SIZE - 1, size=random.integers(MIN_PROMPT_LENGTH, MAX_PROMPT_LENGTH)).tolist()
            params = inference_pb2.SamplingParams(max_tokens=settings["max_tokens"], ignore_eos=True)
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), sampling_params=params)
            reader = Reader(path, request.SerializeToString())
            await asyncio.get_running_loop().create_connection(lambda reader=reader: reader, host, int(port))
            readers.append(reader)
        if (end := next((reader.end for reader in readers if reader.end is not None), None)) is not None:
            raise SystemExit(f"a stream has ended: {end}")
        report(num_messages=sum(reader.num_messages for reader in readers))


# -- all ---------------------------------------------------------------------------------------------------------------


def report(**counts: float) -> None:
    say({**counts, "cpu_seconds": time.process_time(), "seconds": time.perf_counter()})


async def commands() -> AsyncIterator[dict[str, Any]]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


KINDS: dict[str, Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]]] = {
    "engine": serve_engine,
    "workers": serve_workers,
    "readers": serve_readers,
}

if __name__ == "__main__":
    asyncio.run(KINDS[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3])))
