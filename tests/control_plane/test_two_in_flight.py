"""Two plans unanswered at a time: what is granted without knowing, and what a late answer still means."""

import random
from collections import deque

import numpy as np
import pytest
from driving import (
    FULL,
    answer,
    finish,
    is_whole,
    make_request,
    make_scheduler,
    outcomes,
    plan_step,
    tokens,
    two_that_do_not_fit,
    window,
)
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.protos.errors import ModelOutputError, ProtocolError
from blockplane.protos.plan import StepPlan, StepResult


def run_ahead(scheduler: Scheduler, *requests: Request, until: Request) -> deque[StepPlan]:
    """Keep two plans unanswered until `until` has lost its row."""
    unanswered: deque[StepPlan] = deque()
    for _ in range(100):
        while (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
        if until.row is None and until.last_step:
            return unanswered
        scheduler.update(answer(scheduler, unanswered.popleft()))
    raise AssertionError(f"request {until.request_id} never lost its row")


def test_decode_goes_on_without_the_answer_and_no_further_than_two_plans() -> None:
    scheduler, request = make_scheduler(), make_request("a", 5)
    scheduler.add([request])
    first, second = plan_step(scheduler), plan_step(scheduler)
    assert first.prefill_num_tokens.tolist() == [5]
    assert second.decode_rows is not None
    assert second.decode_rows.tolist() == first.prefill_rows.tolist()
    assert scheduler.schedule() is None
    assert tokens(scheduler.update(answer(scheduler, first, token_id=8)), request) == [8]
    third = plan_step(scheduler)
    assert (third.step, third.decode_rows) == (3, None), "the set is as in the plan before, answered or not"
    assert tokens(scheduler.update(answer(scheduler, second, token_id=9)), request) == [9]
    scheduler.end(request)
    assert request.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9]


def test_a_prompts_segments_follow_each_other_without_the_answer() -> None:
    scheduler, request = make_scheduler(tokens=(8,)), make_request("a", 20, max_tokens=1)
    scheduler.add([request])
    assert [plan.prefill_num_tokens.tolist() for plan in finish(scheduler, request, ahead=2)] == [[8], [8], [4]]


def test_answers_are_to_the_oldest_plan() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_request("a", 5)])
    first, second = plan_step(scheduler), plan_step(scheduler)
    with pytest.raises(ProtocolError, match="that of step 1 is expected"):
        scheduler.update(answer(scheduler, second))
    scheduler.update(answer(scheduler, first))
    scheduler.update(answer(scheduler, second))


def test_a_row_that_stops_costs_one_discarded_token() -> None:
    scheduler = make_scheduler()
    stops, goes_on = make_request("stops", 5, params={"stop_token_ids": (3,)}), make_request("goes on", 5, first=50)
    scheduler.add([stops, goes_on])
    first, second = plan_step(scheduler), plan_step(scheduler)
    outputs = scheduler.update(answer(scheduler, first, token_id=3))
    assert (tokens(outputs, stops), outcomes(outputs)) == ([3], {"stops": "stop"})
    third = plan_step(scheduler)
    assert third.decode_rows is not None
    assert third.decode_rows.tolist() == [1]
    assert third.released_rows.tolist() == [0]
    outputs = scheduler.update(answer(scheduler, second, token_id=4))
    assert (tokens(outputs, stops), tokens(outputs, goes_on), outcomes(outputs)) == ([], [4], {})
    assert stops.token_ids.tolist() == [1, 2, 3, 4, 5, 3]
    assert tokens(scheduler.update(answer(scheduler, third, token_id=6)), goes_on) == [6]


