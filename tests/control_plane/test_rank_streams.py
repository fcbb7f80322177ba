"""A worker group of several ranks over real sockets: they meet, serve as one, and are lost as one."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import numpy as np
import pytest
from engine_socket import (
    SocketFrontend,
    SocketRank,
    SocketWorker,
    channel_to,
    hello,
    ready_group,
    served_engine,
)
from test_worker_driver import count_up

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.error_details import error_of_call
from blockplane.protos.errors import RanksError, UnavailableError
from blockplane.v1 import admin_pb2
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.admin_pb2_grpc import AdminStub
from blockplane.v1.engine_pb2_grpc import EngineStub

Scenario = Callable[[Engine, EngineStub], Awaitable[None]]


def over_sockets(scenario: Scenario, **settings: str) -> None:
    async def run() -> None:
        engine = Engine(load_config({"tensor_parallel_size": "2", **settings}, {}))
        async with served_engine(engine) as stub:
            await scenario(engine, stub)
        # No meeting outlives its ranks' streams.
        while len(engine.meetings):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


async def error_of(rank: SocketWorker) -> Exception:
    """What our worker makes of its stream's end."""
    try:
        async with asyncio.timeout(10):
            while await rank.call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error_of_call(error)
    raise AssertionError("the stream ended well")


async def met_ranks(stub: EngineStub, size: int = 2) -> list[SocketRank]:
    """Ranks that have had their rendezvous, and have not said hello."""
    ranks = [SocketRank(stub, rank) for rank in range(size)]
    for rank in ranks:
        await rank.join()
    for rank in ranks:
        await rank.meet()
    return ranks


# -- meeting -----------------------------------------------------------------------------------------------------------


def test_ranks_are_told_of_each_other_once_all_are_there_and_serve_over_rank_0_s_stream() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks, frontend = [SocketRank(stub, rank) for rank in (1, 0)], SocketFrontend(stub)
        await ranks[0].join()
        early = asyncio.ensure_future(ranks[0].meet())
        await asyncio.sleep(0.1)
        assert not early.done()
        await ranks[1].join()
        await ranks[1].meet()
        await early
        assert ranks[0].rendezvous == ranks[1].rendezvous
        rendezvous = ranks[0].rendezvous
        assert (rendezvous.tensor_parallel_size, rendezvous.context_parallel_size) == (2, 1)
        assert rendezvous.address == "store-of-a:1"
        assert rendezvous.meeting
        await asyncio.gather(*(rank.attach() for rank in ranks))
        assert ranks[0].configure == ranks[1].configure
        await ranks[1].be_ready()
        await asyncio.sleep(0.1)
        assert not engine.statistics().groups, "a group is ready once every rank is"
        await ranks[0].be_ready()
        await frontend.submit(1, max_tokens=2)
        for _ in range(2):
            await ranks[1].answer(await ranks[1].plan())
        await frontend.until(lambda: frontend.outcomes == {1: "length"})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ranks[0].call.read(), 0.1)

    over_sockets(scenario)


def test_every_rank_is_told_its_own_tensors_and_all_as_many_blocks_as_the_least_has_room_for() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks = await met_ranks(stub)
        told = hello(memory=1 << 19)
        told.hello.layers[0].num_kv_heads = 2
        await ranks[1].call.write(told)
        await ranks[0].attach()
        ranks[1].configure = (await ranks[1].read()).configure
        sizes = [rank.configure.kv_cache_tensors[0].size for rank in ranks]
        assert [rank.configure.num_blocks for rank in ranks] == [256, 256]
        assert sizes == [1 << 18, 1 << 19]

    over_sockets(scenario, num_seqs_buckets="1", max_model_len="64")


def test_two_engines_and_two_groups_of_equal_names_stand_side_by_side() -> None:
    async def run() -> None:
        engines = [Engine(load_config({"tensor_parallel_size": "2"}, {})) for _ in range(2)]
        async with served_engine(engines[0]) as one, served_engine(engines[1]) as two:
            groups = [await ready_group(stub, group=name) for stub in (one, two) for name in ("a", "b")]
            meetings = {rank.rendezvous.meeting for ranks in groups for rank in ranks}
            assert len(meetings) == 4
            for engine in engines:
                while len(engine.statistics().groups) < 2:
                    await asyncio.sleep(0.01)
                assert [group.name for group in engine.groups()] == ["a", "b"]

    asyncio.run(asyncio.wait_for(run(), 30))


