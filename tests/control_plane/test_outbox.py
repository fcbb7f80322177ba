"""The outbox: nothing is seen before it is flushed, what waits coalesces, nothing is told twice or lost."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.outbox import Outbox
from blockplane.protos.delivery import Delivery, Ending, ServingState
from blockplane.protos.errors import ProtocolError, UnavailableError

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


async def taken(outbox: Outbox) -> Delivery | None:
    """What can be taken now; None where the taker would wait."""
    task = asyncio.ensure_future(outbox.take())
    for _ in range(5):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    return None


def tokens_of(delivery: Delivery | None) -> dict[int, list[int]]:
    assert delivery is not None
    parts = np.split(delivery.token_ids, np.cumsum(delivery.num_tokens)[:-1])
    return {stream: part.tolist() for stream, part in zip(delivery.stream_ids.tolist(), parts, strict=True)}


def test_what_was_put_is_seen_only_once_it_is_flushed() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        assert await taken(outbox) is None
        outbox.put_token(1, 10)
        outbox.put_ending(Ending(1, "stop"))
        outbox.put_serving(ServingState(None))
        assert await taken(outbox) is None
        outbox.flush()
        delivery = await taken(outbox)
        assert tokens_of(delivery) == {1: [10]}
        assert delivery is not None
        assert (delivery.endings, delivery.serving) == ((Ending(1, "stop"),), ServingState(None))

    run(scenario())


def test_a_flush_wakes_a_taker_that_waits() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        task = asyncio.ensure_future(outbox.take())
        await asyncio.sleep(0)
        outbox.put_token(3, 30)
        await asyncio.sleep(0)
        assert not task.done()
        outbox.flush()
        assert tokens_of(await asyncio.wait_for(task, 5)) == {3: [30]}

    run(scenario())


@pytest.mark.parametrize("what", ["token", "ending", "serving"])
def test_each_kind_alone_is_worth_a_delivery_and_comes_once(what: str) -> None:
    async def scenario() -> None:
        outbox = Outbox()
        outbox.flush()
        assert await taken(outbox) is None
        if what == "token":
            outbox.put_token(1, 10)
        elif what == "ending":
            outbox.put_ending(Ending(1, UnavailableError("gone.")))
        else:
            outbox.put_serving(ServingState(None))
        outbox.flush()
        delivery = await taken(outbox)
        assert delivery is not None
        assert (len(delivery.token_ids), len(delivery.endings), delivery.serving is not None) == {
            "token": (1, 0, False),
            "ending": (0, 1, False),
            "serving": (0, 0, True),
        }[what]
        outbox.flush()
        assert await taken(outbox) is None

    run(scenario())


def test_several_flushes_coalesce_into_one_delivery_with_streams_in_order_of_their_first_token() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        for stream_id, token_id in [(7, 1), (5, 2), (7, 3), (9, 4), (5, 5)]:
            outbox.put_token(stream_id, token_id)
            outbox.flush()
        delivery = await taken(outbox)
        assert delivery is not None
        columns = (delivery.stream_ids, delivery.num_tokens, delivery.token_ids)
        assert [column.tolist() for column in columns] == [[7, 5, 9], [2, 2, 1], [1, 3, 2, 5, 4]]
        assert {column.dtype for column in columns} == {np.dtype(np.int32)}
        assert await taken(outbox) is None

    run(scenario())


def test_the_newest_serving_state_wins_and_endings_keep_their_order() -> None:
    async def scenario() -> None:
        outbox, newest = Outbox(), ServingState(None)
        outbox.put_serving(ServingState(None))
        outbox.put_serving(newest)
        outbox.put_ending(Ending(2, "length"))
        outbox.put_ending(Ending(1, "stop"))
        outbox.flush()
        delivery = await taken(outbox)
        assert delivery is not None
        assert delivery.serving is newest
        assert [ending.stream_id for ending in delivery.endings] == [2, 1]

    run(scenario())


def test_a_closed_outbox_raises_its_error_in_place_of_what_is_left_and_goes_on_doing_so() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        outbox.put_token(1, 10)
        outbox.flush()
        outbox.close(ProtocolError("broken."))
        for _ in range(2):
            with pytest.raises(ProtocolError, match=r"broken\."):
                await asyncio.wait_for(outbox.take(), 5)
        outbox.put_token(1, 11)
        outbox.flush()
        with pytest.raises(ProtocolError):
            await taken(outbox)

    run(scenario())


def test_closing_wakes_a_taker_that_waits() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        task = asyncio.ensure_future(outbox.take())
        await asyncio.sleep(0)
        outbox.close(UnavailableError("gone."))
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(task, 5)

    run(scenario())


steps = st.lists(st.sampled_from(["flush", "take"]) | st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=40)


@given(steps=steps)
def test_every_stream_gets_its_tokens_once_and_in_order_however_slow_the_taker(steps: list[Any]) -> None:
    async def scenario() -> None:
        outbox = Outbox()
        put: dict[int, list[int]] = {}
        got: dict[int, list[int]] = {}
        for step in [*steps, "flush", "take"]:
            if step == "flush":
                outbox.flush()
            elif step == "take":
                delivery = await taken(outbox)
                for stream_id, token_ids in tokens_of(delivery).items() if delivery is not None else ():
                    got[stream_id] = got.get(stream_id, []) + token_ids
            else:
                stream_id, token_id = step
                outbox.put_token(stream_id, token_id)
                put.setdefault(stream_id, []).append(token_id)
        assert got == put

    run(scenario())