@pytest.mark.parametrize(("max_model_len", "max_tokens", "usable_blocks"), [(9, 50, 100), (64, 4, 100), (64, 50, 2)])
def test_what_a_request_may_get_at_most_is_never_granted_twice(
    max_model_len: int, max_tokens: int, usable_blocks: int
) -> None:
    """Nine tokens at the latest, by the context, by its own limit, or by two blocks of four: eight are computed."""
    scheduler = make_scheduler(max_model_len=max_model_len, usable_blocks=usable_blocks, block_size=4)
    request = make_request("a", 5, max_tokens=max_tokens)
    scheduler.add([request])
    plans = finish(scheduler, request, ahead=2)
    assert len(plans) == 4
    assert request.num_tokens == 9
    assert sum(len(plan.block_ids) for plan in plans) == 2
    assert is_whole(scheduler)


def test_a_row_granted_all_leaves_the_decode_set_while_others_go_on() -> None:
    scheduler = make_scheduler()
    ends, goes_on = make_request("ends", 5, max_tokens=2), make_request("goes on", 5, first=50)
    scheduler.add([ends, goes_on])
    first, second = plan_step(scheduler), plan_step(scheduler)
    scheduler.update(answer(scheduler, first))
    third = plan_step(scheduler)
    assert third.decode_rows is not None
    assert third.decode_rows.tolist() == [1]
    assert not ends.ended, "its last token is on its way"
    assert outcomes(scheduler.update(answer(scheduler, second))) == {"ends": "length"}


def test_a_prompt_with_one_token_to_come_never_decodes() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 5, max_tokens=1)
    scheduler.add([request])
    plan = plan_step(scheduler)
    assert scheduler.schedule() is None
    assert outcomes(scheduler.update(answer(scheduler, plan))) == {"a": "length"}


# -- preempted in flight -----------------------------------------------------------------------------------------------


def test_a_row_preempted_in_flight_gets_its_late_token_exactly_once() -> None:
    scheduler, old, new = two_that_do_not_fit()
    late, newest = run_ahead(scheduler, old, new, until=new)
    num_tokens, num_queued = new.num_tokens, scheduler.waiting.num_tokens
    outputs = scheduler.update(answer(scheduler, late, token_id=30))
    assert (tokens(outputs, old), tokens(outputs, new)) == ([30], [30])
    assert new.num_tokens == num_tokens + 1
    assert scheduler.waiting.num_tokens == num_queued + 1
    assert new.token_ids[-1] == 30
    assert new.token_ids.dtype == np.int32
    outputs = scheduler.update(answer(scheduler, newest, token_id=31))
    assert tokens(outputs, new) == [], "the plan that took its row names it no more"
    plans = finish(scheduler, old, new, ahead=2)
    (admission,) = [admission for plan in plans for admission in plan.admissions]
    assert admission.token_ids.tolist()[: num_tokens + 1] == new.token_ids.tolist()[: num_tokens + 1]
    assert len(admission.token_ids) == num_tokens + 1
    assert new.num_tokens == 3 + 8
    assert is_whole(scheduler)