# -- who is missing, and who is one too many ---------------------------------------------------------------------------


def test_4_ranks_expected_and_3_come_the_missing_one_is_named_after_the_stated_time() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        loop = asyncio.get_running_loop()
        began, ranks = loop.time(), [SocketRank(stub, rank) for rank in (0, 1, 3)]
        for rank in ranks:
            await rank.join()
        for rank in ranks:
            error = await error_of(rank)
            assert isinstance(error, RanksError)
            assert "rank 2 of group a did not come within 1 s" in str(error)
            assert "tensor_parallel_size is 4" in str(error)
        assert 0.9 < loop.time() - began < 5

    over_sockets(scenario, tensor_parallel_size="4", rendezvous_seconds="1")


def test_a_second_process_of_a_rank_is_turned_away_and_the_group_serves_on() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks, late = await ready_group(stub, first_boot_id=5), SocketRank(stub, 1, boot_id=9)
        await late.join()
        error = await error_of(late)
        assert isinstance(error, UnavailableError)
        assert "rank 1 at ipv4:127.0.0.1:" in str(error)
        assert not any(rank.call.done() for rank in ranks)

    over_sockets(scenario)


def test_a_lone_worker_is_refused_where_groups_have_ranks_and_told_what_to_set() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        worker = SocketWorker(stub)
        await worker.call.write(hello())
        assert await worker.end() == grpc.StatusCode.FAILED_PRECONDITION
        assert "tensor_parallel_size is 2" in await worker.call.details()
        assert "set group" in await worker.call.details()

    over_sockets(scenario)


@pytest.mark.parametrize("size", ["1", "2"])
def test_a_rank_that_the_engine_has_no_place_for_is_refused(size: str) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        rank = SocketRank(stub, 2)
        await rank.join()
        assert await rank.end() == grpc.StatusCode.FAILED_PRECONDITION
        assert f"tensor_parallel_size is {size}" in await rank.call.details()

    over_sockets(scenario, tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("memory", "sentence"), [(2048, "rank 1 gives 2048"), (1 << 20, "rank 1 of group a has another role")]
)
def test_a_refusal_of_what_the_ranks_say_ends_them_all_by_the_same_sentence(memory: int, sentence: str) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks = await met_ranks(stub)
        await ranks[0].call.write(hello())
        await ranks[1].call.write(hello(memory=memory, role="both" if memory == 2048 else "decode"))
        for rank in ranks:
            assert await rank.end() == grpc.StatusCode.FAILED_PRECONDITION
            assert sentence in await rank.call.details()

    over_sockets(scenario)


def test_a_message_out_of_turn_names_what_was_expected() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        rank = SocketRank(stub, 0)
        await rank.join()
        await rank.be_ready()
        assert await rank.end() == grpc.StatusCode.INTERNAL
        assert "expected a hello from the worker, got ready" in await rank.call.details()
        ranks = await ready_group(stub, first_boot_id=3)
        await ranks[1].call.write(pb.AttachWorkerRequest(result=pb.StepResult(step=1)))
        assert await ranks[1].end() == grpc.StatusCode.INTERNAL
        assert "expected a heartbeat from the worker, got result" in await ranks[1].call.details()

    over_sockets(scenario)


# -- the loss of one ---------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_to_build_is_named_everywhere_with_its_log(caplog: pytest.LogCaptureFixture) -> None:
    """One rank of 8 fails to compile."""

    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks = await met_ranks(stub, 8)
        await asyncio.gather(*(rank.attach() for rank in ranks))
        for rank in ranks[:5]:
            await rank.be_ready()
        await ranks[5].fault("the graph of 64 rows did not compile.", log="compiling\nNCC_EBVF030: no space")
        assert await ranks[5].end() == grpc.StatusCode.UNAVAILABLE
        for rank in (*ranks[:5], *ranks[6:]):
            error = await error_of(rank)
            assert isinstance(error, RanksError)
            assert "rank 5 at ipv4:127.0.0.1:" in str(error)
            assert "of group a gave up: the graph of 64 rows did not compile." in str(error)
            assert str(error).endswith("Its log ends:\ncompiling\nNCC_EBVF030: no space")

    over_sockets(scenario, tensor_parallel_size="8")
    assert "NCC_EBVF030: no space" in caplog.text
    assert "rank 5" in caplog.text
    assert "the graph of 64 rows did not compile" in caplog.text


