"""KV events of the public vLLM engine protocol: one sequence without gaps, small batches, and always what is cached."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import grpc
import numpy as np
import pytest
from engine_driver import Worker
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import SECONDS
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common
from whole_control_plane import ControlPlane, control_plane

from blockplane.control_plane.engine.kv_events import MAX_BATCHES_BEHIND
from blockplane.control_plane.frontend import vllm_kv_events
from blockplane.control_plane.frontend.vllm_kv_events import Subscription
from blockplane.protos.errors import UnavailableError
from blockplane.protos.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEventBatch

B = 2


class Gateway:
    """What a gateway makes of the batches: the blocks behind one address, by id, with their parents and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.sequence = 0

    def take(self, batches: Iterable[common.KvEventBatch]) -> None:
        for batch in batches:
            assert batch.sequence_number == self.sequence + 1
            assert batch.events
            assert not batch.HasField("dp_rank")
            self.sequence += 1
            for event in batch.events:
                getattr(self, f"_{event.WhichOneof('data')}")(event)

    def _stored(self, event: common.KvCacheEvent) -> None:
        parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
        for block in event.stored.blocks:
            assert len(block.token_ids) == block.block_size
            self.blocks[block.block_hash] = parent, tuple(block.token_ids)
            parent = block.block_hash

    def _removed(self, event: common.KvCacheEvent) -> None:
        for block_hash in event.removed.block_hashes:
            self.blocks.pop(block_hash, None)

    def _cleared(self, event: common.KvCacheEvent) -> None:
        self.blocks.clear()


def stored(hashes: list[int], parent: int | None = None) -> BlocksStored:
    """Blocks whose tokens are their id's."""
    tokens = np.array([[abs(block_hash) % 1000] * B for block_hash in hashes], "<i4")
    return BlocksStored(tuple(hashes), parent, tokens.tobytes())


def batch(*events: KVEvent, group: int = 0) -> KVEventBatch:
    return KVEventBatch(1, 1, B, events, group)


# -- one subscription --------------------------------------------------------------------------------------------------


def test_it_begins_with_nothing_and_goes_on_with_what_there_is() -> None:
    subscription = Subscription()
    first = subscription.begin()
    assert (first.sequence_number, [event.WhichOneof("data") for event in first.events]) == (1, ["cleared"])
    (second,) = subscription.batches(batch(AllBlocksCleared(), stored([5, -6]), stored([7], parent=5)))
    assert (second.sequence_number, [event.event_id for event in second.events]) == (2, [2, 3])
    assert second.events[0].stored == common.KvBlocksStored(
        blocks=[
            common.KvBlock(block_hash=5, token_ids=[5, 5], block_size=2),
            common.KvBlock(block_hash=-6, token_ids=[6, 6], block_size=2),
        ]
    )
    assert second.events[1].stored.parent_block_hash == 5


def test_what_says_nothing_new_takes_no_number() -> None:
    subscription = Subscription()
    assert list(subscription.batches(batch(AllBlocksCleared()))) == []
    assert subscription.begin().sequence_number == 1
    (stored_first,) = subscription.batches(batch(stored([1])))
    (removed_all,) = subscription.batches(batch(AllBlocksCleared()))
    assert (stored_first.sequence_number, removed_all.sequence_number) == (2, 3)
    assert list(subscription.batches(batch(AllBlocksCleared()))) == []
    assert len(list(subscription.batches(batch(stored([1]), BlocksRemoved((1,)))))) == 1
    assert list(subscription.batches(batch(AllBlocksCleared()))) == []


def test_a_group_that_forgets_all_takes_nothing_from_another() -> None:
    gateway, subscription = Gateway(), Subscription()
    gateway.take([subscription.begin()])
    gateway.take(subscription.batches(batch(stored([1, 2]), group=0)))
    gateway.take(subscription.batches(batch(stored([3, 4]), group=1)))
    gateway.take(subscription.batches(batch(AllBlocksCleared(), stored([5]), group=0)))
    assert {*gateway.blocks} == {3, 4, 5}


