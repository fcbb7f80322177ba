"""The link to the engine, against an engine that does as the test says: submissions, tokens, ends, and lost engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_engine import SECONDS, Linked

from blockplane.control_plane.frontend.token_stream import News, Reader, TokenStream
from blockplane.protos.delivery import Ending, FrontendBatch, Submission
from blockplane.protos.errors import AbortedError, BlockplaneError, ProtocolError, UnavailableError
from blockplane.protos.sampling import SamplingParams

PROMPT = np.array([4, 5], np.int32)
PARAMS = SamplingParams(max_tokens=3)


def request(request_id: str) -> Submission:
    return Submission(0, request_id, PROMPT, PARAMS, priority=-3, timeout_seconds=1.5, skip_prefix_cache=True)


# -- one stream --------------------------------------------------------------------------------------------------------


def test_tokens_that_wait_come_together_and_the_reason_comes_with_the_last() -> None:
    stream = TokenStream(0, Reader(1), limit=100)
    stream.put([1, 2])
    stream.put([3])
    assert stream.take() == News([1, 2, 3], None)
    assert not stream.has_ended
    stream.put([4])
    stream.end("length", 2)
    assert stream.has_ended
    assert (stream.take(), stream.num_cached_tokens) == (News([4], "length"), 2)


@pytest.mark.parametrize("outcome", ["stop", AbortedError("ended.")])
def test_an_end_without_tokens_is_told(outcome: Any) -> None:
    stream = TokenStream(0, Reader(1), limit=100)
    assert stream.take() == News([], None)
    stream.end(outcome)
    assert stream.take() == News([], outcome)


def test_tokens_and_ends_wake_the_one_that_waits_for_several_streams() -> None:
    reader = Reader(1)
    first, second = (TokenStream(number, reader, limit=100) for number in range(2))
    assert not reader.filled.is_set()
    for change in (partial(second.put, [9]), partial(first.end, "stop")):
        change()
        assert reader.filled.is_set()
        reader.filled.clear()


# -- the link ----------------------------------------------------------------------------------------------------------


class Call:
    """One request's streams, and a wait for what comes on them."""

    def __init__(self, linked: Linked, submission: Submission) -> None:
        self.reader = Reader(parked_seconds=1)
        self.streams = linked.link.open(submission, self.reader)

    @property
    def stream(self) -> TokenStream:
        (stream,) = self.streams
        return stream

    async def next_news(self) -> News:
        """What came on the only stream; all of it once that has ended."""
        await asyncio.wait_for(self.reader.filled.wait(), SECONDS)
        self.reader.filled.clear()
        return self.stream.take()


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
            Call(linked, request("a"))

    play(scenario)


def test_each_stream_gets_its_own_tokens_and_its_end(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        first, second = (Call(linked, request(name)) for name in "ab")
        first_id, second_id = first.stream.stream_id, second.stream.stream_id
        batch = await linked.engine.next_batch()
        assert [(item.stream_id, item.request_id) for item in batch.submissions] == [(first_id, "a"), (second_id, "b")]
        assert [item.prompt_token_ids.tolist() for item in batch.submissions] == [[4, 5], [4, 5]]
        submission = replace(batch.submissions[0], stream_id=0, prompt_token_ids=PROMPT)
        assert submission == request("a"), "all but the stream's id is as it was asked"
        linked.deliver({second_id: [7], 999: [8, 9], first_id: [1, 2]}, Ending(999, "stop"), Ending(first_id, "stop"))
        assert await first.next_news() == News([1, 2], "stop")
        assert await second.next_news() == News([7], None)

    play(scenario)


def test_each_sample_has_a_stream_and_their_ids_follow_each_other(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        samples = Call(linked, replace(request("a"), num_samples=3)).streams
        following = Call(linked, request("b")).stream
        batch = await linked.engine.next_batch()
        assert [(item.stream_id, item.num_samples) for item in batch.submissions] == [
            (samples[0].stream_id, 3),
            (following.stream_id, 1),
        ]
        assert [stream.stream_id - samples[0].stream_id for stream in (*samples, following)] == [0, 1, 2, 3]

    play(scenario)


def test_closing_aborts_a_stream_that_has_not_ended_and_only_such(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        first, second = (Call(linked, request(name)) for name in "ab")
        await linked.engine.next_batch()
        linked.deliver({}, Ending(first.stream.stream_id, "stop"))
        await first.next_news()
        for call in (first, second, second):
            linked.link.close(call.stream)
        linked.link.abort(["c", "d"])
        batch = await linked.engine.next_batch()
        assert batch == FrontendBatch(aborted_stream_ids=(second.stream.stream_id,), aborted_request_ids=("c", "d"))

    play(scenario)


def test_a_stream_that_is_stopped_still_gets_its_end(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        call = Call(linked, request("a"))
        stream = call.stream
        await linked.engine.next_batch()
        linked.link.stop(stream)
        assert await linked.engine.next_batch() == FrontendBatch(aborted_stream_ids=(stream.stream_id,))
        error = AbortedError("ended.")
        linked.deliver({stream.stream_id: [8]}, Ending(stream.stream_id, error, num_cached_tokens=2))
        news = await call.next_news()
        assert (news.token_ids, str(news.outcome), stream.num_cached_tokens) == ([8], "ended.", 2)
        linked.link.stop(stream)
        linked.link.close(stream)
        linked.link.abort(["c"])
        assert await linked.engine.next_batch() == FrontendBatch(aborted_request_ids=("c",)), "aborted once"

    play(scenario)


def test_the_engine_is_asked_to_park_only_what_it_has_not_been_told_to_let_go_on(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        slow, brief = Call(linked, request("a")), Call(linked, request("b"))
        await linked.engine.next_batch()
        async with slow.reader, brief.reader:
            limit = linked.config.stream_buffer_tokens
            for call in (slow, brief):
                for _ in range(3):
                    call.stream.put([1] * limit)
            while brief.stream.is_parked:
                brief.stream.take()
            batch = await linked.engine.next_batch()
            assert (batch.parked_stream_ids, batch.unparked_stream_ids) == ((slow.stream.stream_id,), ())
            while slow.stream.is_parked:
                slow.stream.take()
            batch = await linked.engine.next_batch()
            assert (batch.parked_stream_ids, batch.unparked_stream_ids) == ((), (slow.stream.stream_id,))

    play(scenario)


def test_a_lost_engine_ends_open_streams_and_is_dialed_again(play: Callable[[Scenario], None]) -> None:
    async def scenario(linked: Linked) -> None:
        await linked.attach()
        old = Call(linked, request("a"))
        await linked.engine.next_batch()
        linked.deliver({old.stream.stream_id: [1]})
        assert await old.next_news() == News([1], None)
        await linked.server.stop(0)
        assert isinstance((await old.next_news()).outcome, UnavailableError)
        assert await linked.next_model() is None
        with pytest.raises(UnavailableError):
            Call(linked, request("b"))
        linked.link.close(old.stream)
        await linked.listen()
        await linked.attach()
        new = Call(linked, request("a"))
        new_id = new.stream.stream_id
        assert new_id != old.stream.stream_id
        assert [item.stream_id for item in (await linked.engine.next_batch()).submissions] == [new_id]
        linked.deliver({old.stream.stream_id: [6], new_id: [5]}, Ending(new_id, "length"))
        assert await new.next_news() == News([5], "length")

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
