"""One stream between link and call: it holds so much, is parked when more comes, and its reader is given up in time."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from blockplane.control_plane.frontend.token_stream import News, Reader, TokenStream
from blockplane.protos.logprobs import Logprobs

LIMIT = 40


class Parking:
    """A stream of that limit and what it asked the engine for."""

    def __init__(self, parked_seconds: float = 1.0) -> None:
        self.reader = Reader(parked_seconds)
        self.asked: list[tuple[int, bool]] = []
        self.stream = self.another(7)

    def another(self, stream_id: int) -> TokenStream:
        return TokenStream(stream_id, self.reader, LIMIT, lambda *change: self.asked.append(change))


def in_call(test: Callable[[Parking], Awaitable[None]]) -> Callable[[], None]:
    """Runs a test inside its reader, as a call does."""

    def run() -> None:
        async def main() -> None:
            parking = Parking()
            async with parking.reader:
                await test(parking)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def told(num_tokens: int, num_entries: int) -> Logprobs:
    total = num_tokens * num_entries
    return Logprobs(np.full(num_tokens, num_entries, np.int32), np.zeros(total, np.int32), np.zeros(total, np.float32))


@in_call
async def test_more_that_comes_on_a_full_stream_parks_it_once(parking: Parking) -> None:
    stream = parking.stream
    for expected in ([], [], [(7, True)], [(7, True)]):
        stream.put([1] * 30)
        assert parking.asked == expected


@in_call
async def test_whoever_takes_in_time_is_never_parked_however_much_comes_at_once(parking: Parking) -> None:
    for _ in range(3):
        parking.stream.put([1] * 10 * LIMIT)
        while parking.stream.take().token_ids:
            pass
    assert parking.asked == []


@in_call
async def test_it_is_unparked_once_it_is_emptied_below_a_quarter_and_tells_all_in_order(parking: Parking) -> None:
    stream, taken, held = parking.stream, list[int](), []
    for first in range(0, 60, 5):
        stream.put(list(range(first, first + 5)))
    assert (parking.asked, stream.num_held) == ([(7, True)], 60)
    while (7, False) not in parking.asked:
        assert stream.is_parked
        parking.reader.filled.clear()
        taken += stream.take().token_ids
        held.append(stream.num_held)
        assert parking.reader.filled.is_set() == (stream.num_held > 0)
    assert held == [45, 30, 15, 0], "a little more than a quarter at a time"
    assert taken == list(range(60))


@in_call
async def test_log_probabilities_count_too_and_come_with_their_own_tokens(parking: Parking) -> None:
    stream = parking.stream
    stream.put_prompt_logprobs(told(2, 10))
    stream.put([1, 2], told(2, 10))
    assert (stream.num_held, stream.is_parked) == (42, False)
    stream.put([3], told(1, 10))
    assert stream.is_parked
    news = [stream.take() for _ in range(3)]
    assert [len(item.token_ids) for item in news] == [0, 2, 1]
    assert [item.logprobs and len(item.logprobs.num_entries) for item in news] == [None, 2, 1]
    assert [item.prompt_logprobs and len(item.prompt_logprobs.num_entries) for item in news] == [2, None, None]
    assert not stream.is_parked


@in_call
async def test_the_end_is_told_with_the_last_of_what_was_held_and_the_engine_asked_no_more(parking: Parking) -> None:
    stream = parking.stream
    for _ in range(3):
        stream.put([1] * 30)
    stream.end("length")
    assert [stream.take() for _ in range(3)] == [News([1] * 30, None), News([1] * 30, None), News([1] * 30, "length")]
    assert parking.asked == [(7, True)]


@in_call
async def test_samples_are_parked_each_for_itself(parking: Parking) -> None:
    other = parking.another(8)
    for _ in range(3):
        parking.stream.put([1] * 30)
        other.put([1])
    assert (parking.stream.is_parked, other.is_parked) == (True, False)


# -- patience ----------------------------------------------------------------------------------------------------------


def test_a_reader_is_given_up_after_its_time_in_whatever_it_waits_for() -> None:
    async def main() -> None:
        parking = Parking(parked_seconds=0.05)

        async def read() -> None:
            async with parking.reader:
                for _ in range(3):
                    parking.stream.put([1] * 30)
                await asyncio.sleep(10)

        with pytest.raises(TimeoutError):
            await read()

    asyncio.run(main())


def test_a_reader_that_reads_again_in_time_is_not_given_up() -> None:
    async def main() -> None:
        parking = Parking(parked_seconds=0.05)
        async with parking.reader:
            for _ in range(3):
                parking.stream.put([1] * 30)
            while parking.stream.is_parked:
                parking.stream.take()
            await asyncio.sleep(0.1)

    asyncio.run(main())


def test_one_parked_stream_that_is_read_again_gives_the_others_their_time_anew() -> None:
    async def main() -> None:
        parking = Parking(parked_seconds=0.1)
        other = parking.another(8)
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def read() -> None:
            async with parking.reader:
                for _ in range(3):
                    parking.stream.put([1] * 30)
                    other.put([1] * 30)
                await asyncio.sleep(0.07)
                while other.is_parked:
                    other.take()
                await asyncio.sleep(10)

        with pytest.raises(TimeoutError):
            await read()
        assert 0.16 <= loop.time() - start < 5

    asyncio.run(main())


@in_call
async def test_a_second_stream_that_is_parked_gives_the_first_no_time_anew(parking: Parking) -> None:
    given_up_at = []
    for stream in (parking.stream, parking.another(8)):
        for _ in range(3):
            stream.put([1] * 30)
        given_up_at.append(parking.reader._patience.when())
        await asyncio.sleep(0.01)
    assert given_up_at[0] is not None
    assert given_up_at[0] == given_up_at[1]
