"""Log-probabilities from the engine to streams: each with its own tokens, whoever else is delivered to beside them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from engine_driver import Worker, attached, in_loop, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import SECONDS, Linked
from told import Entries, columns_of, lists_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.control_plane.frontend.token_stream import Reader, TokenStream
from blockplane.protos.delivery import Delivery, PromptLogprobs, Submission
from blockplane.protos.plan import Int32Array, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams


def column(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def of_token(token_id: int) -> Entries:
    return [(token_id, -token_id / 8), (token_id + 1, -9.0)]


def told_tokens(delivery: Delivery) -> dict[int, list[Entries]]:
    """By stream, what is told of each of its tokens."""
    if delivery.logprobs is None:
        return {}
    counts = [len(token_ids) for token_ids in tokens_of(delivery).values()]
    return dict(zip(delivery.stream_ids.tolist(), map(lists_of, delivery.logprobs.split(counts)), strict=True))


def told_prompts(delivery: Delivery) -> list[tuple[int, list[Entries]]]:
    return [(told.stream_id, lists_of(told.logprobs)) for told in delivery.prompt_logprobs]


# -- the outbox --------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.booleans(), st.dictionaries(st.integers(0, 3), st.integers(0, 99), min_size=1)), min_size=1, max_size=5
)


@given(steps=steps)
def test_steps_that_wait_coalesce_with_what_is_told_of_each_token(steps: list[tuple[bool, dict[int, int]]]) -> None:
    outbox = Outbox()
    expected: dict[int, list[Entries]] = {}
    for is_told, tokens in steps:
        told = [of_token(token_id) if is_told and stream_id != 3 else [] for stream_id, token_id in tokens.items()]
        columns = column(*tokens), column(*tokens.values())
        outbox.put_tokens(*columns, columns_of(told) if is_told else None, one_each=True)
        for stream_id, entries in zip(tokens, told, strict=True):
            expected.setdefault(stream_id, []).append(entries)
    delivery = outbox.empty()
    if any(any(told) for told in expected.values()):
        assert told_tokens(delivery) == expected
    else:
        assert not any(map(any, told_tokens(delivery).values()))
    assert outbox.empty().logprobs is None


def test_what_is_told_of_prompts_alone_is_worth_a_delivery_and_comes_once_and_in_order() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        parts = [[of_token(1)], [of_token(2), of_token(3)]]
        for part in parts:
            outbox.put_prompt_logprobs(PromptLogprobs(5, columns_of(part)))
        outbox.flush()
        delivery = await asyncio.wait_for(outbox.take(), SECONDS)
        assert told_prompts(delivery) == [(5, part) for part in parts]
        assert outbox.empty().prompt_logprobs == ()

    asyncio.run(scenario())


# -- the engine --------------------------------------------------------------------------------------------------------


def answer(worker: Worker, plan: StepPlan, told: list[Entries], prompts: list[Entries]) -> None:
    token_ids = column(*range(10, 10 + worker.num_decodes + len(plan.prefill_rows)))
    epoch = worker.group.configure.epoch
    result = StepResult(plan.step, token_ids, logprobs=columns_of(told) if told else None, epoch=epoch)
    worker.engine.take_result(worker.group, replace(result, prompt_logprobs=columns_of(prompts) if prompts else None))
    worker.engine.flush()


def submission(stream_id: int, request_id: str, **params: Any) -> Submission:
    return Submission(stream_id, request_id, column(1, 2, 3), SamplingParams(5, **params))


@in_loop
async def test_each_frontend_is_told_of_its_own_streams(engine: Engine) -> None:
    worker = Worker(engine)
    first, second = await attached(engine), await attached(engine)
    first.send(submissions=(submission(1, "a", logprobs=1), submission(2, "b")))
    second.send(submissions=(submission(1, "c", logprobs=1, prompt_logprobs=1),))
    plan = worker.plan()
    assert plan is not None
    answer(worker, plan, [of_token(10), [], of_token(12)], [of_token(2), of_token(3)])
    to_first, to_second = await first.take(), await second.take()
    assert (told_tokens(to_first), told_prompts(to_first)) == ({1: [of_token(10)], 2: [[]]}, [])
    assert told_tokens(to_second) == {1: [of_token(12)]}
    assert told_prompts(to_second) == [(1, [of_token(2), of_token(3)])]


@in_loop
async def test_of_several_samples_the_first_tells_of_the_prompt_and_all_of_their_tokens(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.send(submissions=(replace(submission(1, "a", logprobs=1, prompt_logprobs=2), num_samples=3),))
    plan = worker.plan()
    assert plan is not None
    asked = [admission.params for admission in plan.admissions]
    assert [(params.logprobs, params.prompt_logprobs) for params in asked] == [(1, 2), (1, None), (1, None)]
    answer(worker, plan, [of_token(10), of_token(11), of_token(12)], [of_token(2), of_token(3)])
    delivery = await frontend.take()
    assert told_tokens(delivery) == {1: [of_token(10)], 2: [of_token(11)], 3: [of_token(12)]}
    assert told_prompts(delivery) == [(1, [of_token(2), of_token(3)])]


@in_loop
async def test_a_stream_that_ended_is_told_of_no_prompt(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.send(submissions=(submission(1, "a", prompt_logprobs=1),))
    plan = worker.plan()
    assert plan is not None
    frontend.send(aborted_stream_ids=(1,))
    answer(worker, plan, [], [of_token(2), of_token(3)])
    delivery = await frontend.take()
    assert (told_prompts(delivery), len(delivery.endings)) == ([], 1)


# -- the frontend ------------------------------------------------------------------------------------------------------


def test_a_stream_s_tokens_that_wait_come_with_all_that_is_told_of_them() -> None:
    reader = Reader(parked_seconds=1)
    stream = TokenStream(0, reader, limit=100)
    stream.put_prompt_logprobs(columns_of([of_token(4)]))
    assert reader.filled.is_set()
    stream.put([1], columns_of([of_token(1)]))
    stream.put([2, 3], columns_of([of_token(2), of_token(3)]))
    stream.put_prompt_logprobs(columns_of([of_token(5)]))
    news = stream.take()
    assert lists_of(news.logprobs) == [of_token(1), of_token(2), of_token(3)]
    assert lists_of(news.prompt_logprobs) == [of_token(4), of_token(5)]
    assert (stream.take().logprobs, stream.take().prompt_logprobs) == (None, None)


def test_the_link_gives_each_stream_its_own_and_nothing_to_one_that_asks_for_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        linked = Linked(tmp_path)
        try:
            await linked.listen()
            await linked.attach()
            reader = Reader(parked_seconds=1)
            asks, other = (linked.link.open(submission(0, name), reader)[0] for name in "ab")
            told = [[], [], of_token(7), of_token(8)]
            linked.engine.to_send.put_nowait(
                Delivery(
                    stream_ids=column(other.stream_id, 999, asks.stream_id),
                    num_tokens=column(1, 1, 2),
                    token_ids=column(5, 6, 7, 8),
                    logprobs=columns_of(told),
                    prompt_logprobs=tuple(
                        PromptLogprobs(stream_id, columns_of([of_token(9)])) for stream_id in (999, asks.stream_id)
                    ),
                )
            )
            await asyncio.wait_for(reader.filled.wait(), SECONDS)
            news = asks.take()
            assert (news.token_ids, lists_of(news.logprobs)) == ([7, 8], [of_token(7), of_token(8)])
            assert lists_of(news.prompt_logprobs) == [of_token(9)]
            of_other = other.take()
            assert (of_other.token_ids, of_other.logprobs, of_other.prompt_logprobs) == ([5], None, None)
        finally:
            await linked.stop()

    asyncio.run(scenario())
