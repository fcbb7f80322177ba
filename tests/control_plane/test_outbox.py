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


def put_tokens(outbox: Outbox, *tokens: tuple[int, int]) -> None:
    """Put one step's tokens, each beside its stream."""
    columns = np.array(tokens, np.int32).reshape(-1, 2).T
    outbox.put_tokens(columns[0], columns[1])


def tokens_of(delivery: Delivery | None) -> dict[int, list[int]]:
    assert delivery is not None
    parts = np.split(delivery.token_ids, np.cumsum(delivery.num_tokens)[:-1])
    return {stream: part.tolist() for stream, part in zip(delivery.stream_ids.tolist(), parts, strict=True)}


def test_what_was_put_is_seen_only_once_it_is_flushed() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        assert await taken(outbox) is None
        put_tokens(outbox, (1, 10))
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
        put_tokens(outbox, (3, 30))
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
            put_tokens(outbox, (1, 10))
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


def test_a_lone_step_of_one_token_each_is_delivered_as_it_is() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        first, second = np.array([7, 5], np.int32), np.array([1, 2], np.int32)
        outbox.put_tokens(first, second, one_each=True)
        outbox.flush()
        delivery = await taken(outbox)
        assert delivery is not None
        assert (delivery.stream_ids.tolist(), delivery.num_tokens, delivery.token_ids.tolist()) == (
            [7, 5],
            None,
            [1, 2],
        )
        # Of two steps no longer one each, though each step says so.
        for _ in range(2):
            outbox.put_tokens(first, second, one_each=True)
        delivery = outbox.empty()
        assert delivery.num_tokens is not None
        assert (delivery.num_tokens.tolist(), delivery.token_ids.tolist()) == ([2, 2], [2, 2, 1, 1])

    run(scenario())


def test_several_tokens_of_a_stream_are_delivered_together() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        put_tokens(outbox, (7, 1), (7, 2), (5, 3), (9, 4), (9, 5), (9, 6))
        outbox.flush()
        delivery = await taken(outbox)
        assert delivery is not None
        columns = (delivery.stream_ids, delivery.num_tokens, delivery.token_ids)
        assert [column.tolist() for column in columns] == [[5, 7, 9], [1, 2, 3], [3, 1, 2, 4, 5, 6]]
        assert {column.dtype for column in columns} == {np.dtype(np.int32)}

    run(scenario())


def test_several_steps_coalesce_into_one_delivery_with_one_entry_for_each_stream() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        for tokens in ([(7, 1), (5, 2)], [(7, 3), (9, 4), (5, 5)]):
            put_tokens(outbox, *tokens)
            outbox.flush()
        delivery = await taken(outbox)
        assert delivery is not None
        assert sorted(delivery.stream_ids.tolist()) == [5, 7, 9]
        assert tokens_of(delivery) == {5: [2, 5], 7: [1, 3], 9: [4]}
        columns = (delivery.stream_ids, delivery.num_tokens, delivery.token_ids)
        assert {column.dtype for column in columns} == {np.dtype(np.int32)}
        assert await taken(outbox) is None

    run(scenario())


def test_a_step_without_tokens_is_no_delivery() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        put_tokens(outbox)
        outbox.flush()
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
        put_tokens(outbox, (1, 10))
        outbox.flush()
        outbox.close(ProtocolError("broken."))
        for _ in range(2):
            with pytest.raises(ProtocolError, match=r"broken\."):
                await asyncio.wait_for(outbox.take(), 5)
        put_tokens(outbox, (1, 11))
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


step_tokens = st.dictionaries(st.integers(0, 3), st.lists(st.integers(-1, 99), min_size=1, max_size=3)).map(
    lambda by_stream: [(stream_id, token_id) for stream_id, ids in by_stream.items() for token_id in ids]
)
operations = st.lists(st.sampled_from(["flush", "take"]) | step_tokens, max_size=40)


@given(operations=operations)
def test_every_stream_gets_its_tokens_once_and_in_order_however_slow_the_taker(operations: list[Any]) -> None:
    async def scenario() -> None:
        outbox = Outbox()
        put: dict[int, list[int]] = {}
        got: dict[int, list[int]] = {}
        for operation in [*operations, "flush", "take"]:
            if operation == "flush":
                outbox.flush()
            elif operation == "take":
                delivery = await taken(outbox)
                if delivery is not None:
                    assert len(set(delivery.stream_ids.tolist())) == len(delivery.stream_ids) > 0
                    assert (delivery.num_tokens > 0).all()
                    for stream_id, token_ids in tokens_of(delivery).items():
                        got[stream_id] = got.get(stream_id, []) + token_ids
            else:
                put_tokens(outbox, *operation)
                for stream_id, token_id in operation:
                    put.setdefault(stream_id, []).append(token_id)
        assert got == put

    run(scenario())
