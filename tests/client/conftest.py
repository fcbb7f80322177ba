"""What the client's tests run against: an address that is free, and a server that answers as it is told."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from fake_inference import FakeInference, FakeServer
from grpc_health.v1 import health, health_pb2_grpc

from blockplane.v1.inference_pb2_grpc import add_InferenceServicer_to_server


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = grpc.server(ThreadPoolExecutor(8))
    port = server.add_insecure_port("127.0.0.1:0")
    fake = FakeServer(f"127.0.0.1:{port}", FakeInference(), health.HealthServicer())
    fake.set_serving(True)
    add_InferenceServicer_to_server(fake.inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
    server.start()
    yield fake
    fake.inference.cancelled.set()
    server.stop(None).wait()


@pytest.fixture
def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
