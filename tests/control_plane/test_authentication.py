"""Tokens on real calls: who is let in, to what, and as whom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_service import PROMPT, Play, Service, failure_of, next_response, play_in
from engine_socket import SocketWorker, hello
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.server import EngineServer
from blockplane.control_plane.health import Health
from blockplane.protos.config import Config, load_config
from blockplane.protos.delivery import Ending
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import AuthenticationError, BlockplaneError, PermissionDeniedError
from blockplane.protos.listening import listening_server
from blockplane.v1 import engine_pb2
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub, add_EngineServicer_to_server

NAMES = {"alice": "client", "root": "admin", "both": "client,admin", "frontend": "peer"}


def token_of(name: str) -> str:
    return f"the-token-of-{name}"


def showing(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def as_(name: str) -> tuple[tuple[str, str], ...]:
    return showing(token_of(name))


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text("".join(f"{name} {scopes} {token_of(name)}\n" for name, scopes in NAMES.items()))
    return str(path)


@pytest.fixture
def play(tmp_path: Path, tokens: str) -> Play:
    return lambda scenario: play_in(tmp_path, scenario, tokens=tokens)


async def refusal_of(call: Any) -> BlockplaneError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, SECONDS)
    return error_of_call(caught.value)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ((), "this server asks for a token; send `authorization: Bearer TOKEN`"),
        (showing("the-token-of-nobody"), "the token is not one of this server's"),
        ((("authorization", f"Basic {token_of('alice')}"),), "this server asks for a token"),
        ((("authorization", token_of("alice")),), "this server asks for a token"),
        ((("authorization", "Bearer "),), "this server asks for a token"),
        ((*as_("alice"), *as_("root")), "this server asks for a token"),
    ],
    ids=["no token", "an unknown one", "another scheme", "no scheme", "an empty one", "two"],
)
def test_a_call_that_does_not_show_who_it_is_from_is_unauthenticated(play: Play, metadata: Any, sentence: str) -> None:
    async def scenario(service: Service) -> None:
        called = service.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)
        error = await refusal_of(called)
        assert type(error) is AuthenticationError
        assert str(error).startswith(sentence)
        failure = await failure_of(service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT), metadata=metadata))
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        assert service.engine.batches.empty(), "the engine never heard of it"

    play(scenario)


def test_a_token_is_for_its_scopes_and_the_refusal_says_which_are_needed(play: Play) -> None:
    async def scenario(service: Service) -> None:
        flush = service.vllm.FlushCache
        error = await refusal_of(flush(common.FlushCacheRequest(), metadata=as_("alice")))
        assert type(error) is PermissionDeniedError
        assert str(error).endswith(
            "is for tokens of the scope admin, and that of alice is for client; call with another."
        )
        for called in (
            service.vllm.GetLoads(vllm.GetLoadsRequest(), metadata=as_("alice")),
            service.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=as_("root")),
            service.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=as_("frontend")),
        ):
            assert type(await refusal_of(called)) is PermissionDeniedError
        events = service.vllm.SubscribeKvEvents(common.SubscribeKvEventsRequest(), metadata=as_("alice"))
        assert (await failure_of(events)).code() is grpc.StatusCode.PERMISSION_DENIED

    play(scenario)


def test_what_is_let_in_belongs_to_the_tokens_name_whatever_the_call_says(play: Play) -> None:
    async def scenario(service: Service) -> None:
        metadata = (*as_("alice"), ("blockplane-caller", "bob"))
        call = service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT), metadata=metadata)
        (submission,) = (await service.engine.next_batch()).submissions
        assert submission.caller == "alice"
        service.deliver_text(submission.stream_id, "ok", Ending(submission.stream_id, "length"))
        assert (await next_response(call)).text == "ok"
        await service.stub.Abort(pb.AbortRequest(request_ids=["a", "b"]), metadata=as_("both"))
        assert [*(await service.engine.next_batch()).aborts] == [("a", "both"), ("b", "both")]
        await service.vllm.Abort(vllm.AbortRequest(request_ids=["c"]), metadata=as_("alice"))
        assert [*(await service.engine.next_batch()).aborts] == [("c", "alice")]

    play(scenario)


def test_a_refused_call_is_in_the_log_without_its_token(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(service: Service) -> None:
        await refusal_of(service.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=showing("secret-and-wrong")))

    with caplog.at_level(logging.INFO):
        play(scenario)
    assert "refused a call of '/blockplane.v1.Inference/GetModelInfo': the token is not one" in caplog.text
    assert "secret" not in caplog.text


@asynccontextmanager
async def guarded_engine(folder: Path, tokens: str) -> AsyncIterator[grpc.aio.Channel]:
    """An engine that asks for tokens; yields the way to it."""
    address = f"unix:{folder}/engine.sock"
    server = listening_server(address, config=Config(tokens=tokens))
    add_EngineServicer_to_server(EngineServer(Engine(load_config({}, {}))), server)
    await Health(()).add_to(server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop(None)


def test_only_a_peers_token_attaches_a_worker_or_a_frontend_to_the_engine(tmp_path: Path, tokens: str) -> None:
    async def main() -> None:
        async with guarded_engine(tmp_path, tokens) as channel:
            stub = EngineStub(channel)
            for metadata, status in [
                ((), grpc.StatusCode.UNAUTHENTICATED),
                (as_("root"), grpc.StatusCode.PERMISSION_DENIED),
                (as_("alice"), grpc.StatusCode.PERMISSION_DENIED),
            ]:
                for call in (stub.AttachWorker(metadata=metadata), stub.AttachFrontend(metadata=metadata)):
                    assert (await failure_of(call)).code() is status
            worker = SocketWorker(stub)
            worker.call = stub.AttachWorker(metadata=as_("frontend"))
            await worker.call.write(hello())
            assert (await worker.read()).WhichOneof("message") == "configure"

    asyncio.run(main())


def test_admins_and_peers_may_ask_the_engine_and_clients_may_not_and_probes_need_no_token(
    tmp_path: Path, tokens: str
) -> None:
    async def main() -> None:
        async with guarded_engine(tmp_path, tokens) as channel:
            ask, question = EngineStub(channel).GetStatistics, engine_pb2.GetStatisticsRequest()
            for name in ("root", "frontend"):
                assert (await ask(question, metadata=as_(name))).num_running == 0
            assert type(await refusal_of(ask(question, metadata=as_("alice")))) is PermissionDeniedError
            assert type(await refusal_of(ask(question))) is AuthenticationError
            statuses = health_pb2.HealthCheckResponse
            answer = await HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == statuses.NOT_SERVING

    asyncio.run(main())
