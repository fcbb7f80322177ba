"""Steps in which nothing but decoding happens: what they cost is little, and what they give is all there."""

from collections import deque

import numpy as np
import pytest
from driving import answer, is_whole, make_request, make_scheduler, outcomes, plan_step, run_step, tokens

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.protos.errors import ModelOutputError, ProtocolError
from blockplane.protos.plan import StepPlan, StepResult


def two_that_decode(ahead: int = 1, **settings: object) -> tuple[Scheduler, list[Request], deque[StepPlan]]:
    """Blocks of 64 tokens, so that no mark is near; all but `ahead` - 1 plans are answered, the last one is steady."""
    scheduler = make_scheduler(block_size=64, tokens=(64,), max_model_len=256, **settings)  # type: ignore[arg-type]
    requests = [make_request(str(first), 3, max_tokens=200, first=first) for first in (100, 200)]
    scheduler.add(requests)
    unanswered: deque[StepPlan] = deque()
    for _ in range(4):
        unanswered.append(plan_step(scheduler))
        if len(unanswered) == ahead:
            scheduler.update(answer(scheduler, unanswered.popleft()))
    return scheduler, requests, unanswered


def step(scheduler: Scheduler, unanswered: deque[StepPlan], *token_ids: int) -> StepPlan:
    """Plan once more and answer the oldest plan."""
    plan = plan_step(scheduler)
    unanswered.append(plan)
    scheduler.update(StepResult(unanswered.popleft().step, np.array(token_ids, np.int32)))
    return plan


def says_nothing(plan: StepPlan) -> bool:
    columns = plan.released_rows, plan.block_rows, plan.block_ids, plan.prefill_rows, plan.prefill_num_tokens
    is_empty = not plan.admissions and not any(column.size for column in columns)
    return is_empty and plan.decode_rows is None and plan.decode_num_tokens is None


def texts(requests: list[Request]) -> list[list[int]]:
    return [request.token_ids[request.num_prompt_tokens :].tolist() for request in requests]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_steady_plan_says_its_number_and_nothing_else(ahead: int) -> None:
    scheduler, _, unanswered = two_that_decode(ahead)
    plans = [step(scheduler, unanswered, 10 + index, 20 + index) for index in range(5)]
    assert [plan.step for plan in plans] == [5, 6, 7, 8, 9]
    assert all(map(says_nothing, plans))


@pytest.mark.parametrize("ahead", [1, 2])
def test_each_rows_tokens_are_its_own_when_the_group_is_lost(ahead: int) -> None:
    scheduler, requests, unanswered = two_that_decode(ahead)
    before = [7] * (5 - ahead)
    for index in range(5):
        step(scheduler, unanswered, 10 + index, 20 + index)
    assert scheduler.unfinished() == requests
    assert texts(requests) == [[*before, 10, 11, 12, 13, 14], [*before, 20, 21, 22, 23, 24]]


def test_an_answer_gives_each_owner_its_token() -> None:
    scheduler, requests, _ = two_that_decode()
    plan = plan_step(scheduler)
    outputs = scheduler.update(StepResult(plan.step, np.array([10, 20], np.int32)))
    assert [tokens(outputs, request) for request in requests] == [[10], [20]]
    assert outputs.one_each
    assert outputs.finished == ()


def test_whoever_reads_the_rows_catches_up_first() -> None:
    scheduler, _, unanswered = two_that_decode()
    step(scheduler, unanswered, 10, 20)
    step(scheduler, unanswered, 11, 21)
    plan = plan_step(scheduler)
    scheduler.catch_up()
    assert scheduler.rows.num_tokens[:2].tolist() == [3 + 6, 3 + 6]
    assert scheduler.rows.num_granted[:2].tolist() == [8 + 1, 8 + 1], "and one that is on its way"
    assert scheduler.rows.token_ids[:2, 7:10].tolist() == [[10, 11, 0], [20, 21, 0]]
    scheduler.update(StepResult(plan.step, np.array([12, 22], np.int32)))
    scheduler.catch_up()
    assert scheduler.rows.token_ids[:2, 7:10].tolist() == [[10, 11, 12], [20, 21, 22]]


def test_one_that_is_aborted_keeps_what_it_had_and_the_other_goes_on() -> None:
    scheduler, (gone, stays), unanswered = two_that_decode(ahead=2)
    step(scheduler, unanswered, 10, 20)
    step(scheduler, unanswered, 11, 21)
    scheduler.end(gone)
    assert texts([gone]) == [[7, 7, 7, 10, 11]]
    outputs = scheduler.update(StepResult(unanswered.popleft().step, np.array([12, 22], np.int32)))
    assert (tokens(outputs, gone), tokens(outputs, stays)) == ([], [22])
    plan = plan_step(scheduler)
    assert plan.decode_rows is not None
    assert (plan.decode_rows.tolist(), plan.released_rows.tolist()) == ([1], [0])
    scheduler.update(StepResult(plan.step, np.array([23], np.int32)))
    assert scheduler.unfinished() == [stays]
    assert texts([stays]) == [[7, 7, 7, 20, 21, 22, 23]]