operations = st.one_of(
    st.tuples(st.just("store"), st.lists(st.integers(-9, 9), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("remove"), st.lists(st.integers(-9, 9), min_size=1, max_size=4)),
    st.tuples(st.just("clear"), st.just([])),
)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), operations), min_size=1, max_size=4), max_size=10))
def test_a_gateway_knows_what_all_groups_hold(steps: list[list[tuple[int, tuple[str, list[int]]]]]) -> None:
    """Ids of different groups differ, as those of their caches do."""
    gateway, subscription, held = Gateway(), Subscription(), set[int]()
    gateway.take([subscription.begin()])
    for group, (kind, hashes) in (item for step in steps for item in step):
        ids = [1000 * group + block_hash for block_hash in hashes]
        if kind == "store":
            event: KVEvent = stored(ids)
            held |= {*ids}
        elif kind == "remove":
            event = BlocksRemoved(tuple(ids))
            held -= {*ids}
        else:
            event = AllBlocksCleared()
            held -= {block_hash for block_hash in held if abs(block_hash - 1000 * group) < 10}
        gateway.take(subscription.batches(batch(event, group=group)))
        assert {*gateway.blocks} == held


def test_a_large_cache_comes_in_batches_that_gateways_take_and_its_chains_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_kv_events, "MAX_BATCH_BYTES", 300)
    gateway, subscription, hashes = Gateway(), Subscription(), [*range(1, 100)]
    batches = [subscription.begin(), *subscription.batches(batch(stored(hashes), stored([200], parent=50)))]
    assert all(part.ByteSize() <= 300 for part in batches)
    assert len(batches) > 10
    gateway.take(batches)
    assert {block_hash: parent for block_hash, (parent, _) in gateway.blocks.items()} == {
        1: None,
        **{block_hash: block_hash - 1 for block_hash in hashes[1:]},
        200: 50,
    }
    removals = list(subscription.batches(batch(AllBlocksCleared())))
    assert all(part.ByteSize() <= 300 for part in removals)
    gateway.take(removals)
    assert gateway.blocks == {}


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_ids_and_tokens_of_any_size_are_reckoned_with(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_kv_events.MAX_BATCH_BYTES == 1 << 20, "a quarter of what gateways take"
    monkeypatch.setattr(vllm_kv_events, "MAX_BATCH_BYTES", 1 << 13)
    tokens = np.full(block_size * 1000, 2**31 - 1, "<i4").tobytes()
    hashes = tuple(range(-(2**63), -(2**63) + 1000))
    large = KVEventBatch(1, 1, block_size, (BlocksStored(hashes, None, tokens), BlocksRemoved(hashes)))
    sizes = [part.ByteSize() for part in Subscription().batches(large)]
    assert 1 << 12 < max(sizes) <= (1 << 13) + 100


# -- over sockets ------------------------------------------------------------------------------------------------------


def subscribe(planes: ControlPlane, start: int = 0) -> grpc.aio.UnaryStreamCall:
    return planes.vllm.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=start))


async def read(call: grpc.aio.UnaryStreamCall) -> common.KvEventBatch:
    return await asyncio.wait_for(call.read(), SECONDS)


async def subscribed(planes: ControlPlane) -> tuple[grpc.aio.UnaryStreamCall, Gateway]:
    """A subscription that the engine has heard of, and what is read of it."""
    watchers, call, gateway = planes.engine._groups._watchers, subscribe(planes), Gateway()
    num_before = len(watchers)
    gateway.take([await read(call)])
    await planes.until(lambda: len(watchers) > num_before)
    return call, gateway


async def compute(planes: ControlPlane, length: int) -> int:
    """Have one token computed behind a prompt of that length; returns how much of that was cached."""
    request = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=range(1, length + 1)), sampling_params=vllm.SamplingParams(max_tokens=1)
    )
    reading = asyncio.ensure_future(planes.vllm.Generate(request).read())
    await planes.until(lambda: len(planes.engine._streams) == 1)
    while planes.engine._streams:
        plan = planes.plan()
        planes.answer(plan, 1 if plan.prefill_num_tokens.sum() < 16 else 0)
    return (await asyncio.wait_for(reading, SECONDS)).complete.cached_tokens


