"""Reflection, channelz and health of a server, over real sockets: what they tell, to whom, how to turn them off."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from processes import free_port

from blockplane.control_plane.health import HEALTH, Health
from blockplane.control_plane.introspection import add_introspection
from blockplane.protos.config import Config
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.listening import listening_server

SERVICE = "blockplane.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ADMIN, CLIENT = "the-token-of-root", "the-token-of-alice"


def play(config: Config, scenario: Callable[[grpc.aio.Channel, Health], Awaitable[None]]) -> None:
    async def main() -> None:
        server = listening_server(config.address, config=config)
        health = Health((SERVICE,))
        await health.add_to(server)
        add_introspection(server, (SERVICE, HEALTH), config.address, config)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(config.address) as channel:
                await scenario(channel, health)
        finally:
            await server.stop(None)

    asyncio.run(main())


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/server.sock"


async def services(channel: grpc.aio.Channel, *token: str) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    metadata = tuple(("authorization", f"Bearer {each}") for each in token)
    async for answer in stub.ServerReflectionInfo(iter([request]), metadata=metadata):
        return {service.name for service in answer.list_services_response.service}
    raise AssertionError("no answer")


async def status_of(call: Awaitable[object]) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as failure:
        return failure.code()
    return grpc.StatusCode.OK


def num_servers(channel: grpc.aio.Channel, *token: str) -> Awaitable[object]:
    metadata = tuple(("authorization", f"Bearer {each}") for each in token)
    return channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest(), metadata=metadata)


def test_reflection_tells_of_every_service_and_channelz_is_off(address: str) -> None:
    async def scenario(channel: grpc.aio.Channel, health: Health) -> None:
        assert await services(channel) == {SERVICE, HEALTH, "grpc.reflection.v1alpha.ServerReflection"}
        assert await status_of(num_servers(channel)) is grpc.StatusCode.UNIMPLEMENTED

    play(Config(address=address), scenario)


def test_reflection_can_be_turned_off_and_channelz_on(address: str) -> None:
    async def scenario(channel: grpc.aio.Channel, health: Health) -> None:
        assert await status_of(services(channel)) is grpc.StatusCode.UNIMPLEMENTED
        assert await status_of(num_servers(channel)) is grpc.StatusCode.OK

    play(Config(address=address, reflection="off", channelz="on"), scenario)


def test_where_there_are_tokens_any_is_told_of_services_and_only_an_admins_of_connections(
    address: str, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"root admin {ADMIN}\nalice client {CLIENT}\n")

    async def scenario(channel: grpc.aio.Channel, health: Health) -> None:
        assert SERVICE in await services(channel, CLIENT)
        assert await status_of(services(channel)) is grpc.StatusCode.UNAUTHENTICATED
        assert await status_of(num_servers(channel, ADMIN)) is grpc.StatusCode.OK
        assert await status_of(num_servers(channel, CLIENT)) is grpc.StatusCode.PERMISSION_DENIED
        assert await status_of(num_servers(channel)) is grpc.StatusCode.UNAUTHENTICATED

    play(Config(address=address, channelz="on", tokens=str(tokens)), scenario)


def test_channelz_for_a_whole_network_without_tokens_is_refused(address: str) -> None:
    async def scenario(channel: grpc.aio.Channel, health: Health) -> None:
        raise AssertionError("it serves")

    config = Config(address=f"0.0.0.0:{free_port()}", channelz="on", plaintext="anywhere")
    with pytest.raises(ConfigurationError, match=r"channelz would tell everybody who reaches 0\.0\.0\.0"):
        play(config, scenario)


def test_channelz_that_is_not_installed_is_refused_by_what_installs_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(channel: grpc.aio.Channel, health: Health) -> None:
        raise AssertionError("it serves")

    monkeypatch.setitem(sys.modules, "grpc_channelz.v1", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'blockplane\[channelz\]'"):
        play(Config(address=address, channelz="on"), scenario)


def test_health_is_told_for_each_service_and_the_whole_and_stays_down_once_it_stops(address: str) -> None:
    async def scenario(channel: grpc.aio.Channel, health: Health) -> None:
        async def told() -> set[int]:
            check = HealthStub(channel).Check
            return {(await check(health_pb2.HealthCheckRequest(service=name))).status for name in ("", SERVICE)}

        assert await told() == {NOT_SERVING}
        await health.set_serving(True)
        assert await told() == {SERVING}
        watching = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watching.read()).status == SERVING
        await health.stop()
        assert (await watching.read()).status == NOT_SERVING
        await health.set_serving(True)
        assert await told() == {NOT_SERVING}
        watching.cancel()
        unknown = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="a.Stranger"))
        assert await status_of(unknown) is grpc.StatusCode.NOT_FOUND

    play(Config(address=address), scenario)