def test_twice_in_a_row_too_and_whatever_happens_a_text_has_each_token_once() -> None:
    """Every answer's token is its step's number: a lost or doubled one would show in the text."""
    scheduler = make_scheduler(usable_blocks=7, block_size=2, tokens=(32,))
    requests = [make_request(str(first), 1, max_tokens=8, first=first) for first in (100, 200, 300, 400)]
    scheduler.add(requests)
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    unanswered: deque[StepPlan] = deque()
    times_out = dict.fromkeys(texts, 0)
    while not all(request.ended for request in requests):
        had_row = {request.request_id for request in requests if request.row is not None}
        while (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
        for request in scheduler.waiting:
            times_out[request.request_id] += request.request_id in had_row
        plan = unanswered.popleft()
        outputs = scheduler.update(answer(scheduler, plan, token_id=1000 + plan.step))
        for request in requests:
            texts[request.request_id] += tokens(outputs, request)
    assert times_out["400"] == 2, "it was preempted twice"
    for request in requests:
        text = texts[request.request_id]
        assert len(text) == 8
        assert text == sorted(set(text)), "in order, none twice"
        assert request.token_ids[1:].tolist() == text


def test_one_that_an_answer_may_be_for_is_not_given_away_to_another_group() -> None:
    scheduler, old, new = two_that_do_not_fit()
    unanswered = run_ahead(scheduler, old, new, until=new)
    waits = make_request("waits", 3, first=90)
    scheduler.add([waits])
    assert scheduler.give_away(2) == [waits]
    while unanswered:
        scheduler.update(answer(scheduler, unanswered.popleft()))
    assert scheduler.give_away(0) == []
    assert scheduler.give_away(2) == [new]
    assert scheduler.waiting.num_tokens == 0


def test_nobody_waits_behind_one_that_computes_at_another_group() -> None:
    here, elsewhere = make_scheduler(tokens=(8,)), make_scheduler(tokens=(8,))
    leader, follower = make_request("leader", 30, group=1), make_request("follower", 30, group=0)
    elsewhere.add([leader])
    plan_step(elsewhere)
    here.add([follower])
    follower.behind = leader, 7
    assert plan_step(here).admissions
    assert follower.behind is None


def test_one_preempted_is_not_readmitted_while_a_plan_that_names_it_is_unanswered() -> None:
    scheduler, old, new = two_that_do_not_fit()
    late, newest = run_ahead(scheduler, old, new, until=new)
    scheduler.end(old)
    assert scheduler.schedule() is None, "two are unanswered"
    scheduler.update(answer(scheduler, late))
    plan = plan_step(scheduler)
    assert newest.step > new.last_step == late.step
    assert [admission.token_ids[0] for admission in plan.admissions] == [50]


def test_while_it_is_not_readmitted_none_behind_it_passes() -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4, tokens=(32,))
    request, other = make_request("a", 3), make_request("other", 3, first=50)
    scheduler.add([request])
    plan = plan_step(scheduler)
    request.last_step = plan.step
    scheduler.rows.requests[0] = request
    scheduler._running.vacate(0)
    scheduler._planner.enqueue(request)
    scheduler.add([other])
    assert scheduler.schedule() is None
    scheduler.update(answer(scheduler, plan))
    assert [admission.token_ids[0] for admission in plan_step(scheduler).admissions] == [1, 50]


def test_a_late_token_may_end_a_request_that_waits() -> None:
    scheduler, old, new = two_that_do_not_fit(params={"stop_token_ids": (33,)})
    late, newest = run_ahead(scheduler, old, new, until=new)
    outputs = scheduler.update(answer(scheduler, late, token_id=33))
    assert (tokens(outputs, new), outcomes(outputs)) == ([33], {"new": "stop"})
    assert new.ended
    assert len(scheduler.waiting) == scheduler.waiting.num_tokens == 0
    outputs = scheduler.update(answer(scheduler, newest, token_id=34))
    assert (tokens(outputs, new), tokens(outputs, old)) == ([], [34])
    finish(scheduler, old, ahead=2)
    assert is_whole(scheduler)


def test_a_late_failure_ends_a_request_that_waits_and_gives_it_no_token() -> None:
    scheduler, old, new = two_that_do_not_fit()
    late, _ = run_ahead(scheduler, old, new, until=new)
    num_tokens = new.num_tokens
    outputs = scheduler.update(StepResult(late.step, np.array([7, -1], np.int32)))
    assert (tokens(outputs, old), tokens(outputs, new)) == ([7], [])
    ((request, outcome),) = [(end.request, end.outcome) for end in outputs.finished]
    assert request is new
    assert isinstance(outcome, ModelOutputError)
    assert new.num_tokens == num_tokens


def test_ends_of_those_that_wait_and_of_those_that_run_come_in_one_answer() -> None:
    scheduler, old, new = two_that_do_not_fit()
    late, _ = run_ahead(scheduler, old, new, until=new)
    outputs = scheduler.update(answer(scheduler, late, token_id=99))
    assert outcomes(outputs) == {"old": "stop", "new": "stop"}
    assert (tokens(outputs, old), tokens(outputs, new)) == ([99], [99])
    assert outputs.owners.dtype == outputs.stream_ids.dtype == outputs.token_ids.dtype == np.int32