def test_a_gateway_follows_what_is_cached_and_what_is_flushed(tmp_path: Path) -> None:
    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            call, gateway = await subscribed(planes)
            assert [await compute(planes, 40), await compute(planes, 40)] == [0, 32]
            gateway.take([await read(call)])
            gateway.take([await read(call)])
            tokens = {tokens for _, tokens in gateway.blocks.values()}
            assert tokens == {tuple(range(1, 17)), tuple(range(17, 33))}
            late, known = subscribe(planes), Gateway()
            known.take([await read(late), await read(late)])
            assert known.blocks == gateway.blocks
            flushed = await planes.vllm.FlushCache(common.FlushCacheRequest())
            assert flushed.success
            gateway.take([await read(call)])
            assert gateway.blocks == {}
            assert await compute(planes, 40) == 0

    asyncio.run(main())


def test_a_lost_worker_takes_its_blocks_along(tmp_path: Path) -> None:
    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            await compute(planes, 40)
            call, gateway = subscribe(planes), Gateway()
            gateway.take([await read(call), await read(call)])
            assert len(gateway.blocks) == 2
            planes.worker.lose()
            gateway.take([await read(call)])
            assert gateway.blocks == {}

    asyncio.run(main())


def test_a_cursor_of_another_subscription_is_out_of_range_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(subscribe(planes, start=3))
            assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
            assert "subscribe from 0" in (caught.value.details() or "")

    asyncio.run(main())


def test_a_subscriber_that_falls_behind_has_lost_data(tmp_path: Path) -> None:
    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            call, _ = await subscribed(planes)
            for sequence in range(MAX_BATCHES_BEHIND + 2):
                for watcher in planes.engine._groups._watchers:
                    watcher.put(KVEventBatch(1, sequence, 16, ()))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(call)
            assert caught.value.code() is grpc.StatusCode.DATA_LOSS

    asyncio.run(main())


def test_a_subscriber_that_leaves_is_forgotten_and_one_whose_engine_goes_hears_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            watchers = planes.engine._groups._watchers
            leaving, staying = subscribe(planes), subscribe(planes)
            for call in (leaving, staying):
                await read(call)
            await planes.until(lambda: len(watchers) == 2)
            leaving.cancel()
            await planes.until(lambda: len(watchers) == 1)
            await planes.servers[0].stop(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(staying)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (caught.value.details() or "").startswith("the engine went away;")

    asyncio.run(main())


def test_a_subscriber_hears_that_the_frontend_alone_lost_its_engine(tmp_path: Path) -> None:
    """Its call falls with the channel, which is not the same as being cancelled."""

    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            call, _ = await subscribed(planes)
            planes.engine.outbox(0).close(UnavailableError("go away."))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (caught.value.details() or "").startswith("the engine went away;")

    asyncio.run(main())


def test_loads_are_those_of_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with control_plane(tmp_path) as planes:
            await planes.call(20)
            await planes.call(30)
            planes.plan()
            response = await planes.vllm.GetLoads(vllm.GetLoadsRequest())
            (load,) = response.loads
            assert (response.dp_rank_count, response.version) == (1, "0.1.0")
            assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
            assert (load.max_running_requests, load.utilization, load.num_waiting_uncached_tokens) == (1, 1.0, 30)
            assert 0 < load.token_usage < 1
            Worker(planes.engine, planes.worker.group.hello.model)
            (load,) = (await planes.vllm.GetLoads(vllm.GetLoadsRequest())).loads
            assert load.max_running_requests == 2
            for group in list(planes.engine._groups):
                planes.engine.detach_worker(group)
            (load,) = (await planes.vllm.GetLoads(vllm.GetLoadsRequest())).loads
            assert (load.num_running_reqs, load.num_waiting_reqs) == (0, 2), "they are held at no group"

    asyncio.run(main())
