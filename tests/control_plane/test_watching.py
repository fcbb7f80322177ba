"""Watching and resetting the prefix cache over a real socket, with a worker and a frontend that play along."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import numpy as np
import pytest
from engine_socket import built, hello, served_engine

from blockplane.client.kv_index import KVIndex
from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.kv_events import MAX_BATCHES_BEHIND
from blockplane.protos import delivery_wire, wire
from blockplane.protos.config import load_config
from blockplane.protos.delivery import FrontendBatch, Submission
from blockplane.protos.kv_events import KVEventBatch
from blockplane.protos.kv_events_wire import kv_event_batch_from_proto
from blockplane.protos.plan import Int32Array, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub


async def work(engine: EngineStub) -> None:
    """A worker that answers every plan; prompts are one segment each, and nothing decodes."""
    call = engine.AttachWorker()
    messages = aiter(call)
    await call.write(hello())
    epoch = (await anext(messages)).configure.epoch
    await call.write(pb.AttachWorkerRequest(ready=built()))
    async for message in messages:
        plan = wire.plan_from_proto(message.plan)
        result = StepResult(plan.step, np.full(len(plan.prefill_rows), 7, np.int32), epoch=epoch)
        await call.write(pb.AttachWorkerRequest(result=wire.result_to_proto(result)))


async def compute(engine: EngineStub, request_id: str, prompt: Int32Array) -> int:
    """Have one token computed behind a prompt, once a worker serves. Returns how much of it was cached."""
    call = engine.AttachFrontend()
    await call.write(delivery_wire.frontend_batch_to_proto(FrontendBatch()))
    async for message in call:
        delivery = delivery_wire.delivery_from_proto(message)
        if delivery.serving is not None and delivery.serving.model is not None:
            batch = FrontendBatch((Submission(1, request_id, prompt, SamplingParams(1)),))
            await call.write(delivery_wire.frontend_batch_to_proto(batch))
        if delivery.endings:
            assert delivery.endings[0].outcome == "length"
            call.cancel()
            return delivery.endings[0].num_cached_tokens
    raise AssertionError("the stream ended before the request")


def in_time(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_router_follows_what_is_cached_and_what_is_reset_over_the_wire() -> None:
    async def scenario() -> None:
        prompt = np.arange(1, 41, dtype=np.int32)
        async with served_engine() as engine:
            index, events = KVIndex(), engine.WatchKVEvents(pb.WatchKVEventsRequest())
            worker = asyncio.create_task(work(engine))
            assert index.apply(kv_event_batch_from_proto(await events.read()))
            assert [await compute(engine, name, prompt) for name in ("a", "b")] == [0, 32]
            assert index.apply(kv_event_batch_from_proto(await events.read()))
            assert index.longest_prefix(prompt) == 32
            late = KVIndex()
            assert late.apply(kv_event_batch_from_proto(await engine.WatchKVEvents(pb.WatchKVEventsRequest()).read()))
            assert late.longest_prefix(prompt) == 32
            await engine.ResetPrefixCache(pb.ResetPrefixCacheRequest())
            assert index.apply(kv_event_batch_from_proto(await events.read()))
            assert index.longest_prefix(prompt) == 0
            assert await compute(engine, "c", prompt) == 0
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    in_time(scenario())


def test_a_watcher_hears_that_the_worker_is_gone() -> None:
    async def scenario() -> None:
        prompt = np.arange(1, 41, dtype=np.int32)
        async with served_engine() as engine:
            worker = asyncio.create_task(work(engine))
            await compute(engine, "a", prompt)
            index, events = KVIndex(), engine.WatchKVEvents(pb.WatchKVEventsRequest())
            assert index.apply(kv_event_batch_from_proto(await events.read()))
            assert len(index) == 2
            worker.cancel()
            assert index.apply(kv_event_batch_from_proto(await events.read()))
            assert len(index) == 0

    in_time(scenario())


def test_a_reset_without_a_worker_is_unavailable() -> None:
    async def scenario() -> None:
        async with served_engine() as engine:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine.ResetPrefixCache(pb.ResetPrefixCacheRequest())
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "no worker" in caught.value.details()

    in_time(scenario())


def test_a_watcher_that_left_is_forgotten() -> None:
    async def scenario() -> None:
        engine = Engine(load_config({}, {}))
        async with served_engine(engine) as stub:
            call = stub.WatchKVEvents(pb.WatchKVEventsRequest())
            while not engine._groups._watchers:
                await asyncio.sleep(0.01)
            call.cancel()
            while engine._groups._watchers:
                await asyncio.sleep(0.01)

    in_time(scenario())


def test_a_watcher_that_falls_behind_is_told_to_subscribe_anew() -> None:
    async def scenario() -> None:
        engine = Engine(load_config({}, {}))
        async with served_engine(engine) as stub:
            call = stub.WatchKVEvents(pb.WatchKVEventsRequest())
            while not engine._groups._watchers:
                await asyncio.sleep(0.01)
            for sequence in range(MAX_BATCHES_BEHIND + 1):
                for watcher in engine._groups._watchers:
                    watcher.put(KVEventBatch(1, sequence, 16, ()))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "subscribe anew" in caught.value.details()

    in_time(scenario())