def test_a_rank_that_fails_before_its_hello_is_named_too() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks = [SocketRank(stub, rank) for rank in range(2)]
        for rank in ranks:
            await rank.join()
        await ranks[1].meet()
        await ranks[1].fault("there is no such checkpoint.", log="loading nowhere")
        error = await error_of(ranks[0])
        assert isinstance(error, RanksError)
        assert str(error).endswith("of group a gave up: there is no such checkpoint. Its log ends:\nloading nowhere")

    over_sockets(scenario)


def test_a_rank_that_has_only_lost_the_others_is_no_reason_for_them_to_stay_away() -> None:
    """It hears of their loss by a collective, before the engine does by their streams."""

    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks = await met_ranks(stub, 3)
        await ranks[0].fault("rank 0 of a has lost the other ranks in an all_reduce.")
        for rank in ranks[1:]:
            assert isinstance(await error_of(rank), UnavailableError)

    over_sockets(scenario, tensor_parallel_size="3")


def test_what_a_rank_says_of_its_end_reaches_the_others_however_long_it_is() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks = await met_ranks(stub)
        await ranks[1].fault("é" * 100_000, log="ü\n" * 100_000)
        assert isinstance(await error_of(ranks[0]), RanksError)
        assert isinstance(await error_of(ranks[1]), UnavailableError)

    over_sockets(scenario)


@pytest.mark.parametrize("phase", ["met", "built", "ready"])
def test_a_silent_rank_is_missed_at_any_time_and_its_peer_ends_with_it(phase: str) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks = await (met_ranks(stub) if phase != "ready" else ready_group(stub))
        if phase == "built":
            await asyncio.gather(*(rank.attach() for rank in ranks))
        await asyncio.sleep(0.4)
        await ranks[0].beat()
        silent, peer = await error_of(ranks[1]), await error_of(ranks[0])
        assert isinstance(silent, UnavailableError)
        assert "gave no sign of life for 1." in str(silent)
        assert isinstance(peer, UnavailableError)
        assert "rank 1 at ipv4:127.0.0.1:" in str(peer)

    over_sockets(scenario, worker_timeout_seconds="1")


def test_a_rank_that_falls_silent_while_it_waits_for_the_others_is_not_waited_with() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        rank = SocketRank(stub, 1)
        await rank.join()
        assert "gave no sign of life for 1." in str(await error_of(rank))

    over_sockets(scenario, worker_timeout_seconds="1")


@pytest.mark.parametrize("lost", [0, 1])
def test_streams_go_on_exactly_at_another_group_when_one_rank_is_lost(lost: int) -> None:
    """Every token is the number of tokens before it."""

    async def scenario(engine: Engine, stub: EngineStub) -> None:
        frontend = SocketFrontend(stub)
        groups = [await ready_group(stub, group=name) for name in ("a", "b")]
        serving = [asyncio.create_task(count_up(ranks[0])) for ranks in groups]
        for stream_id in range(8):
            await frontend.submit(stream_id, length=2 + stream_id, max_tokens=40)
        await frontend.until(lambda: len(frontend.tokens) == 8 and min(map(len, frontend.tokens.values())) > 3)
        if lost == 0:
            serving[0].cancel()
        groups[0][lost].call.cancel()
        error = await error_of(groups[0][1 - lost]) if lost == 0 else None
        await frontend.until(lambda: len(frontend.outcomes) == 8)
        assert set(frontend.outcomes.values()) == {"length"}
        assert frontend.tokens == {stream_id: list(range(2 + stream_id, 42 + stream_id)) for stream_id in range(8)}
        assert error is None or f"rank {lost} at ipv4:127.0.0.1:" in str(error)
        assert [group.name for group in engine.groups()] == ["b"]
        for task in serving:
            task.cancel()

    over_sockets(scenario)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_group_comes_back_to_its_cached_blocks_only_if_every_rank_is_the_same_process(is_restarted: bool) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        frontend, ranks = SocketFrontend(stub), await ready_group(stub, first_boot_id=5)
        await frontend.submit(1, length=40, max_tokens=1)
        await ranks[0].answer(await ranks[0].plan())
        await frontend.until(lambda: 1 in frontend.outcomes)
        ranks[1].call.cancel()
        await error_of(ranks[0])
        back = [SocketRank(stub, 0, boot_id=5), SocketRank(stub, 1, boot_id=77 if is_restarted else 6)]
        for rank in back:
            await rank.join()
        for rank in back:
            await rank.meet()
        epoch = ranks[0].configure.epoch
        await asyncio.gather(back[0].attach(last_epoch=epoch), back[1].attach(last_epoch=0 if is_restarted else epoch))
        for rank in back:
            assert (rank.configure.keeps_kv, rank.configure.last_step) == (not is_restarted, 0 if is_restarted else 1)
            assert rank.configure.epoch != epoch
            await rank.be_ready()
        await frontend.submit(2, length=40, max_tokens=1)
        plan = await back[0].plan()
        assert plan.admissions[0].num_computed_tokens == (0 if is_restarted else 32)

    over_sockets(scenario)


