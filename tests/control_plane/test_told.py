"""What the scheduler passes on of log-probabilities: each token's own, a prompt's once, nothing of what is dropped."""

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from driving import EOS, answer, make_request, make_scheduler, plan_step, run, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from told import Entries, columns_of, lists_of

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import StepPlan, StepResult


def telling(
    scheduler: Scheduler, plan: StepPlan, token_ids: Sequence[int], num_tokens: Sequence[int] | None = None
) -> StepResult:
    """An answer as a worker gives it: a token that is asked about has an entry, a prompt's one at its position."""
    (of_plan,) = (step for step in scheduler._in_flight if step.step == plan.step)
    result = answer(scheduler, plan, num_tokens=num_tokens)
    counts = [*(num_tokens or ()), *[1] * (len(of_plan.sampled.requests) - len(num_tokens or ()))]
    requests = np.repeat(np.array(of_plan.sampled.requests, object), counts)
    told = [
        [(token_id, -token_id / 8)] if token_id >= 0 and request.params.logprobs is not None else []
        for token_id, request in zip(token_ids, requests, strict=True)
    ]
    prompts = [
        [(int(segment.request.token_ids[position]), -float(position))]
        for segment in of_plan.prefills
        for position in range(segment.start + 1, segment.stop + 1)
        if position < segment.request.num_prompt_tokens and segment.request.params.prompt_logprobs is not None
    ]
    return replace(
        result,
        token_ids=np.array(token_ids, np.int32),
        logprobs=columns_of(told) if any(told) else None,
        prompt_logprobs=columns_of(prompts) if prompts else None,
    )


def told_of(outputs: StepOutputs, request: Request) -> list[Entries]:
    """What a step's tokens of one request come with."""
    own = np.flatnonzero(outputs.stream_ids == request.stream_id)
    return [] if outputs.logprobs is None else lists_of(outputs.logprobs.take(own))


def prompt_positions(outputs: StepOutputs, request: Request) -> list[int]:
    """The positions of a prompt's tokens of which a step tells, by the entries that `telling` makes."""
    parts = [lists_of(told) for told_request, told in outputs.told_prompts if told_request is request]
    return [-int(logprob) for part in parts for ((_, logprob),) in part]


def in_full(token_ids: Sequence[int]) -> list[Entries]:
    return [[(token_id, -token_id / 8)] for token_id in token_ids]


def asking(name: str, num_prompt_tokens: int, max_tokens: int = 8, first: int = 1, **params: int) -> Request:
    return make_request(name, num_prompt_tokens, max_tokens, first, params=params)


# -- new tokens --------------------------------------------------------------------------------------------------------


def test_every_token_of_who_asks_comes_with_its_entries_and_those_of_others_with_none() -> None:
    """Also in steps that repeat the one before."""
    scheduler, asks, other = make_scheduler(block_size=64), asking("asks", 3, logprobs=1), make_request("b", 4)
    scheduler.add([asks, other])
    for step in range(6):
        plan = plan_step(scheduler)
        outputs = scheduler.update(telling(scheduler, plan, (10 + step, 20 + step)))
        assert told_of(outputs, asks) == in_full([10 + step])
        assert told_of(outputs, other) == [[]]


def test_answers_of_which_nothing_is_told_stay_steady_and_told_ones_between_them_are_not_lost() -> None:
    scheduler, asks = make_scheduler(block_size=64), asking("asks", 3, 30, logprobs=0)
    scheduler.add([asks])
    for step in range(12):
        plan = plan_step(scheduler)
        result = telling(scheduler, plan, [10 + step])
        outputs = scheduler.update(result if step % 3 == 0 else replace(result, logprobs=None))
        assert tokens(outputs, asks) == [10 + step]
        assert told_of(outputs, asks) == (in_full([10 + step]) if step % 3 == 0 else [])
    scheduler.end(asks)
    assert asks.token_ids.tolist() == [1, 2, 3, *range(10, 22)]


def test_what_comes_after_an_end_is_dropped_with_its_logprobs() -> None:
    scheduler = make_scheduler(configure={"num_draft_tokens": 3}, block_size=64)
    first, second = asking("a", 3, logprobs=0), asking("b", 5, first=50, logprobs=0)
    scheduler.add([first, second])
    scheduler.update(telling(scheduler, plan_step(scheduler), (30, 40)))
    outputs = scheduler.update(telling(scheduler, plan_step(scheduler), (31, EOS, 32, 33, 41, 42, 43), (4, 3)))
    assert told_of(outputs, first) == in_full([31, EOS])
    assert told_of(outputs, second) == in_full([41, 42, 43])


