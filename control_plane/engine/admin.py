"""The engine's gRPC edge for operators: what is attached, drained and reloaded. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.step_log import NUM_KEPT
from blockplane.control_plane.engine.told_steps import steps_to_proto
from blockplane.protos import wire
from blockplane.v1 import admin_pb2 as pb
from blockplane.v1.admin_pb2_grpc import AdminServicer


class AdminServer(AdminServicer):
    """Serves `blockplane.v1.Admin`. Its errors end a call as its server's `FaultReports` has it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ListWorkers(
        self,
        request: pb.ListWorkersRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(workers=map(_worker_to_proto, self._engine.groups()))

    async def DrainWorker(
        self,
        request: pb.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.DrainWorkerResponse:
        await self._engine.drains.drain(request.group)
        return pb.DrainWorkerResponse()

    async def UndrainWorker(
        self,
        request: pb.UndrainWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.UndrainWorkerResponse:
        self._engine.drains.undrain(request.group)
        return pb.UndrainWorkerResponse()

    async def ReloadWeights(
        self,
        request: pb.ReloadWeightsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ReloadWeightsResponse:
        return pb.ReloadWeightsResponse(groups=await self._engine.reloads.reload(request.model))

    async def GetSteps(
        self,
        request: pb.GetStepsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.GetStepsResponse]:
        for number, log in self._engine.step_logs().items():
            # Some milliseconds' work, which the loop has no time for.
            yield await asyncio.to_thread(steps_to_proto, number, log.last(request.num_steps or NUM_KEPT), log.clock)


def _worker_to_proto(group: WorkerGroup) -> pb.Worker:
    hello, configure = group.hello, group.configure
    statistics = wire.group_statistics_to_proto(group.number, group.state.statistics()) if group.is_ready else None
    return pb.Worker(
        group=group.number,
        state=group.condition,
        peer=group.peer,
        boot_id=group.ranks[0].boot_id,
        protocol_version=hello.protocol_version,
        model=hello.model.name,
        model_fingerprint=hello.model_fingerprint,
        weight_epoch=hello.weight_epoch,
        attached_seconds=group.attached_seconds,
        num_blocks=configure.num_blocks,
        block_size=configure.block_size,
        statistics=statistics,
        name=group.name,
        ranks=_ranks_to_proto(group) if group.name else (),
        role=hello.role,
    )


def _ranks_to_proto(group: WorkerGroup) -> list[pb.Rank]:
    return [pb.Rank(rank=rank.number, peer=rank.peer, boot_id=rank.boot_id) for rank in group.ranks]
