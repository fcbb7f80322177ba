"""What operators ask of an engine, over real sockets: its workers told, drained and given other weights."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from engine_socket import SocketFrontend, SocketWorker, channel_to

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.v1 import admin_pb2 as pb
from blockplane.v1 import engine_pb2
from blockplane.v1.admin_pb2_grpc import AdminStub
from blockplane.v1.engine_pb2_grpc import EngineStub

Scenario = Callable[[AdminStub, EngineStub], Awaitable[None]]


def play(scenario: Scenario, **settings: str) -> None:
    async def main() -> None:
        async with channel_to(Engine(load_config(settings, {}))) as channel:
            await scenario(AdminStub(channel), EngineStub(channel))

    asyncio.run(asyncio.wait_for(main(), 30))


async def ready_worker(stub: EngineStub, boot_id: int, *, reloads: bool = True) -> SocketWorker:
    worker = SocketWorker(stub)
    await worker.attach(boot_id=boot_id, model_fingerprint=b"old", reloads_weights=reloads)
    await worker.be_ready()
    return worker


async def workers(admin: AdminStub) -> list[pb.Worker]:
    return list((await admin.ListWorkers(pb.ListWorkersRequest())).workers)


async def states(admin: AdminStub) -> list[str]:
    return [worker.state for worker in await workers(admin)]


async def until_states(admin: AdminStub, *expected: str) -> None:
    async with asyncio.timeout(10):
        while await states(admin) != list(expected):
            await asyncio.sleep(0.02)


async def ending(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


async def answer_reload(worker: SocketWorker, **fields: object) -> str:
    message = await worker.read()
    assert message.WhichOneof("message") == "reload"
    reloaded = engine_pb2.WeightsReloaded(**fields)  # type: ignore[arg-type]
    await worker.call.write(engine_pb2.AttachWorkerRequest(reloaded=reloaded))
    return message.reload.model


def test_workers_are_told_as_they_are() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        assert await workers(admin) == []
        building = SocketWorker(engine)
        await building.attach(boot_id=8, weight_epoch=3)
        await ready_worker(engine, 9)
        await until_states(admin, "building", "ready")
        first, second = await workers(admin)
        assert (first.group, first.boot_id, first.weight_epoch, first.HasField("statistics")) == (0, 8, 3, False)
        assert (second.group, second.boot_id, second.model_fingerprint) == (1, 9, b"old")
        assert (second.model, second.block_size, second.num_blocks) == ("m", building.configure.block_size, 1024)
        assert second.statistics.group == 1
        assert second.peer.startswith("ipv4:127.0.0.1")
        assert 0 < second.attached_seconds < first.attached_seconds < 30
        await building.call.write(engine_pb2.AttachWorkerRequest(leaving=engine_pb2.Leaving()))
        assert await building.end() == grpc.StatusCode.OK

    play(scenario)


def test_a_drain_answers_once_the_group_is_empty_and_its_deadline_leaves_it_draining() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        worker, frontend = await ready_worker(engine, 1), SocketFrontend(engine)
        await frontend.submit(1, max_tokens=3)
        plan = await worker.plan()
        status, _ = await ending(admin.DrainWorker(pb.DrainWorkerRequest(group=0), timeout=0.3))
        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await states(admin) == ["draining"]
        drain = asyncio.ensure_future(admin.DrainWorker(pb.DrainWorkerRequest(group=0)))
        await worker.answer(plan)
        serving = asyncio.create_task(worker.serve())
        await drain
        await frontend.until(lambda: frontend.outcomes == {1: "length"})
        await admin.UndrainWorker(pb.UndrainWorkerRequest(group=0))
        assert await states(admin) == ["ready"]
        await frontend.submit(2, max_tokens=1)
        await frontend.until(lambda: frontend.outcomes == {1: "length", 2: "length"})
        serving.cancel()

    play(scenario)


def test_a_group_that_is_not_there_is_not_found() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        for call in (admin.DrainWorker(pb.DrainWorkerRequest()), admin.UndrainWorker(pb.UndrainWorkerRequest())):
            assert await ending(call) == (grpc.StatusCode.NOT_FOUND, "no worker 0 is attached; those that are: none.")

    play(scenario)


def test_a_reload_is_told_between_steps_and_the_worker_serves_with_new_weights() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        worker, frontend = await ready_worker(engine, 1), SocketFrontend(engine)
        await frontend.submit(1, max_tokens=2)
        plan = await worker.plan()
        reload = asyncio.ensure_future(admin.ReloadWeights(pb.ReloadWeightsRequest(model="/new")))
        await until_states(admin, "reloading")
        await worker.answer(plan)
        await worker.answer(await worker.plan())
        assert await answer_reload(worker, model_fingerprint=b"new") == "/new"
        assert list((await reload).groups) == [0]
        (told,) = await workers(admin)
        assert (told.state, told.model_fingerprint, told.weight_epoch) == ("ready", b"new", 1)
        await frontend.submit(2, max_tokens=1)
        await worker.answer(await worker.plan())
        await frontend.until(lambda: frontend.outcomes == {1: "length", 2: "length"})

    play(scenario)


def test_a_worker_that_beats_may_read_as_long_as_it_takes_and_a_silent_one_is_lost() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        beating = await ready_worker(engine, 1)
        reload = asyncio.ensure_future(admin.ReloadWeights(pb.ReloadWeightsRequest()))
        for _ in range(8):
            await asyncio.sleep(0.25)
            await beating.beat()
        await answer_reload(beating, model_fingerprint=b"new")
        await reload
        reload = asyncio.ensure_future(admin.ReloadWeights(pb.ReloadWeightsRequest()))
        status, sentence = await ending(reload)
        assert status is grpc.StatusCode.UNAVAILABLE
        assert "worker 0 was lost while it read weights" in sentence

    play(scenario, worker_timeout_seconds="1", step_timeout_seconds="1")


def test_a_worker_s_reason_for_keeping_its_weights_ends_the_call_and_not_the_worker() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        worker = await ready_worker(engine, 1)
        reload = asyncio.ensure_future(admin.ReloadWeights(pb.ReloadWeightsRequest(model="/no")))
        await answer_reload(worker, model_fingerprint=b"old", failure="No model at /no.")
        assert await ending(reload) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "worker 0 has kept its weights: No model at /no.",
        )
        assert await states(admin) == ["ready"]
        assert not worker.call.done()

    play(scenario)


def test_a_worker_that_does_not_know_reloads_is_told_by_its_address() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        await ready_worker(engine, 1, reloads=False)
        status, sentence = await ending(admin.ReloadWeights(pb.ReloadWeightsRequest()))
        assert status is grpc.StatusCode.FAILED_PRECONDITION
        assert "worker 0 at ipv4:127.0.0.1" in sentence

    play(scenario)


def test_weights_that_nobody_asked_for_end_the_stream() -> None:
    async def scenario(admin: AdminStub, engine: EngineStub) -> None:
        worker = await ready_worker(engine, 1)
        await worker.call.write(engine_pb2.AttachWorkerRequest(reloaded=engine_pb2.WeightsReloaded()))
        assert await worker.end() == grpc.StatusCode.INTERNAL

    play(scenario)