def test_a_failed_row_s_mates_keep_their_own() -> None:
    scheduler, failed, mate = make_scheduler(), asking("a", 3, logprobs=0), asking("b", 5, first=50, logprobs=0)
    scheduler.add([failed, mate])
    outputs = scheduler.update(telling(scheduler, plan_step(scheduler), (-1, 40)))
    assert (told_of(outputs, failed), told_of(outputs, mate)) == ([], in_full([40]))


def test_an_entry_that_the_model_has_no_id_for_is_a_protocol_error() -> None:
    scheduler = make_scheduler()
    scheduler.add([asking("a", 3, logprobs=0)])
    plan = plan_step(scheduler)
    with pytest.raises(ProtocolError, match="its model does not have"):
        scheduler.update(replace(telling(scheduler, plan, [5]), logprobs=columns_of([[(5, -1.0), (50_000, -2.0)]])))


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_prompt_in_segments_is_told_in_order_from_its_second_token_on(ahead: int) -> None:
    scheduler, request = make_scheduler(tokens=(8,)), asking("a", 20, max_tokens=3, prompt_logprobs=0)
    scheduler.add([request])
    unanswered: deque[StepPlan] = deque()
    positions = []
    while not request.ended:
        while len(unanswered) < ahead and (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
        outputs = scheduler.update(telling(scheduler, unanswered[0], [7] * num_sampled(scheduler)))
        unanswered.popleft()
        positions.append(prompt_positions(outputs, request))
    assert positions == [[*range(1, 9)], [*range(9, 17)], [*range(17, 20)], [], []]


def num_sampled(scheduler: Scheduler) -> int:
    """By the oldest plan that is unanswered."""
    return len(scheduler._in_flight[0].sampled.requests)


def test_a_prompt_that_is_told_of_starts_from_no_hit_and_waits_for_nobody() -> None:
    scheduler = make_scheduler(tokens=(32,))
    run(scheduler, make_request("before", 13, max_tokens=1))
    requests = asking("a", 13, prompt_logprobs=0), asking("b", 13, prompt_logprobs=0)
    scheduler.add(requests)
    plan = plan_step(scheduler)
    assert [admission.num_computed_tokens for admission in plan.admissions] == [0, 0]
    assert plan.prefill_num_tokens.tolist() == [13, 13]
    outputs = scheduler.update(telling(scheduler, plan, (7, 7)))
    assert [prompt_positions(outputs, request) for request in requests] == [[*range(1, 13)]] * 2


def test_a_prompt_that_was_told_of_is_a_hit_for_others() -> None:
    scheduler = make_scheduler(tokens=(32,))
    scheduler.add([asking("told", 13, max_tokens=1, prompt_logprobs=0)])
    scheduler.update(telling(scheduler, plan_step(scheduler), [7]))
    scheduler.add([make_request("after", 13)])
    assert [admission.num_computed_tokens for admission in plan_step(scheduler).admissions] == [12]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_prompt_that_lost_its_row_midway_is_told_once(ahead: int) -> None:
    """Two decodes grow into the blocks that its later segments need, and then take those that it has."""
    scheduler = make_scheduler(usable_blocks=15, block_size=4, tokens=(4,))
    olds = [make_request(str(first), 3, max_tokens=24, first=first) for first in (1000, 2000)]
    scheduler.add(olds)
    for _ in range(2):
        scheduler.update(answer(scheduler, plan_step(scheduler)))
    request = asking("long", 40, max_tokens=2, prompt_logprobs=0)
    scheduler.add([request])
    positions, num_computed = [], 0
    unanswered: deque[StepPlan] = deque()
    while not request.ended:
        while len(unanswered) < ahead and (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
            num_computed += int(plan.prefill_num_tokens.sum())
        outputs = scheduler.update(telling(scheduler, unanswered.popleft(), [7] * num_sampled(scheduler)))
        positions += prompt_positions(outputs, request)
    assert scheduler.statistics().num_preemptions == 1
    assert num_computed >= 60, "what was told of is computed anew all the same"
    assert positions == [*range(1, 40)]


def test_the_next_worker_group_tells_what_the_lost_one_did_not() -> None:
    """Though its segments are others."""
    lost, following = make_scheduler(tokens=(8,)), make_scheduler(tokens=(64,))
    request = asking("a", 20, prompt_logprobs=0)
    lost.add([request])
    outputs = lost.update(telling(lost, plan_step(lost), []))
    assert prompt_positions(outputs, request) == [*range(1, 9)]
    plan_step(lost)
    (left,) = lost.unfinished()
    following.resume(left)
    outputs = following.update(telling(following, plan_step(following), [7]))
    assert prompt_positions(outputs, request) == [*range(9, 20)]


def test_a_prompt_of_an_ended_request_is_told_no_more() -> None:
    scheduler, request, mate = make_scheduler(), asking("a", 8, prompt_logprobs=0), asking("b", 5, prompt_logprobs=0)
    scheduler.add([request, mate])
    plan = plan_step(scheduler)
    result = telling(scheduler, plan, (7, 8))
    scheduler.end(request)
    outputs = scheduler.update(result)
    assert [told_request for told_request, _ in outputs.told_prompts] == [mate]
    assert prompt_positions(outputs, mate) == [1, 2, 3, 4]


def test_a_prompt_s_only_token_follows_none_and_is_not_told() -> None:
    scheduler, request = make_scheduler(), asking("a", 1, prompt_logprobs=0)
    scheduler.add([request])
    outputs = scheduler.update(telling(scheduler, plan_step(scheduler), [7]))
    assert (tokens(outputs, request), outputs.told_prompts) == ([7], ())


@pytest.mark.parametrize("told", [None, [], [[(2, -1.0)]], [[(2, -1.0)]] * 3])
def test_an_answer_that_tells_of_other_prompt_tokens_than_asked_changes_nothing(told: list[Entries] | None) -> None:
    scheduler, request = make_scheduler(), asking("a", 3, prompt_logprobs=0)
    scheduler.add([request])
    result = telling(scheduler, plan_step(scheduler), [7])
    with pytest.raises(ProtocolError, match="tell of 2 prompt tokens"):
        scheduler.update(replace(result, prompt_logprobs=None if told is None else columns_of(told)))
    assert prompt_positions(scheduler.update(result), request) == [1, 2]


def test_a_step_that_repeats_the_one_before_tells_of_no_prompt() -> None:
    scheduler, request = make_scheduler(block_size=64), make_request("a", 3)
    scheduler.add([request])
    for _ in range(3):
        scheduler.update(answer(scheduler, plan_step(scheduler)))
    result = answer(scheduler, plan_step(scheduler))
    with pytest.raises(ProtocolError, match="tell of 0 prompt tokens; got 1"):
        scheduler.update(replace(result, prompt_logprobs=columns_of([[(1, -1.0)]])))


# -- all together ------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), num_draft_tokens=st.sampled_from([0, 2]))
def test_whatever_happens_every_token_has_its_own_entries_and_every_prompt_is_told_once(
    seed: int, num_draft_tokens: int
) -> None:
    """Few blocks, so that rows are lost; two plans unanswered, so that answers are late; aborts; ends at any token."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        usable_blocks=10, block_size=4, tokens=(8,), seqs=(4,), configure={"num_draft_tokens": num_draft_tokens}
    )
    requests = [
        make_request(
            str(index),
            rng.randint(1, 16),
            max_tokens=rng.randint(1, 12),
            params={"logprobs": rng.choice([None, 0]), "prompt_logprobs": rng.choice([None, 0])},
        )
        for index in range(6)
    ]
    scheduler.add(requests)
    texts: dict[str, list[int]] = defaultdict(list)
    told: dict[str, list[Entries]] = defaultdict(list)
    positions: dict[str, list[int]] = defaultdict(list)
    unanswered: deque[StepPlan] = deque()
    while unanswered or not all(request.ended for request in requests):
        while len(unanswered) < rng.choice([1, 2]) and (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
        if rng.random() < 0.02:
            alive = [request for request in requests if not request.ended]
            for request in alive[:1]:
                scheduler.end(request)
        if not unanswered:
            continue
        outputs = scheduler.update(random_answer(scheduler, unanswered.popleft(), rng))
        for request in requests:
            texts[request.request_id] += tokens(outputs, request)
            told[request.request_id] += told_of(outputs, request)
            positions[request.request_id] += prompt_positions(outputs, request)
    for request in requests:
        text, name = texts[request.request_id], request.request_id
        assert [entries for entries in told[name] if entries] == (
            [] if request.params.logprobs is None else in_full(text)
        )
        assert positions[name] == [*range(1, 1 + len(positions[name]))]
        if text:
            asks = request.params.prompt_logprobs is not None
            assert len(positions[name]) == (request.num_prompt_tokens - 1 if asks else 0)


def random_answer(scheduler: Scheduler, plan: StepPlan, rng: random.Random) -> StepResult:
    of_plan = scheduler._in_flight[0]
    granted = [] if of_plan.num_granted is None else of_plan.num_granted.tolist()
    counts = [rng.randint(1, most) for most in granted]
    num_tokens = sum(counts) + len(of_plan.sampled.requests) - len(counts)
    token_ids = [rng.choice([EOS, *range(1000, 1100)]) for _ in range(num_tokens)]
    return telling(scheduler, plan, token_ids, counts if granted else None)
