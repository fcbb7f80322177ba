"""A server's health by grpc.health.v1, for each of its services and for the whole; knows none of them."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health:
    """NOT_SERVING until it is told otherwise."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = ("", *services)
        self._servicer = HealthServicer()

    async def add_to(self, server: grpc.aio.Server) -> None:
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, is_serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_serving else statuses.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)

    async def stop(self) -> None:
        """From now on nothing makes it SERVING again."""
        await self._servicer.enter_graceful_shutdown()
