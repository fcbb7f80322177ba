"""Requests that are taken out, one plan at a time: by an abort, or by their worker group's loss."""

from driving import (
    answer,
    is_whole,
    make_request,
    make_scheduler,
    plan_step,
    run,
    run_step,
    tokens,
    two_that_do_not_fit,
)


def names(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def test_an_aborted_request_gives_everything_back_and_its_late_token_goes_nowhere() -> None:
    scheduler, request = make_scheduler(), make_request("a", 3)
    scheduler.add([request])
    run_step(scheduler)
    plan = plan_step(scheduler)
    scheduler.end(request)
    outputs = scheduler.update(answer(scheduler, plan))
    assert (outputs.token_ids.size, outputs.finished) == (0, ())
    assert request.token_ids.tolist() == [1, 2, 3, 7]
    assert is_whole(scheduler)


def test_a_row_taken_over_in_flight_does_not_get_the_token_of_the_one_before() -> None:
    scheduler = make_scheduler(seqs=(1,))
    old, new = make_request("old", 3), make_request("new", 3)
    scheduler.add([old, new])
    run_step(scheduler)
    plan = plan_step(scheduler)
    scheduler.end(old)
    scheduler.update(answer(scheduler, plan, token_id=50))
    plan, outputs = run_step(scheduler, token_id=60)
    assert plan.admissions[0].row == plan.released_rows[0]
    assert tokens(outputs, new) == [60]


def test_a_waiting_request_can_be_aborted() -> None:
    scheduler = make_scheduler(seqs=(1,))
    first, second = make_request("first", 3), make_request("second", 3)
    scheduler.add([first, second])
    run_step(scheduler)
    scheduler.end(second)
    assert second.ended
    assert len(scheduler.waiting) == scheduler.waiting.num_tokens == 0
    assert run_step(scheduler)[0].admissions == ()


def test_a_request_aborted_inside_its_prompt_leaves_room_for_the_next() -> None:
    scheduler = make_scheduler(tokens=(8,), usable_blocks=8)
    long, other = make_request("long", 24), make_request("other", 24, first=100, max_tokens=1)
    scheduler.add([long])
    run_step(scheduler)
    scheduler.end(long)
    assert is_whole(scheduler)
    assert [plan.prefill_num_tokens.tolist() for plan in run(scheduler, other)] == [[8], [8], [8]]


def test_four_samples_of_one_prompt_that_are_aborted_leave_nothing_behind() -> None:
    """They share the prompt's blocks; after three tokens all are aborted and none emits another."""
    scheduler = make_scheduler(tokens=(64,))
    samples = [make_request("n", 13) for _ in range(4)]
    scheduler.add(samples)
    for _ in range(4):
        run_step(scheduler)
    assert scheduler.blocks.pool.num_usable - scheduler.blocks.pool.num_free == 3 + 4, "three full blocks are shared"
    plan = plan_step(scheduler)
    for sample in samples:
        scheduler.end(sample)
    assert scheduler.update(answer(scheduler, plan)).token_ids.size == 0
    assert scheduler.schedule() is None
    assert is_whole(scheduler)


def test_the_groups_loss_leaves_its_requests_with_all_they_have_emitted() -> None:
    scheduler = make_scheduler(seqs=(2,))
    requests = [make_request(name, 3, first=first) for name, first in (("a", 1), ("b", 50), ("c", 90))]
    scheduler.add(requests)
    run_step(scheduler)
    left = scheduler.unfinished()
    assert left == requests
    assert [request.num_tokens for request in left] == [4, 4, 3]
    assert all(request.row is None for request in left)
    successor = make_scheduler()
    for request in left:
        successor.resume(request)
    plan, _ = run_step(successor)
    assert plan.prefill_num_tokens.tolist() == [4, 4, 3]


def test_what_the_lost_group_left_is_served_by_rank_and_plans_of_the_old_one_hold_nobody_back() -> None:
    scheduler, _, new = two_that_do_not_fit()
    while new.row is not None or not new.last_step:
        run_step(scheduler)
    scheduler.add([make_request("urgent", 3, priority=-1, first=90)])
    left = scheduler.unfinished()
    assert names(left) == ["urgent", "old", "new"]
    successor = make_scheduler(tokens=(64,))
    for request in reversed(left):
        successor.resume(request)
    plan, _ = run_step(successor)
    assert [admission.token_ids[0] for admission in plan.admissions] == [90, 1, 50]
