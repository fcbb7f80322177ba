"""Requests whose clients do not read, one plan at a time: they give up their rows, and come back as they were."""

import pytest
from driving import (
    answer,
    finish,
    is_whole,
    make_request,
    make_scheduler,
    outcomes,
    plan_step,
    run_step,
    tokens,
)


def test_a_parked_request_gives_up_its_row_and_its_blocks_and_others_go_on() -> None:
    scheduler = make_scheduler()
    slow, other = make_request("slow", 6), make_request("other", 6, first=50)
    scheduler.add([slow, other])
    run_step(scheduler)
    scheduler.park(slow)
    plan, outputs = run_step(scheduler)
    assert (slow.row, slow.token_ids.tolist()) == (None, [1, 2, 3, 4, 5, 6, 7])
    assert (plan.released_rows.size, tokens(outputs, slow), tokens(outputs, other)) == (1, [], [7])
    statistics = scheduler.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.num_parked) == (1, 0, 1)
    finish(scheduler, other)
    assert scheduler.schedule() is None, "nothing is computed for it"
    assert is_whole(scheduler), "and it holds no block"


def test_tokens_of_steps_in_flight_still_reach_it_and_it_goes_on_behind_them_from_its_cached_blocks() -> None:
    scheduler, request = make_scheduler(), make_request("a", 9, max_tokens=5)
    scheduler.add([request])
    run_step(scheduler)
    plans = [plan_step(scheduler), plan_step(scheduler)]
    scheduler.park(request)
    scheduler.park(request)
    for plan in plans:
        assert tokens(scheduler.update(answer(scheduler, plan)), request) == [7]
    assert scheduler.waiting.num_tokens == 0, "a parked request does not count in the queue"
    scheduler.unpark(request)
    scheduler.unpark(request)
    plan, outputs = run_step(scheduler)
    (admission,) = plan.admissions
    assert (admission.token_ids.tolist()[9:], admission.num_computed_tokens) == ([7, 7, 7], 8)
    assert tokens(outputs, request) == [7]
    finish(scheduler, request)
    assert request.num_tokens == 14
    assert is_whole(scheduler)


def test_it_is_not_admitted_again_while_a_plan_that_names_it_is_unanswered() -> None:
    scheduler, request = make_scheduler(), make_request("a", 3)
    scheduler.add([request])
    run_step(scheduler)
    plan = plan_step(scheduler)
    scheduler.park(request)
    scheduler.unpark(request)
    following = scheduler.schedule()
    assert following is None or not following.admissions
    scheduler.update(answer(scheduler, plan))
    assert plan_step(scheduler).admissions[0].token_ids.tolist() == [1, 2, 3, 7, 7]


def test_a_late_token_may_end_a_parked_request() -> None:
    scheduler, request = make_scheduler(), make_request("a", 3, max_tokens=2)
    scheduler.add([request])
    run_step(scheduler)
    plan = plan_step(scheduler)
    scheduler.park(request)
    assert outcomes(scheduler.update(answer(scheduler, plan))) == {"a": "length"}
    scheduler.unpark(request)
    assert (request.ended, scheduler.statistics().num_parked) == (True, 0)
    assert is_whole(scheduler)


def test_it_comes_back_at_its_old_rank() -> None:
    scheduler = make_scheduler(seqs=(1,))
    requests = [make_request(name, 3, max_tokens=3, first=at) for name, at in (("a", 1), ("b", 50), ("c", 90))]
    first, second, _ = requests
    scheduler.add(requests)
    run_step(scheduler)
    scheduler.park(first)
    run_step(scheduler)
    assert second.row is not None
    scheduler.unpark(first)
    assert [request.request_id for request in scheduler.waiting] == ["a", "c"]
    finish(scheduler, *requests)
    assert is_whole(scheduler)


@pytest.mark.parametrize("state", ["waits", "computes its prompt", "decodes"])
def test_it_can_be_parked_and_ended_wherever_it_stands(state: str) -> None:
    scheduler = make_scheduler(tokens=(8,), seqs=(1 if state == "waits" else 2,))
    other, request = make_request("other", 3, first=90), make_request("a", 24 if "prompt" in state else 3)
    scheduler.add([other, request])
    run_step(scheduler)
    assert (request.row is None) == (state == "waits")
    scheduler.park(request)
    assert scheduler.statistics().num_parked == 1
    scheduler.end(request)
    scheduler.park(request)
    assert (scheduler.statistics().num_parked, scheduler.statistics().num_waiting) == (0, 0)
    finish(scheduler, other)
    scheduler.park(other)
    assert scheduler.statistics().num_parked == 0
    assert is_whole(scheduler)


def test_after_the_groups_loss_it_is_parked_still() -> None:
    scheduler, successor = make_scheduler(), make_scheduler()
    slow, other = make_request("slow", 3), make_request("other", 3, first=50)
    scheduler.add([slow, other])
    run_step(scheduler)
    scheduler.park(slow)
    left = scheduler.unfinished()
    assert left == [slow, other]
    for request in left:
        successor.resume(request)
    plan, _ = run_step(successor)
    assert [admission.token_ids[0] for admission in plan.admissions] == [50]
    successor.unpark(slow)
    finish(successor, slow, other)
    assert slow.num_tokens == 11
    assert is_whole(successor)
