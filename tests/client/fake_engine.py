"""A server of `blockplane.v1.Admin` and of what operators ask `Engine`, answering as it is told; nothing is behind."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from blockplane.protos.error_details import trailing_metadata
from blockplane.protos.errors import BlockplaneError
from blockplane.v1 import admin_pb2 as pb
from blockplane.v1 import engine_pb2
from blockplane.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from blockplane.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server


@dataclass
class FakeEngine(AdminServicer, EngineServicer):
    """Notes each call with its request; answers it, or fails as `failures` says of its name."""

    workers: list[pb.Worker] = field(default_factory=list)
    steps: list[pb.GetStepsResponse] = field(default_factory=list)
    statistics: engine_pb2.GetStatisticsResponse = field(default_factory=engine_pb2.GetStatisticsResponse)
    failures: dict[str, BlockplaneError] = field(default_factory=dict)
    calls: list[tuple[str, object]] = field(default_factory=list)
    tokens: list[object] = field(default_factory=list)
    address: str = ""

    def _note(self, name, request, context):
        self.calls.append((name, request))
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        if name in self.failures:
            context.set_trailing_metadata(trailing_metadata(self.failures[name]))
            context.abort(self.failures[name].status, str(self.failures[name]))

    def ListWorkers(self, request, context):  # noqa: N802 - named by the .proto
        self._note("ListWorkers", request, context)
        return pb.ListWorkersResponse(workers=self.workers)

    def DrainWorker(self, request, context):  # noqa: N802 - named by the .proto
        self._note("DrainWorker", request, context)
        return pb.DrainWorkerResponse()

    def UndrainWorker(self, request, context):  # noqa: N802 - named by the .proto
        self._note("UndrainWorker", request, context)
        return pb.UndrainWorkerResponse()

    def ReloadWeights(self, request, context):  # noqa: N802 - named by the .proto
        self._note("ReloadWeights", request, context)
        return pb.ReloadWeightsResponse(groups=[worker.group for worker in self.workers])

    def GetSteps(self, request, context):  # noqa: N802 - named by the .proto
        self._note("GetSteps", request, context)
        yield from self.steps

    def GetStatistics(self, request, context):  # noqa: N802 - named by the .proto
        self._note("GetStatistics", request, context)
        return self.statistics

    def ResetPrefixCache(self, request, context):  # noqa: N802 - named by the .proto
        self._note("ResetPrefixCache", request, context)
        return engine_pb2.ResetPrefixCacheResponse()


@contextmanager
def running_fake_engine() -> Iterator[FakeEngine]:
    server = grpc.server(ThreadPoolExecutor(4))
    engine = FakeEngine()
    engine.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    add_AdminServicer_to_server(engine, server)
    add_EngineServicer_to_server(engine, server)
    server.start()
    yield engine
    server.stop(None).wait()


def worker(group: int, **fields) -> pb.Worker:
    """A worker group that is ready, unless `fields` say otherwise."""
    told = {
        "state": "ready",
        "peer": "ipv4:127.0.0.1:5",
        "boot_id": 2**64 - 1,
        "protocol_version": 4,
        "model": "synthetic",
        "model_fingerprint": bytes(range(16)),
        "weight_epoch": 2,
        "attached_seconds": 61.4,
        "num_blocks": 101,
        "block_size": 16,
        "statistics": statistics(group),
    }
    return pb.Worker(group=group, **(told | fields))


def statistics(group: int, **fields) -> engine_pb2.GroupStatistics:
    told = {"num_running": 3, "num_waiting": 2, "num_parked": 1, "kv_cache_usage": 0.5}
    return engine_pb2.GroupStatistics(group=group, **(told | fields))
