"""The link to the engine, against an engine that does as the test says: submissions, tokens, ends, and lost engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_engine import SECONDS, Linked

from blockplane.control_plane.frontend.engine_link import TokenStream
from blockplane.protos.delivery import Ending, FrontendBatch, Submission
from blockplane.protos.errors import AbortedError, BlockplaneError, ProtocolError, UnavailableError
from blockplane.protos.sampling import SamplingParams

PROMPT = np.array([4, 5], np.int32)
PARAMS = SamplingParams(max_tokens=3)


def request(request_id: str) -> Submission:
    return Submission(0, request_id, PROMPT, PARAMS, priority=-3, timeout_seconds=1.5, skip_prefix_cache=True)


# -- one stream --------------------------------------------------------------------------------------------------------


async def _take_all(stream: TokenStream) -> list[Any]:
    taken: list[Any] = []
    try:
        while not taken or taken[-1][1] is None:
            taken.append(await asyncio.wait_for(stream.take(), SECONDS))
    except BlockplaneError as error:
        taken.append(error)
    return taken


def test_tokens_that_wait_come_together_and_the_reason_comes_with_the_last() -> None:
    async def scenario() -> None:
        stream = TokenStream()
        stream.put([1, 2])
        stream.put([3])
        assert await stream.take() == ([1, 2, 3], None)
        stream.put([4])
        stream.end("length")
        assert stream.has_ended
        assert await _take_all(stream) == [([4], "length")]

    asyncio.run(scenario())


def test_an_end_without_tokens_is_told() -> None:
    async def scenario() -> None:
        stream = TokenStream()
        assert not stream.has_ended
        stream.end("stop")
        assert await _take_all(stream) == [([], "stop")]

    asyncio.run(scenario())


def test_an_error_is_raised_only_once_all_tokens_are_taken() -> None:
    async def scenario() -> None:
        stream, error = TokenStream(), AbortedError("ended.")
        stream.put([1, 2])
        stream.end(error)
        assert await _take_all(stream) == [([1, 2], None), error]

    asyncio.run(scenario())


def test_a_taker_waits_for_news() -> None:
    async def scenario() -> None:
        stream = TokenStream()
        task = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        assert not task.done()
        stream.put([9])
        assert await asyncio.wait_for(task, SECONDS) == ([9], None)

    asyncio.run(scenario())


# -- the link ----------------------------------------------------------------------------------------------------------


Scenario = Callable[[Linked], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    """Plays a scenario with a link that runs and an engine that listens."""

    async def main(scenario: Scenario) -> None:
        linked = Linked(tmp_path)
        await linked.listen()
        try:
            await scenario(linked)
        finally:
            await linked.stop()

    return lambda scenario: asyncio.run(main(scenario))


def test_nothing_can_be_submitted_before_the_engine_has_said_what_it_serves(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.engine.next_batch()
        with pytest.raises(UnavailableError):
            linked.link.open(request("a"))

    play(scenario)


def test_each_stream_gets_its_own_tokens_and_its_end(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        (first_id, first), (second_id, second) = (linked.link.open(request(name)) for name in "ab")
        batch = await linked.engine.next_batch()
        assert [(item.stream_id, item.request_id) for item in batch.submissions] == [(first_id, "a"), (second_id, "b")]
        assert [item.prompt_token_ids.tolist() for item in batch.submissions] == [[4, 5], [4, 5]]
        submission = replace(batch.submissions[0], stream_id=0, prompt_token_ids=PROMPT)
        assert submission == request("a"), "all but the stream's id is as it was asked"
        linked.deliver({second_id: [7], 999: [8, 9], first_id: [1, 2]}, Ending(999, "stop"), Ending(first_id, "stop"))
        assert await _take_all(first) == [([1, 2], "stop")]
        assert await asyncio.wait_for(second.take(), SECONDS) == ([7], None)

    play(scenario)


def test_closing_aborts_a_stream_that_has_not_ended_and_only_such(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        (first_id, first), (second_id, _) = (linked.link.open(request(name)) for name in "ab")
        await linked.engine.next_batch()
        linked.deliver({}, Ending(first_id, "stop"))
        await _take_all(first)
        for stream_id in (first_id, second_id, second_id, 999):
            linked.link.close(stream_id)
        linked.link.abort(["c", "d"])
        batch = await linked.engine.next_batch()
        assert batch == FrontendBatch(aborted_stream_ids=(second_id,), aborted_request_ids=("c", "d"))

    play(scenario)


def test_stopping_waits_for_the_end_that_the_engine_tells_and_aborts_once(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        stream_id, stream = linked.link.open(request("a"))
        await linked.engine.next_batch()
        linked.deliver({stream_id: [7]})
        await asyncio.wait_for(stream.take(), SECONDS)
        stopping = asyncio.create_task(linked.link.stop(stream_id))
        assert await linked.engine.next_batch() == FrontendBatch(aborted_stream_ids=(stream_id,))
        linked.deliver({stream_id: [8]})
        await asyncio.sleep(0.05)
        assert not stopping.done(), "a late token is no end"
        linked.deliver({}, Ending(stream_id, AbortedError("ended."), num_cached_tokens=2))
        await asyncio.wait_for(stopping, SECONDS)
        assert stream.num_cached_tokens == 2
        linked.link.close(stream_id)
        linked.link.abort(["c"])
        assert await linked.engine.next_batch() == FrontendBatch(aborted_request_ids=("c",))

    play(scenario)


def test_stopping_a_stream_that_has_ended_aborts_nothing(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        stream_id, stream = linked.link.open(request("a"))
        await linked.engine.next_batch()
        linked.deliver({}, Ending(stream_id, "length"))
        await _take_all(stream)
        await asyncio.wait_for(linked.link.stop(stream_id), SECONDS)
        linked.link.abort(["c"])
        assert await linked.engine.next_batch() == FrontendBatch(aborted_request_ids=("c",))

    play(scenario)


def test_stopping_ends_with_a_lost_engine(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        stream_id, _ = linked.link.open(request("a"))
        await linked.engine.next_batch()
        stopping = asyncio.create_task(linked.link.stop(stream_id))
        await linked.engine.next_batch()
        linked.engine.to_send.put_nowait(None)
        await asyncio.wait_for(stopping, SECONDS)

    play(scenario)


def test_a_lost_engine_ends_open_streams_and_is_dialed_again(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        old_id, old = linked.link.open(request("a"))
        await linked.engine.next_batch()
        linked.deliver({old_id: [1]})
        assert await asyncio.wait_for(old.take(), SECONDS) == ([1], None)
        await linked.server.stop(0)
        assert isinstance((await _take_all(old))[-1], UnavailableError)
        assert await linked.next_model() is None
        with pytest.raises(UnavailableError):
            linked.link.open(request("b"))
        linked.link.close(old_id)
        await linked.listen()
        await linked.attach()
        new_id, new = linked.link.open(request("a"))
        assert new_id != old_id
        assert [item.stream_id for item in (await linked.engine.next_batch()).submissions] == [new_id]
        linked.deliver({old_id: [6], new_id: [5]}, Ending(new_id, "length"))
        assert await _take_all(new) == [([5], "length")]

    play(scenario)


def test_a_stream_that_the_engine_closes_orderly_is_a_lost_engine_too(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        linked.engine.to_send.put_nowait(None)
        assert await linked.next_model() is None
        await linked.attach()

    play(scenario)


def test_an_engine_that_refuses_for_good_ends_the_link_with_its_sentence(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        linked.engine.to_send.put_nowait(ProtocolError("run the same version."))
        with pytest.raises(BlockplaneError, match=r"^run the same version\.$"):
            await asyncio.wait_for(linked.running, SECONDS)
        assert await linked.next_model() is None

    play(scenario)
