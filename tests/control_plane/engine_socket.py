"""An engine behind a real socket, and peers that attach to it and do as they are told; knows no test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
from engine_driver import outcomes_of, tokens_of

from blockplane.control_plane.engine.admin import AdminServer
from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.protos import delivery_wire, wire
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import load_config
from blockplane.protos.delivery import FrontendBatch, Submission
from blockplane.protos.faults import FaultReports
from blockplane.protos.model import GenerationDefaults, ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.admin_pb2_grpc import add_AdminServicer_to_server
from blockplane.v1.engine_pb2_grpc import EngineStub, add_EngineServicer_to_server

MODEL = ModelInfo("m", 100, 64, (1,), None, b"", GenerationDefaults())
LAYER = pb.LayerKVSpec(name="layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32")


def hello(
    version: int = wire.PROTOCOL_VERSION, memory: int = 1 << 20, rules: BucketRules | None = None, **fields: Any
) -> pb.AttachWorkerRequest:
    """`fields` are those of the message that have nothing by default."""
    return pb.AttachWorkerRequest(
        hello=pb.WorkerHello(
            protocol_version=version,
            model=wire.model_info_to_proto(MODEL),
            layers=[LAYER],
            available_memory=memory,
            bucket_rules=wire.bucket_rules_to_proto(rules or BucketRules()),
            **fields,
        )
    )


def built() -> pb.WorkerReady:
    """What the engine tells a worker of that hello to build."""
    config = load_config({}, {})
    return pb.WorkerReady(
        num_blocks=(1 << 20) // 1024,
        num_seqs_buckets=config.num_seqs_buckets,
        num_batched_tokens_buckets=config.num_batched_tokens_buckets,
        kv_segment_size=config.kv_segment_size,
    )


class SocketWorker:
    """A worker that answers when it is told to: every row that works samples a token, prompts are one segment each."""

    def __init__(self, stub: EngineStub) -> None:
        self.call = stub.AttachWorker()
        self.configure = pb.Configure()
        self._num_decodes = 0
        self._num_sampled: dict[int, int] = {}

    async def attach(self, **hello_fields: Any) -> None:
        await self.call.write(hello(**hello_fields))
        self.configure = (await self.read()).configure

    async def be_ready(self) -> None:
        await self.call.write(pb.AttachWorkerRequest(ready=built()))

    async def read(self) -> pb.AttachWorkerResponse:
        message = await asyncio.wait_for(self.call.read(), 10)
        assert isinstance(message, pb.AttachWorkerResponse), "the stream has not ended"
        return message

    async def plan(self) -> StepPlan:
        plan = wire.plan_from_proto((await self.read()).plan)
        if plan.decode_rows is not None:
            self._num_decodes = len(plan.decode_rows)
        self._num_sampled[plan.step] = self._num_decodes + len(plan.prefill_rows)
        return plan

    def result(self, plan: StepPlan, token_id: int = 7, **fields: Any) -> StepResult:
        token_ids = np.full(self._num_sampled[plan.step], token_id, np.int32)
        return StepResult(plan.step, token_ids, **{"epoch": self.configure.epoch, **fields})

    async def answer(self, plan: StepPlan, token_id: int = 7, **fields: Any) -> None:
        result = wire.result_to_proto(self.result(plan, token_id, **fields))
        await self.call.write(pb.AttachWorkerRequest(result=result))

    async def serve(self) -> None:
        """Answer all plans, until cancelled or the stream ends."""
        while True:
            await self.answer(await self.plan())

    async def beat(self) -> None:
        await self.call.write(pb.AttachWorkerRequest(heartbeat=pb.Heartbeat()))

    async def end(self) -> grpc.StatusCode:
        """How the stream ended; plans that are there are passed over."""
        async with asyncio.timeout(10):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            return await self.call.code()


class SocketRank(SocketWorker):
    """One of a group's ranks; only rank 0 is sent plans."""

    def __init__(self, stub: EngineStub, rank: int, group: str = "a", boot_id: int = 0) -> None:
        super().__init__(stub)
        self.rank, self.group, self.boot_id = rank, group, boot_id
        self.rendezvous = pb.Rendezvous()

    async def join(self) -> None:
        version, address = wire.PROTOCOL_VERSION, "" if self.rank else f"store-of-{self.group}:1"
        await self.call.write(
            pb.AttachWorkerRequest(
                join=pb.JoinRanks(
                    protocol_version=version,
                    group_name=self.group,
                    rank=self.rank,
                    address=address,
                    boot_id=self.boot_id,
                )
            )
        )

    async def meet(self) -> None:
        self.rendezvous = (await self.read()).rendezvous

    async def attach(self, **hello_fields: Any) -> None:
        await super().attach(**{"boot_id": self.boot_id, **hello_fields})

    async def fault(self, message: str, log: str = "") -> None:
        await self.call.write(pb.AttachWorkerRequest(fault=pb.Fault(message=message, log=log)))


async def ready_group(
    stub: EngineStub, size: int = 2, group: str = "a", first_boot_id: int = 0, **hello_fields: Any
) -> list[SocketRank]:
    """Ranks that have met and built; with a first boot id they have ids from there on."""
    ranks = [SocketRank(stub, rank, group, first_boot_id and first_boot_id + rank) for rank in range(size)]
    for each in ranks:
        await each.join()
    for each in ranks:
        await each.meet()
    await asyncio.gather(*(each.attach(**hello_fields) for each in ranks))
    for each in ranks:
        await each.be_ready()
    return ranks


class SocketFrontend:
    """A frontend that keeps what it is told, by stream."""

    def __init__(self, stub: EngineStub) -> None:
        self.call = stub.AttachFrontend()
        self.tokens: dict[int, list[int]] = {}
        self.outcomes: dict[int, object] = {}
        self.serving = asyncio.Event()
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def submit(self, stream_id: int, length: int = 3, max_tokens: int = 5, first: int = 2) -> None:
        """A prompt of that length, once a model is served."""
        await self.call.write(delivery_wire.frontend_batch_to_proto(FrontendBatch()))
        await asyncio.wait_for(self.serving.wait(), 10)
        prompt = np.arange(first, first + length, dtype=np.int32)
        submission = Submission(stream_id, f"request-{stream_id}", prompt, SamplingParams(max_tokens))
        await self.call.write(delivery_wire.frontend_batch_to_proto(FrontendBatch((submission,))))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self._news.wait()
                self._news.clear()

    async def _read(self) -> None:
        async for message in self.call:
            delivery = delivery_wire.delivery_from_proto(message)
            for stream_id, tokens in tokens_of(delivery).items():
                self.tokens.setdefault(stream_id, []).extend(tokens)
            self.outcomes.update(outcomes_of(delivery))
            if delivery.serving is not None and delivery.serving.model is not None:
                self.serving.set()
            self._news.set()


@asynccontextmanager
async def served_engine(engine: Engine | None = None) -> AsyncIterator[EngineStub]:
    """An engine behind a socket; yields the way to it."""
    async with channel_to(engine or Engine(load_config({}, {}))) as channel:
        yield EngineStub(channel)


@asynccontextmanager
async def channel_to(engine: Engine) -> AsyncIterator[grpc.aio.Channel]:
    """The same, for whoever wants its operators' service too."""
    server = grpc.aio.server(interceptors=[FaultReports()])
    add_EngineServicer_to_server(EngineServer(engine), server)
    add_AdminServicer_to_server(AdminServer(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)