# -- aborted in flight -------------------------------------------------------------------------------------------------


def test_one_aborted_with_two_plans_in_flight_emits_nothing_and_no_new_plan_names_it() -> None:
    scheduler = make_scheduler()
    gone, stays = make_request("gone", 5), make_request("stays", 5, first=50)
    scheduler.add([gone, stays])
    first, second = plan_step(scheduler), plan_step(scheduler)
    scheduler.end(gone)
    for plan in (first, second):
        outputs = scheduler.update(answer(scheduler, plan))
        assert (tokens(outputs, gone), tokens(outputs, stays)) == ([], [7])
    third = plan_step(scheduler)
    assert third.decode_rows is not None
    assert (third.decode_rows.tolist(), third.released_rows.tolist()) == ([1], [0])
    assert gone.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_one_aborted_inside_its_prompt_with_two_plans_in_flight_gives_all_back() -> None:
    scheduler = make_scheduler(tokens=(8,), groups=(FULL, window(4)))
    request = make_request("a", 24)
    scheduler.add([request])
    plans = plan_step(scheduler), plan_step(scheduler)
    scheduler.end(request)
    assert is_whole(scheduler)
    for plan in plans:
        assert scheduler.update(answer(scheduler, plan)).token_ids.size == 0
    assert scheduler.schedule() is None
    assert is_whole(scheduler)


def test_one_aborted_while_it_waits_for_its_late_token_does_not_get_it() -> None:
    scheduler, old, new = two_that_do_not_fit()
    late, _ = run_ahead(scheduler, old, new, until=new)
    num_tokens = new.num_tokens
    scheduler.end(new)
    outputs = scheduler.update(answer(scheduler, late))
    assert (tokens(outputs, old), tokens(outputs, new)) == ([7], [])
    assert (new.num_tokens, outcomes(outputs)) == (num_tokens, {})


def test_a_rows_next_occupant_never_gets_a_token_of_the_one_before() -> None:
    """One row, two plans in flight for `old`; `new` is admitted to it before either is answered."""
    scheduler = make_scheduler(seqs=(1,))
    old, new = make_request("old", 5), make_request("new", 5, first=50)
    scheduler.add([old])
    first = plan_step(scheduler)
    scheduler.end(old)
    scheduler.add([new])
    second = plan_step(scheduler)
    assert second.admissions[0].row == first.admissions[0].row
    outputs = scheduler.update(answer(scheduler, first, token_id=40))
    assert outputs.token_ids.size == 0
    assert tokens(scheduler.update(answer(scheduler, second, token_id=41)), new) == [41]
    assert scheduler.rows.token_ids[0, :6].tolist() == [50, 51, 52, 53, 54, 41]


def test_a_failed_row_ends_alone_with_another_plan_in_flight() -> None:
    scheduler = make_scheduler()
    bad, good = make_request("bad", 5), make_request("good", 5, first=50)
    scheduler.add([bad, good])
    first, second = plan_step(scheduler), plan_step(scheduler)
    outputs = scheduler.update(StepResult(first.step, np.array([-1, 7], np.int32)))
    assert (tokens(outputs, bad), tokens(outputs, good)) == ([], [7])
    outputs = scheduler.update(StepResult(second.step, np.array([-1, 8], np.int32)))
    assert (tokens(outputs, bad), tokens(outputs, good), outcomes(outputs)) == ([], [8], {})
    assert not good.ended


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2])
def test_32_prompts_with_one_long_prefix_compute_it_once(ahead: int) -> None:
    scheduler = make_scheduler(usable_blocks=400, tokens=(32,), seqs=(32,), max_model_len=256)
    requests = [make_request(str(index), 102, max_tokens=1) for index in range(32)]
    for index, request in enumerate(requests):
        request.token_ids[100:] = [2000 + index, 3000 + index]
    scheduler.add(requests)
    plans = finish(scheduler, *requests, ahead=ahead)
    assert sum(int(plan.prefill_num_tokens.sum()) for plan in plans) == 100 + 32 * 2
    assert [request.num_cached_tokens for request in requests] == [0] + [100] * 31


