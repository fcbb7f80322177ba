"""An engine and workers of both roles over real sockets: what each is told to read, and what the engine does then."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from engine_socket import SocketFrontend, SocketWorker, ready_group, served_engine

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

Scenario = Callable[[Engine, EngineStub], Awaitable[None]]


def over_sockets(scenario: Scenario, **settings: str) -> None:
    async def run() -> None:
        engine = Engine(load_config(settings, {}))
        async with served_engine(engine) as stub:
            await scenario(engine, stub)

    asyncio.run(asyncio.wait_for(run(), 30))


async def ready_worker(stub: EngineStub, role: str, **fields: Any) -> SocketWorker:
    worker = SocketWorker(stub)
    await worker.attach(**{"role": role, "transfer_address": f"{role}:1", "transports": ["grpc"], **fields})
    await worker.be_ready()
    return worker


async def asked_by_then(
    stub: EngineStub, length: int = 40
) -> tuple[SocketWorker, SocketWorker, SocketFrontend, pb.FetchBlocks]:
    """Workers of both roles, the second of which is told to read what a prompt left at the first."""
    prefill, decode = await ready_worker(stub, "prefill"), await ready_worker(stub, "decode")
    frontend = SocketFrontend(stub)
    await frontend.submit(1, length)
    await prefill.answer(await prefill.plan())
    return prefill, decode, frontend, (await decode.read()).fetch


def ids(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()


async def answer(worker: SocketWorker, fetch: pb.FetchBlocks, failure: str = "") -> None:
    fetched = pb.BlocksFetched(transfer_id=fetch.transfer_id, failure=failure)
    await worker.call.write(pb.AttachWorkerRequest(fetched=fetched))


def test_a_worker_is_told_what_to_read_where_and_goes_on_with_it() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        prefill, decode, frontend, fetch = await asked_by_then(stub)
        assert (fetch.transport, fetch.address) == ("grpc", "prefill:1")
        assert fetch.source_epoch == prefill.configure.epoch
        assert (len(ids(fetch.source_block_ids)), len(ids(fetch.block_ids))) == (2, 2)
        assert 0 < fetch.timeout_seconds <= 30
        await frontend.until(lambda: frontend.tokens.get(1) == [7])
        await answer(decode, fetch)
        plan = await decode.plan()
        assert [admission.num_computed_tokens for admission in plan.admissions] == [32]
        assert plan.block_ids.tolist()[:2] == ids(fetch.block_ids)
        await decode.answer(plan, token_id=8)
        serving = asyncio.create_task(decode.serve())
        await frontend.until(lambda: frontend.outcomes.get(1) == "length")
        assert frontend.tokens[1][:2] == [7, 8]
        serving.cancel()

    over_sockets(scenario)


def test_a_worker_that_cannot_read_computes_the_prompt() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        _, decode, _, fetch = await asked_by_then(stub)
        await answer(decode, fetch, "the link broke.")
        assert [admission.num_computed_tokens for admission in (await decode.plan()).admissions] == [0]

    over_sockets(scenario)


def test_a_source_that_dies_while_it_is_read_leaves_its_request_to_the_reader() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        prefill, decode, frontend, fetch = await asked_by_then(stub)
        prefill.call.cancel()
        plan = await decode.plan()
        assert [admission.num_computed_tokens for admission in plan.admissions] == [0]
        await answer(decode, fetch, "the other worker is gone.")
        await decode.answer(plan)
        serving = asyncio.create_task(decode.serve())
        await frontend.until(lambda: frontend.outcomes.get(1) == "length")
        serving.cancel()

    over_sockets(scenario)


def test_a_reader_that_dies_leaves_its_request_to_the_source() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        prefill, decode, frontend, _ = await asked_by_then(stub)
        decode.call.cancel()
        serving = asyncio.create_task(prefill.serve())
        await frontend.until(lambda: frontend.outcomes.get(1) == "length")
        assert len(frontend.tokens[1]) == 5
        serving.cancel()

    over_sockets(scenario)


def test_an_answer_that_nobody_asked_for_ends_the_stream() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        _, decode, _, fetch = await asked_by_then(stub)
        fetch.transfer_id ^= 1
        await answer(decode, fetch)
        assert await decode.end() == grpc.StatusCode.INTERNAL

    over_sockets(scenario)


def test_each_rank_reads_from_its_counterpart_and_all_must_have_read() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        decoding = {"role": "decode", "transports": ["grpc"]}
        prefill = await ready_group(stub, group="p", role="prefill", transports=["grpc"], transfer_address="p:1")
        decode = await ready_group(stub, group="d", **decoding)
        frontend = SocketFrontend(stub)
        await frontend.submit(1, 40)
        await prefill[0].answer(await prefill[0].plan())
        fetches = [(await rank.read()).fetch for rank in decode]
        assert len({(fetch.transfer_id, fetch.block_ids) for fetch in fetches}) == 1
        await answer(decode[1], fetches[1])
        with_blocks = asyncio.ensure_future(decode[0].plan())
        await asyncio.sleep(0.1)
        assert not with_blocks.done()
        await answer(decode[0], fetches[0])
        assert [admission.num_computed_tokens for admission in (await with_blocks).admissions] == [32]

    over_sockets(scenario, tensor_parallel_size="2")


def test_one_rank_that_could_not_read_is_enough_to_compute_anew() -> None:
    async def scenario(engine: Engine, stub: EngineStub) -> None:
        decoding = {"role": "decode", "transports": ["grpc"]}
        prefill = await ready_group(stub, group="p", role="prefill", transports=["grpc"], transfer_address="p:1")
        decode = await ready_group(stub, group="d", **decoding)
        await SocketFrontend(stub).submit(1, 40)
        await prefill[0].answer(await prefill[0].plan())
        fetches = [(await rank.read()).fetch for rank in decode]
        await answer(decode[1], fetches[1], "the link broke.")
        await answer(decode[0], fetches[0])
        assert [admission.num_computed_tokens for admission in (await decode[0].plan()).admissions] == [0]

    over_sockets(scenario, tensor_parallel_size="2")
