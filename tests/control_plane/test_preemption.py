"""Blocks and rows that run out, one plan at a time: who waits, who gives way, how they come back."""

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
    run,
    run_step,
    tokens,
    two_that_do_not_fit,
    window,
)


def names(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


# -- waiting for blocks and rows ---------------------------------------------------------------------------------------


def test_a_request_waits_in_order_while_blocks_are_short_and_runs_later() -> None:
    """Two decodes hold three of four blocks and the head prompt needs three: decodes go on, all three finish."""
    scheduler = make_scheduler(usable_blocks=4, block_size=4, tokens=(32,))
    scheduler.add([make_request("a", 7, max_tokens=2), make_request("b", 3, max_tokens=2, first=50)])
    run_step(scheduler)
    head = make_request("head", 11, max_tokens=1)
    scheduler.add([head, make_request("small", 1, max_tokens=1, first=90)])
    plan, outputs = run_step(scheduler)
    assert plan.admissions == ()
    assert outcomes(outputs) == {"a": "length", "b": "length"}
    _, outputs = run_step(scheduler)
    assert tokens(outputs, head) == [7]


def test_admission_leaves_a_block_for_each_running_row() -> None:
    """Two rows hold one block each: of five that are usable a prompt may take one, not two."""
    for num_tokens, fits in ((4, True), (5, False)):
        scheduler = make_scheduler(usable_blocks=5, block_size=4)
        scheduler.add([make_request("a", 3, first=50), make_request("b", 3, first=90)])
        run_step(scheduler)
        scheduler.add([make_request("next", num_tokens)])
        assert len(run_step(scheduler)[0].admissions) == fits


def test_rows_run_out_before_blocks_and_the_next_waits_for_a_row() -> None:
    scheduler = make_scheduler(seqs=(1, 2), tokens=(32,))
    scheduler.add(
        [make_request(name, 3, max_tokens=2, first=first) for name, first in (("a", 1), ("b", 50), ("c", 90))]
    )
    assert len(run_step(scheduler)[0].admissions) == 2
    assert run_step(scheduler)[0].admissions == ()
    plan, _ = run_step(scheduler)
    assert [admission.row for admission in plan.admissions] == plan.prefill_rows.tolist()
    assert sorted(plan.released_rows.tolist()) == [0, 1]


def test_a_prefill_that_finds_no_block_lets_no_newer_request_pass() -> None:
    """An admission that was too hopeful: three decodes grow into the last blocks of a long prompt.

    It waits in its row, a small request does not take what is left, and all finish.
    """
    scheduler = make_scheduler(usable_blocks=198, block_size=4, tokens=(128,), max_model_len=1024)
    scheduler.add([make_request(str(first), 3, max_tokens=20, first=first) for first in (1000, 2000, 3000)])
    run_step(scheduler)
    long, small = make_request("long", 768, max_tokens=1), make_request("small", 2, max_tokens=1, first=5000)
    scheduler.add([long, small])
    segments = []
    while not small.ended:
        plan, _ = run_step(scheduler)
        segments.append(plan.prefill_num_tokens.tolist())
        assert small.row is None or long.ended
    waits = segments.index([])
    assert segments[:waits] == [[128]] * 5, "the sixth segment finds no blocks"
    assert segments[-2:] == [[128], [2]]
    assert scheduler.statistics().num_preemptions == 0
    assert is_whole(scheduler)


def test_a_big_request_is_not_starved_by_an_endless_stream_of_small_ones() -> None:
    """It is at the head and starts once those that run have ended, which takes no longer than their max_tokens."""
    scheduler = make_scheduler(usable_blocks=12, block_size=4, tokens=(32,), seqs=(8,))
    first = 100
    big = make_request("big", 40, max_tokens=1)
    for step in range(30):
        scheduler.add([make_request(f"small {step}", 3, max_tokens=5, first=(first := first + 50))])
        if step == 5:
            scheduler.add([big])
        run_step(scheduler)
        if big.row is not None:
            break
    assert 5 < step <= 5 + 5 + 1, "at most max_tokens steps of the small ones that were before it"


def test_equal_prompts_that_wait_for_a_leader_do_not_fill_the_lookahead_for_ever() -> None:
    """Followers let others pass while their leader computes, and are served in order once it has."""
    scheduler = make_scheduler(tokens=(16,), seqs=(4,), usable_blocks=200)
    leader, follower = make_request("leader", 48, max_tokens=1), make_request("follower", 48, max_tokens=1)
    scheduler.add([leader, follower])
    for step in range(8):
        scheduler.add([make_request(f"small {step}", 3, max_tokens=1, first=100 + 50 * step)])
        run_step(scheduler)
        if follower.row is not None or follower.ended:
            break
    assert step <= 3


# -- preemption --------------------------------------------------------------------------------------------------------


def test_the_newest_row_gives_way_and_resumes_with_all_it_has_emitted() -> None:
    """Its prompt of 3 and the tokens that it had emitted are computed anew; the first new token comes after them."""
    scheduler, old, new = two_that_do_not_fit()
    emitted = 0
    while not len(scheduler.waiting) or old.row is None:
        emitted += len(tokens(run_step(scheduler)[1], new))
        assert emitted < 8
    assert new.token_ids.tolist() == [50, 51, 52] + [7] * emitted
    assert emitted > 1
    plans = finish(scheduler, old, new)
    (plan,) = [plan for plan in plans if plan.admissions]
    (resumed,) = plan.admissions
    assert (resumed.num_prompt_tokens, resumed.num_computed_tokens) == (3, 0)
    assert resumed.token_ids.tolist() == [50, 51, 52] + [7] * emitted
    assert plan.prefill_num_tokens.tolist() == [3 + emitted], "others have reused its blocks"
    assert new.token_ids.tolist() == [50, 51, 52] + [7] * 8
    assert is_whole(scheduler)


def test_without_a_cache_the_re_prefill_covers_prompt_and_output() -> None:
    """Prompt 10, 5 generated, preempted: 15 tokens are computed anew and the sixth token comes after the 15th."""
    scheduler = make_scheduler(usable_blocks=9, tokens=(64,), block_size=4, prefix_caching=False)
    old, new = make_request("old", 16, max_tokens=8), make_request("new", 10, max_tokens=8, first=50)
    scheduler.add([old, new])
    while not len(scheduler.waiting) or old.row is None:
        run_step(scheduler)
    num_known = new.num_tokens
    assert num_known > 11
    finish(scheduler, old)
    plan, outputs = run_step(scheduler)
    assert plan.prefill_num_tokens.tolist() == [num_known]
    assert tokens(outputs, new) == [7]
    assert scheduler.rows.num_tokens[plan.prefill_rows[0]] == num_known + 1


def test_a_step_that_takes_a_row_away_admits_nobody() -> None:
    scheduler, _, new = two_that_do_not_fit()
    scheduler.add([make_request("tiny", 1, max_tokens=1, priority=5)])
    run_step(scheduler)
    for _ in range(8):
        plan, _ = run_step(scheduler)
        if new.row is None:
            break
    assert names(scheduler.waiting)[0] == "new"
    assert plan.admissions == ()
    assert plan.released_rows.size == 1


def test_one_victim_gives_way_for_what_is_missing_and_the_others_go_on() -> None:
    """Three rows of two blocks each reach a block's end at once and one of seven is free: the newest gives its two."""
    scheduler = make_scheduler(usable_blocks=7, block_size=4, tokens=(32,), prefix_caching=False)
    requests = [make_request(str(first), 3, max_tokens=9, first=first) for first in (100, 200, 300)]
    scheduler.add(requests)
    for num_steps in (1, 5):
        for _ in range(num_steps):
            run_step(scheduler)
        assert scheduler.statistics().num_preemptions == 0
    plan, outputs = run_step(scheduler)
    assert scheduler.statistics().num_preemptions == 1
    assert names(scheduler.waiting) == ["300"]
    assert [len(tokens(outputs, request)) for request in requests] == [1, 1, 0]
    assert plan.block_rows.tolist() == [0, 1], "both that stay get a block"
    finish(scheduler, *requests)
    assert scheduler.statistics().num_preemptions == 1, "no thrashing"
    assert is_whole(scheduler)


def test_the_victim_is_of_the_lowest_priority_and_of_those_the_newest() -> None:
    scheduler = make_scheduler(usable_blocks=7, block_size=4, tokens=(32,), max_model_len=32)
    low = make_request("low", 3, max_tokens=20, first=100, priority=1)
    scheduler.add([low])
    scheduler.add([make_request("old", 3, max_tokens=20, first=200)])
    scheduler.add([make_request("new", 3, max_tokens=20, first=300)])
    victims: list[str] = []
    while len(victims) < 2:
        run_step(scheduler)
        victims += [name for name in names(scheduler.waiting) if name not in victims]
    assert victims == ["low", "new"]
    assert names(scheduler.waiting) == ["new", "low"], "served again in the order of rank"


def test_one_that_gives_way_inside_its_prompt_computes_it_anew_from_what_is_cached() -> None:
    scheduler = make_scheduler(usable_blocks=10, block_size=4, tokens=(8,), max_model_len=36)
    old, new = make_request("old", 7, max_tokens=25, first=100), make_request("new", 24, max_tokens=1)
    scheduler.add([old])
    run_step(scheduler)
    scheduler.add([new])
    run_step(scheduler)
    assert (new.row, new.num_tokens) == (1, 24)
    # Somebody else takes all that is left before the prompt is through.
    taken = scheduler.blocks.pool.allocate(scheduler.blocks.pool.num_free)
    assert taken is not None
    while new.row is not None:
        plan, _ = run_step(scheduler)
    assert plan.prefill_rows.size == 0
    scheduler.blocks.pool.release(taken)
    plan, _ = run_step(scheduler)
    assert plan.admissions[0].num_computed_tokens == 4, "of two full blocks, `old` has reused the later one"
    assert plan.prefill_num_tokens.tolist() == [8]
    finish(scheduler, old, new)
    assert is_whole(scheduler)


# -- alone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(window(8),), (window(1), window(6))])
def test_behind_a_window_alone_a_request_goes_on_for_ever_in_few_blocks(groups: tuple[object, ...]) -> None:
    scheduler = make_scheduler(usable_blocks=10, block_size=4, groups=groups, max_model_len=200)  # type: ignore[arg-type]
    request = make_request("a", 50, max_tokens=100)
    run(scheduler, request)
    assert request.num_tokens == 150
    assert scheduler.statistics().num_preemptions == 0
    assert is_whole(scheduler)


def test_a_lone_prompt_takes_the_blocks_that_there_are_and_more_as_they_leave_its_window() -> None:
    """Nine blocks of full attention and at most three of a window fit in twelve, though not nine of both at once."""
    scheduler = make_scheduler(usable_blocks=12, block_size=4, groups=(FULL, window(4)), tokens=(64,), max_model_len=60)
    request = make_request("a", 36, max_tokens=1)
    scheduler.add([request])
    plan = plan_step(scheduler)
    assert (plan.prefill_num_tokens.tolist(), len(plan.block_rows)) == ([24], 6)
    assert scheduler.schedule() is None, "nothing comes free before the answer"
    scheduler.update(answer(scheduler, plan))
    rest = [run_step(scheduler)[0] for _ in range(2)]
    assert [(plan.prefill_num_tokens.tolist(), len(plan.block_rows)) for plan in rest] == [([8], 2), ([4], 1)]
    assert request.num_tokens == 37
    assert is_whole(scheduler)


def test_an_admission_whose_estimate_was_too_optimistic_stays_queued_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4, tokens=(32,))
    scheduler.add([make_request("runs", 11, max_tokens=2)])
    run_step(scheduler)
    first, second = (
        make_request("first", 7, max_tokens=2, first=100),
        make_request("second", 7, max_tokens=2, first=200),
    )
    scheduler.add([first, second])
    monkeypatch.setattr(type(scheduler.blocks), "has_room", lambda *_: True)
    plan, outputs = run_step(scheduler)
    assert (plan.admissions, outcomes(outputs)) == ((), {"runs": "length"})
    assert [request.request_id for request in scheduler.waiting] == ["first", "second"]
    finish(scheduler, first, second)
    assert is_whole(scheduler)