def test_the_only_row_waits_for_the_answer_that_frees_its_window() -> None:
    """A window of 4 in blocks of 4: of three blocks two come free when the plan in flight is answered."""
    scheduler = make_scheduler(usable_blocks=3, block_size=4, tokens=(12,), groups=(window(4),), max_model_len=40)
    request = make_request("a", 12, max_tokens=20)
    scheduler.add([request])
    first = plan_step(scheduler)
    assert scheduler.schedule() is None, "its 13th token has no block, and nobody else could give way"
    assert scheduler.statistics().num_preemptions == 0
    assert request.row is not None
    scheduler.update(answer(scheduler, first))
    assert len(plan_step(scheduler).block_ids) == 1
    assert scheduler.statistics().num_preemptions == 0


def test_a_window_is_freed_by_what_is_answered_and_not_by_what_is_granted() -> None:
    scheduler = make_scheduler(block_size=4, tokens=(4,), groups=(window(4),))
    request = make_request("a", 12)
    scheduler.add([request])
    first, second = plan_step(scheduler), plan_step(scheduler)
    assert (scheduler.blocks.tables[0, :2, 0] > 0).tolist() == [True, True]
    scheduler.update(answer(scheduler, first))
    assert (scheduler.blocks.tables[0, :2, 0] > 0).tolist() == [True, True], "position 4 sees 1 to 4"
    third = plan_step(scheduler)
    scheduler.update(answer(scheduler, second))
    assert (scheduler.blocks.tables[0, :3, 0] > 0).tolist() == [False, True, True], "position 8 sees 5 to 8"
    scheduler.update(answer(scheduler, third))


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6),
    usable_blocks=st.integers(9, 14),
    ahead=st.sampled_from([1, 2]),
    seed=st.integers(0, 1 << 16),
)
def test_however_late_answers_come_all_end_with_all_their_tokens(
    lengths: list[tuple[int, int]], usable_blocks: int, ahead: int, seed: int
) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(usable_blocks=usable_blocks, block_size=4, tokens=(8,), seqs=(3,))
    requests = [
        make_request(str(index), num_prompt_tokens, max_tokens, first=100 * index)
        for index, (num_prompt_tokens, max_tokens) in enumerate(lengths)
    ]
    scheduler.add(requests)
    unanswered: deque[StepPlan] = deque()
    while not all(request.ended for request in requests):
        plan = scheduler.schedule() if len(unanswered) < ahead and rng.random() < 0.5 else None
        if plan is not None:
            unanswered.append(plan)
        elif unanswered:
            scheduler.update(answer(scheduler, unanswered.popleft()))
    for plan in unanswered:
        scheduler.update(answer(scheduler, plan))
    assert [request.num_tokens for request in requests] == [
        num_prompt_tokens + max_tokens for num_prompt_tokens, max_tokens in lengths
    ]
    assert is_whole(scheduler)


def test_a_late_failure_lets_nobody_find_what_the_request_had_computed() -> None:
    scheduler = make_scheduler(usable_blocks=5, block_size=4, tokens=(32,))
    old, new = make_request("old", 8, max_tokens=8), make_request("new", 5, max_tokens=8, first=50)
    scheduler.add([old, new])
    unanswered = run_ahead(scheduler, new, until=new)
    assert scheduler.blocks.cache.holders(0, new.keys[1:]), "it left a full block"
    while unanswered:
        plan = unanswered.popleft()
        result = answer(scheduler, plan)
        (of_plan,) = (step for step in scheduler._in_flight if step.step == plan.step)
        is_new = [request is new for request in of_plan.sampled.requests]
        scheduler.update(StepResult(plan.step, np.where(is_new, -1, result.token_ids).astype(np.int32)))
    assert new.ended
    assert not scheduler.blocks.cache.holders(0, new.keys[1:])