def test_a_process_that_comes_again_before_its_loss_is_noticed_ends_its_old_group() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        ranks, again = await ready_group(stub, first_boot_id=5), SocketRank(stub, 1, boot_id=6)
        while not engine.statistics().groups:
            await asyncio.sleep(0.01)
        await again.join()
        for rank in ranks:
            assert isinstance(await error_of(rank), UnavailableError)
        assert not engine.groups()
        assert not again.call.done()

    over_sockets(scenario)


# -- leaving, and what operators ask -----------------------------------------------------------------------------------


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_leaves_drains_its_group_and_all_streams_end_well(leaving: int) -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        frontend, ranks = SocketFrontend(stub), await ready_group(stub)
        await frontend.submit(1, max_tokens=6)
        plans = [await ranks[0].plan(), await ranks[0].plan()]
        other = await ready_group(stub, group="b")
        serving = asyncio.create_task(other[0].serve())
        await ranks[leaving].call.write(pb.AttachWorkerRequest(leaving=pb.Leaving()))
        await asyncio.sleep(0.05)
        for plan in plans:
            await ranks[0].answer(plan, token_id=8)
        for rank in ranks:
            assert await rank.end() == grpc.StatusCode.OK
        await frontend.until(lambda: frontend.outcomes == {1: "length"})
        assert frontend.tokens == {1: [8, 8, 7, 7, 7, 7]}
        serving.cancel()
        assert engine.statistics().num_lost_workers == 0

    over_sockets(scenario)


def test_operators_see_names_and_ranks_and_a_reload_goes_to_rank_0_alone() -> None:
    async def run() -> None:
        engine = Engine(load_config({"tensor_parallel_size": "2"}, {}))
        async with channel_to(engine) as channel:
            stub, admin = EngineStub(channel), AdminStub(channel)
            fields = {"model_fingerprint": b"old", "reloads_weights": True, "role": "decode"}
            ranks = await ready_group(stub, group="blue", first_boot_id=5, **fields)
            while not engine.statistics().groups:
                await asyncio.sleep(0.01)
            (worker,) = (await admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
            assert (worker.name, worker.role, worker.boot_id, worker.state) == ("blue", "decode", 5, "ready")
            assert [(rank.rank, rank.boot_id) for rank in worker.ranks] == [(0, 5), (1, 6)]
            assert worker.ranks[0].peer == worker.peer
            reload = asyncio.ensure_future(admin.ReloadWeights(admin_pb2.ReloadWeightsRequest(model="/new")))
            assert (await ranks[0].read()).reload.model == "/new"
            answer = pb.WeightsReloaded(model_fingerprint=b"new")
            await ranks[0].call.write(pb.AttachWorkerRequest(reloaded=answer))
            assert list((await reload).groups) == [0]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ranks[1].call.read(), 0.1)

    asyncio.run(asyncio.wait_for(run(), 30))


# -- context parallel --------------------------------------------------------------------------------------------------


def test_requests_are_scheduled_by_the_blocks_of_all_ranks_that_share_positions() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        frontend, ranks = SocketFrontend(stub), await ready_group(stub)
        assert ranks[0].rendezvous.context_parallel_size == 2
        for rank in ranks:
            assert (rank.configure.block_size, rank.configure.context_parallel_size) == (32, 2)
            assert (rank.configure.num_blocks, rank.configure.kv_cache_tensors[0].size) == (1024, 1 << 20)
        await frontend.submit(1, length=40, max_tokens=1)
        first = await ranks[0].plan()
        assert np.count_nonzero(first.block_ids) == 2, "of 32 positions each"
        await ranks[0].answer(first)
        await frontend.until(lambda: 1 in frontend.outcomes)
        await frontend.submit(2, length=40, max_tokens=1)
        assert (await ranks[0].plan()).admissions[0].num_computed_tokens == 32

    over_sockets(scenario, context_parallel_size="2")
