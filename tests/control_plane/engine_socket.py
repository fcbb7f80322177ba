"""An engine behind a real socket, and the messages with which a worker attaches to it; knows no test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.protos import wire
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import load_config
from blockplane.protos.model import GenerationDefaults, ModelInfo
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub, add_EngineServicer_to_server

MODEL = ModelInfo("m", 100, 64, (1,), None, b"", GenerationDefaults())
LAYER = pb.LayerKVSpec(name="layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32")


def hello(
    version: int = wire.PROTOCOL_VERSION, memory: int = 1 << 20, rules: BucketRules | None = None
) -> pb.AttachWorkerRequest:
    return pb.AttachWorkerRequest(
        hello=pb.WorkerHello(
            protocol_version=version,
            model=wire.model_info_to_proto(MODEL),
            layers=[LAYER],
            available_memory=memory,
            bucket_rules=wire.bucket_rules_to_proto(rules or BucketRules()),
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


@asynccontextmanager
async def served_engine(engine: Engine | None = None) -> AsyncIterator[EngineStub]:
    """An engine behind a socket; yields the way to it."""
    server = grpc.aio.server()
    add_EngineServicer_to_server(EngineServer(engine or Engine(load_config({}, {}))), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield EngineStub(channel)
    finally:
        await server.stop(None)