def test_one_that_comes_is_admitted_by_the_next_plan() -> None:
    scheduler, _, unanswered = two_that_decode()
    step(scheduler, unanswered, 10, 20)
    scheduler.add([make_request("new", 3, first=300)])
    plan = plan_step(scheduler)
    assert [admission.token_ids.tolist() for admission in plan.admissions] == [[300, 301, 302]]
    assert plan.decode_rows is None, "beside it both decode"
    assert len(answer(scheduler, plan).token_ids) == 3


def test_one_that_comes_while_all_rows_are_taken_waits_for_one() -> None:
    scheduler, requests, unanswered = two_that_decode(seqs=(2,))
    scheduler.add([make_request("new", 3, first=300)])
    assert says_nothing(step(scheduler, unanswered, 10, 20))
    scheduler.end(requests[0])
    plan, _ = run_step(scheduler)
    assert (plan.released_rows.tolist(), [admission.row for admission in plan.admissions]) == ([0], [0])


@pytest.mark.parametrize(("token_id", "outcome"), [(99, "stop"), (-1, None)])
def test_an_end_among_steady_steps_is_seen(token_id: int, outcome: str | None) -> None:
    scheduler, (ends, stays), unanswered = two_that_decode()
    step(scheduler, unanswered, 10, 20)
    plan = plan_step(scheduler)
    outputs = scheduler.update(StepResult(plan.step, np.array([token_id, 21], np.int32)))
    (end,) = outputs.finished
    assert end.request is ends
    assert end.outcome == outcome or isinstance(end.outcome, ModelOutputError)
    assert texts([ends]) == [[7] * 4 + [10] + [99] * (outcome == "stop")]
    assert tokens(outputs, stays) == [21]


@pytest.mark.parametrize(
    "result",
    [
        StepResult(7, np.array([10, 20], np.int32)),
        StepResult(6, np.array([10], np.int32)),
        StepResult(6, np.array([10, 20, 30], np.int32)),
        StepResult(6, np.array([10, 50_000], np.int32)),
        StepResult(6, np.array([10, -2], np.int32)),
        StepResult(6, np.array([10, 20], np.int32), np.array([2, 0], np.int32)),
    ],
)
def test_an_answer_that_is_not_the_plans_is_refused_among_steady_steps_and_changes_nothing(result: StepResult) -> None:
    scheduler, requests, unanswered = two_that_decode()
    step(scheduler, unanswered, 10, 20)
    plan_step(scheduler)
    with pytest.raises(ProtocolError):
        scheduler.update(result)
    scheduler.update(StepResult(6, np.array([11, 21], np.int32), np.array([1, 1], np.int32)))
    scheduler.unfinished()
    assert texts(requests) == [[7] * 4 + [10, 11], [7] * 4 + [20, 21]]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_marks_are_reached_at_the_right_step(ahead: int, block_size: int) -> None:
    """Rows of different lengths and limits take a block when they come to its end, and end at their own last token."""
    scheduler = make_scheduler(block_size=block_size, usable_blocks=200, max_model_len=40, tokens=(32,))
    requests = [
        make_request(str(length), length, max_tokens, first=100 * length)
        for length, max_tokens in ((2, 30), (5, 7), (9, 18), (3, 100))
    ]
    scheduler.add(requests)
    blocks_of = dict.fromkeys(range(4), 0)
    granted = dict.fromkeys(range(4), 0)
    decode_rows: list[int] = []
    unanswered: deque[StepPlan] = deque()
    finished: dict[str, object] = {}
    while not all(request.ended for request in requests):
        while len(unanswered) < ahead and (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
            for row in plan.block_rows.tolist():
                blocks_of[row] += 1
            decode_rows = decode_rows if plan.decode_rows is None else plan.decode_rows.tolist()
            for row in decode_rows:
                granted[row] += 1
            for row, num_tokens in zip(plan.prefill_rows.tolist(), plan.prefill_num_tokens.tolist(), strict=True):
                granted[row] += num_tokens
            assert all(blocks_of[row] == -(-granted[row] // block_size) for row in granted)
        outputs = scheduler.update(answer(scheduler, unanswered.popleft()))
        finished |= outcomes(outputs)
    assert finished == dict.fromkeys(["2", "5", "9", "3"], "length")
    assert [request.num_tokens for request in requests] == [32, 12, 27, 40]
    assert [granted[row] for row in range(4)] == [31, 11, 26, 39]
    assert is_whole(scheduler)


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_steps_between_marks_decide_nothing_anew(monkeypatch: pytest.MonkeyPatch, num_waiting: int) -> None:
    """With rows to spare and nobody waiting, or somebody waiting and no row to spare."""
    scheduler = make_scheduler(block_size=16, seqs=(2 - num_waiting,))
    scheduler.add(
        [make_request(name, 3, max_tokens=40, first=first) for name, first in (("a", 1), ("b", 100))][: 1 + num_waiting]
    )
    drafts = []
    draft = scheduler._planner.draft
    monkeypatch.setattr(scheduler._planner, "draft", lambda *arguments: drafts.append(1) or draft(*arguments))
    for _ in range(10):
        run_step(scheduler)
    assert len(drafts) == 2, "the prompt's step, and the first that decodes"
