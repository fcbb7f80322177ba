"""Rows that may compute several tokens in a step: what they are granted, and what an answer makes of it."""

import random
from collections import deque

import numpy as np
import pytest
from driving import (
    EOS,
    answer,
    is_whole,
    make_request,
    make_scheduler,
    outcomes,
    plan_step,
    run,
    run_step,
    tokens,
    window,
)
from hypothesis import given
from hypothesis import strategies as st
from naive_worker import NaiveWorker

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.protos.errors import ModelOutputError, ProtocolError
from blockplane.protos.plan import StepPlan, StepResult


def with_drafts(num_draft_tokens: int, **settings: object) -> Scheduler:
    return make_scheduler(configure={"num_draft_tokens": num_draft_tokens}, **settings)  # type: ignore[arg-type]


def decoding(num_draft_tokens: int, request: Request, **settings: object) -> Scheduler:
    """A scheduler whose one request has its first token."""
    scheduler = with_drafts(num_draft_tokens, **settings)
    scheduler.add([request])
    run_step(scheduler)
    return scheduler


def granted(plan: StepPlan) -> list[int] | None:
    return None if plan.decode_num_tokens is None else plan.decode_num_tokens.tolist()


def result(plan: StepPlan, *texts: list[int]) -> StepResult:
    """One text for each decode row."""
    counts = np.array([len(text) for text in texts], np.int32)
    return StepResult(plan.step, np.array([token_id for text in texts for token_id in text], np.int32), counts)


# -- what is granted ---------------------------------------------------------------------------------------------------


def test_without_drafts_no_column_says_how_many_tokens() -> None:
    scheduler = decoding(0, make_request("a", 5))
    assert [granted(run_step(scheduler)[0]) for _ in range(3)] == [None] * 3


def test_a_decode_row_is_granted_its_newest_token_and_the_drafts_and_this_is_told_once() -> None:
    scheduler = with_drafts(3)
    scheduler.add([make_request("a", 5, max_tokens=40)])
    prefill, _ = run_step(scheduler)
    assert granted(prefill) is None
    plan, _ = run_step(scheduler)
    assert plan.decode_num_tokens is not None
    assert plan.decode_num_tokens.dtype == np.int32
    assert granted(plan) == [4]
    assert granted(run_step(scheduler)[0]) is None, "as in the plan before"


def test_the_column_is_told_anew_with_another_set_of_rows() -> None:
    """Without rows of its own in the plan, none = 1 each."""
    scheduler = decoding(2, make_request("a", 5, max_tokens=40))
    assert granted(run_step(scheduler)[0]) == [3]
    scheduler.add([make_request("b", 5, max_tokens=40, first=50)])
    joining, _ = run_step(scheduler)
    assert (joining.decode_rows, granted(joining)) == (None, None)
    plan, _ = run_step(scheduler)
    assert plan.decode_rows is not None
    assert (plan.decode_rows.tolist(), granted(plan)) == ([0, 1], [3, 3])


def test_a_new_set_of_rows_of_the_same_length_tells_the_column_too() -> None:
    scheduler = with_drafts(2)
    first, second = make_request("a", 5, max_tokens=40), make_request("b", 5, max_tokens=40, first=50)
    scheduler.add([first, second])
    run_step(scheduler)
    scheduler.end(second)
    assert granted(run_step(scheduler)[0]) == [3]
    scheduler.end(first)
    third = make_request("c", 5, max_tokens=40, first=90)
    fourth = make_request("d", 5, max_tokens=40, first=130)
    scheduler.add([third, fourth])
    run_step(scheduler)
    assert third.row == 0 or fourth.row == 0
    scheduler.end(third if third.row == 0 else fourth)
    plan, _ = run_step(scheduler)
    assert plan.decode_rows is not None
    assert (plan.decode_rows.tolist(), granted(plan)) == ([1], [3])


def test_acceptance_is_learnt_from_the_answer_and_what_was_not_used_is_granted_again() -> None:
    request = make_request("a", 5, max_tokens=40)
    scheduler = decoding(3, request)
    for accepted, computed in ((1, 6), (4, 10), (2, 12), (3, 15)):
        plan = plan_step(scheduler)
        before = int(scheduler.rows.num_tokens[0])
        assert scheduler.rows.num_granted[0] == before - 1 + 4
        outputs = scheduler.update(answer(scheduler, plan, num_tokens=[accepted]))
        assert tokens(outputs, request) == [7] * accepted
        assert scheduler.rows.num_tokens[0] == before + accepted == computed + 1
        assert scheduler.rows.num_granted[0] == computed


def test_an_answer_without_counts_is_one_token_each() -> None:
    request = make_request("a", 5, max_tokens=40)
    scheduler = decoding(3, request)
    assert tokens(run_step(scheduler)[1], request) == [7]
    assert (scheduler.rows.num_tokens[0], scheduler.rows.num_granted[0]) == (7, 6)


def test_each_row_gets_its_own_tokens_and_a_prefilled_one_gets_one() -> None:
    scheduler = with_drafts(3)
    one, two = make_request("one", 5, max_tokens=40), make_request("two", 5, max_tokens=40, first=50)
    scheduler.add([one, two])
    run_step(scheduler)
    three = make_request("three", 5, first=90)
    scheduler.add([three])
    plan = plan_step(scheduler)
    texts = np.array([10, 11, 20, 21, 22, 30], np.int32)
    outputs = scheduler.update(StepResult(plan.step, texts, np.array([2, 3], np.int32)))
    assert [tokens(outputs, request) for request in (one, two, three)] == [[10, 11], [20, 21, 22], [30]]
    assert not outputs.one_each
    assert scheduler.rows.token_ids[:3, 5:9].tolist() == [[7, 10, 11, 0], [7, 20, 21, 22], [30, 0, 0, 0]]
    assert scheduler.rows.num_granted[:3].tolist() == [7, 8, 5]


def test_two_plans_ahead_each_grants_on_top_of_the_other() -> None:
    request = make_request("a", 5, max_tokens=40)
    scheduler = decoding(3, request)
    first, second = plan_step(scheduler), plan_step(scheduler)
    assert scheduler.rows.num_granted[0] == 5 + 4 + 4
    scheduler.update(answer(scheduler, first, num_tokens=[1]))
    assert scheduler.rows.num_granted[0] == 6 + 4
    scheduler.update(answer(scheduler, second, num_tokens=[3]))
    assert scheduler.rows.num_granted[0] == 6 + 3
    assert scheduler.rows.num_tokens[0] == 10


# -- the last tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_model_len", "max_tokens", "usable_blocks"), [(12, 50, 100), (64, 7, 100), (64, 50, 11)])
def test_nothing_is_granted_behind_the_last_token_that_may_come(
    max_model_len: int, max_tokens: int, usable_blocks: int
) -> None:
    """Twelve tokens at the latest: by the context, by its own limit, or as eleven blocks hold eleven."""
    request = make_request("a", 5, max_tokens=max_tokens)
    scheduler = decoding(3, request, max_model_len=max_model_len, usable_blocks=usable_blocks, block_size=1)
    grants: list[list[int]] = []
    while not request.ended:
        plan = plan_step(scheduler)
        grants.append(granted(plan) or grants[-1])
        scheduler.update(answer(scheduler, plan, num_tokens=[1]))
    assert grants == [[4], [4], [4], [3], [2], [1]]
    assert request.num_tokens == 12


def test_the_last_window_filled_at_once_ends_the_request() -> None:
    request = make_request("a", 5, max_tokens=50)
    scheduler = decoding(3, request, max_model_len=9)
    plan = plan_step(scheduler)
    assert granted(plan) == [3]
    assert outcomes(scheduler.update(answer(scheduler, plan, num_tokens=[3]))) == {"a": "length"}
    assert is_whole(scheduler)


def test_a_row_granted_all_while_an_answer_is_on_its_way_goes_on_if_it_did_not_get_all() -> None:
    request = make_request("a", 5, max_tokens=5)
    scheduler = decoding(3, request)
    first = plan_step(scheduler)
    assert granted(first) == [4]
    assert scheduler.schedule() is None, "its last token may be on its way"
    scheduler.update(answer(scheduler, first, num_tokens=[2]))
    assert granted(plan_step(scheduler)) == [2]


def test_one_that_may_get_all_leaves_the_others_plans_and_comes_back() -> None:
    short, long = make_request("short", 5, max_tokens=4), make_request("long", 5, max_tokens=40, first=50)
    scheduler = with_drafts(3)
    scheduler.add([short, long])
    run_step(scheduler)
    first, second = plan_step(scheduler), plan_step(scheduler)
    assert granted(first) == [3, 4]
    assert second.decode_rows is not None
    assert (second.decode_rows.tolist(), granted(second)) == ([1], [4])
    scheduler.update(answer(scheduler, first, num_tokens=[1, 1]))
    third = plan_step(scheduler)
    assert third.decode_rows is not None
    assert (third.decode_rows.tolist(), granted(third)) == ([0, 1], [2, 4])


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_blocks_are_there_for_all_drafts_and_those_of_rejected_ones_are_kept_for_later() -> None:
    """Blocks of 4 behind 5 computed tokens: four more need a third block, which serves the next steps too."""
    request = make_request("a", 5, max_tokens=40)
    scheduler = decoding(3, request, block_size=4)
    new_blocks = []
    for _ in range(7):
        plan = plan_step(scheduler)
        new_blocks.append(len(plan.block_ids))
        scheduler.update(answer(scheduler, plan, num_tokens=[1]))
    # Granted: 9, 10, 11, 12, 13, 14, 15 tokens.
    assert new_blocks == [1, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("num_prompt_tokens", range(1, 9))
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_a_grant_never_ends_behind_its_rows_blocks(num_prompt_tokens: int, num_draft_tokens: int) -> None:
    scheduler = decoding(num_draft_tokens, make_request("a", num_prompt_tokens, max_tokens=30), block_size=4)
    for accepted in (1, 2, 1, 2, 2, 1):
        plan = plan_step(scheduler)
        rows, num_blocks = scheduler.rows, int(scheduler.blocks.num_blocks[0])
        assert (num_blocks - 1) * 4 < rows.num_granted[0] <= num_blocks * 4
        scheduler.update(answer(scheduler, plan, num_tokens=[accepted]))


def test_blocks_of_rejected_drafts_come_back_with_the_request() -> None:
    request = make_request("a", 4, max_tokens=40)
    scheduler = decoding(5, request, block_size=2)
    scheduler.update(answer(scheduler, plan_step(scheduler), num_tokens=[1]))
    scheduler.end(request)
    assert is_whole(scheduler)


def test_a_full_block_is_found_only_once_its_tokens_are_answered() -> None:
    """Granted tokens may fill a block; only accepted ones tell what it holds."""
    scheduler = with_drafts(3, tokens=(64,), block_size=4)
    first = make_request("first", 6, max_tokens=40)
    scheduler.add([first])
    run_step(scheduler)
    probe = make_request("probe", 1)
    probe.token_ids = np.array([1, 2, 3, 4, 5, 6, 7, 7, 7], np.int32)
    for accepted, num_found in ((1, 1), (1, 2)):
        scheduler.update(answer(scheduler, plan_step(scheduler), num_tokens=[accepted]))
        scheduler.blocks.enter(probe)
        assert scheduler.blocks.find_prefix(probe).num_blocks == num_found


def test_an_answer_may_fill_several_blocks() -> None:
    scheduler = decoding(8, make_request("first", 4, max_tokens=40), block_size=2)
    scheduler.update(answer(scheduler, plan_step(scheduler), num_tokens=[7]))
    probe = make_request("probe", 4)
    probe.token_ids = np.array([1, 2, 3, 4] + [7] * 8, np.int32)
    scheduler.blocks.enter(probe)
    assert scheduler.blocks.find_prefix(probe).num_blocks == 5, "11 tokens are computed"


def test_windows_move_by_accepted_tokens_only() -> None:
    """A window of 4 in blocks of 2. Computed are 5, 6 and 10 tokens: the next query sees those from 2, 3 and 7 on."""
    scheduler = decoding(5, make_request("a", 4, max_tokens=40), block_size=2, groups=(window(4),))
    for accepted, first in ((1, 0), (1, 1), (4, 3)):
        scheduler.update(answer(scheduler, plan_step(scheduler), num_tokens=[accepted]))
        held = scheduler.blocks.tables[0, :, 0] > 0
        assert held[: scheduler.blocks.num_blocks[0]].argmax() == first


def preempted_in_flight() -> tuple[Scheduler, Request, Request, StepPlan]:
    """Two rows are granted 4 tokens each, to the end of their second blocks, and no third is free: `new` gives way."""
    scheduler = with_drafts(3, block_size=4)
    old, new = make_request("old", 4, max_tokens=40), make_request("new", 4, max_tokens=40, first=50)
    scheduler.add([old, new])
    run_step(scheduler)
    late = plan_step(scheduler)
    taken = scheduler.blocks.pool.allocate(scheduler.blocks.pool.num_free)
    assert taken is not None
    assert granted(plan_step(scheduler)) == [4]
    assert (old.row, new.row) == (0, None)
    return scheduler, old, new, late


def test_one_that_lost_its_row_gets_all_its_late_tokens() -> None:
    scheduler, old, new, late = preempted_in_flight()
    outputs = scheduler.update(result(late, [30], [40, 41, 42]))
    assert (tokens(outputs, old), tokens(outputs, new)) == ([30], [40, 41, 42])
    assert new.token_ids.tolist() == [50, 51, 52, 53, 7, 40, 41, 42]
    assert scheduler.rows.token_ids[0, :7].tolist() == [1, 2, 3, 4, 7, 30, 0]
    assert scheduler.rows.num_granted[0] == 5 + 4, "three of the late plan were not used, four are on their way"


def test_a_stop_among_its_late_tokens_drops_what_follows_it() -> None:
    scheduler, old, new, late = preempted_in_flight()
    outputs = scheduler.update(result(late, [1, 2], [3, EOS, 4]))
    assert (tokens(outputs, old), tokens(outputs, new)) == ([1, 2], [3, EOS])
    assert outcomes(outputs) == {"new": "stop"}
    assert new.token_ids.tolist() == [50, 51, 52, 53, 7, 3, EOS]


def test_where_blocks_are_short_drafts_are_given_up_before_anybody_gives_way() -> None:
    """Three tokens of room in the block that it has: granted 3, 2 and 1; only then a block is missing."""
    request, other = make_request("a", 5, max_tokens=40), make_request("b", 5, max_tokens=40, first=50)
    scheduler = with_drafts(3, block_size=4)
    scheduler.add([request, other])
    run_step(scheduler)
    taken = scheduler.blocks.pool.allocate(scheduler.blocks.pool.num_free)
    assert taken is not None
    for grant in (3, 2, 1):
        plan = plan_step(scheduler)
        assert granted(plan) == [grant, grant]
        scheduler.update(answer(scheduler, plan, num_tokens=[1, 1]))
    assert scheduler.statistics().num_preemptions == 0
    plan = plan_step(scheduler)
    assert (granted(plan), scheduler.statistics().num_preemptions) == ([4], 1)


def test_drafts_take_no_block_while_a_prompt_may_need_it() -> None:
    """Behind a prompt of 4 in blocks of 4: the next four tokens have a block when the long prompt comes."""
    scheduler = with_drafts(3, block_size=4, tokens=(8,))
    scheduler.add([make_request("decoding", 4, max_tokens=40)])
    run_step(scheduler)
    scheduler.add([make_request("long", 24, first=50)])
    grants, block_rows = [], []
    for _ in range(3):
        plan = plan_step(scheduler)
        grants.append(granted(plan))
        block_rows.append(plan.block_rows.tolist())
        scheduler.update(answer(scheduler, plan, num_tokens=[1]))
    assert grants == [[4], [3], [2]]
    assert block_rows == [[0, 1, 1], [1, 1], [1, 1]]
    plan = plan_step(scheduler)
    assert (granted(plan), plan.block_rows.tolist()) == ([4, 4], [0, 1]), "the prompt is through"


# -- ends inside what was accepted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [EOS, 5])
def test_a_stop_inside_accepted_tokens_drops_what_follows_it(stop: int) -> None:
    scheduler = with_drafts(3)
    stops = make_request("stops", 5, max_tokens=40, params={"stop_token_ids": (5,)})
    goes_on = make_request("goes on", 5, max_tokens=40, first=50)
    scheduler.add([stops, goes_on])
    run_step(scheduler)
    outputs = scheduler.update(result(plan_step(scheduler), [1, stop, 2, 3], [4, 6, 8]))
    assert (tokens(outputs, stops), tokens(outputs, goes_on)) == ([1, stop], [4, 6, 8])
    assert outcomes(outputs) == {"stops": "stop"}
    assert stops.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 1, stop]


def test_of_several_that_stop_at_once_each_keeps_its_own_tokens() -> None:
    scheduler = with_drafts(3)
    requests = [make_request(str(first), 5, max_tokens=40, first=first) for first in (100, 200, 300)]
    scheduler.add(requests)
    run_step(scheduler)
    outputs = scheduler.update(result(plan_step(scheduler), [1, EOS, 2], [3, 4], [EOS, 6, 6, 6]))
    assert [tokens(outputs, request) for request in requests] == [[1, EOS], [3, 4], [EOS]]
    assert outcomes(outputs) == {"100": "stop", "300": "stop"}


def test_a_failure_inside_accepted_tokens_keeps_those_before_it() -> None:
    request = make_request("a", 5, max_tokens=40)
    scheduler = decoding(3, request)
    outputs = scheduler.update(result(plan_step(scheduler), [1, -1, 2]))
    assert tokens(outputs, request) == [1]
    assert isinstance(outputs.finished[0].outcome, ModelOutputError)
    assert request.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 1]
    assert is_whole(scheduler)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "total"),
    [
        ([5, 1], 6),
        ([0, 1], 1),
        ([-1, 3], 2),
        ([4], 4),
        ([1, 1, 1], 3),
        ([1, 2], 4),
        ([1, 2], 2),
        (None, 3),
    ],
)
def test_an_answer_that_gives_more_than_was_granted_or_does_not_add_up_is_refused(
    num_tokens: list[int] | None, total: int
) -> None:
    scheduler = with_drafts(3)
    scheduler.add([make_request("a", 5, max_tokens=40), make_request("b", 5, max_tokens=40, first=50)])
    run_step(scheduler)
    plan = plan_step(scheduler)
    rows = scheduler.rows
    before = rows.num_tokens.tolist(), rows.num_granted.tolist(), rows.token_ids.tolist()
    counts = None if num_tokens is None else np.array(num_tokens, np.int32)
    with pytest.raises(ProtocolError, match=f"step {plan.step} "):
        scheduler.update(StepResult(plan.step, np.full(total, 7, np.int32), counts))
    after = rows.num_tokens.tolist(), rows.num_granted.tolist(), rows.token_ids.tolist()
    assert after == before, "nothing has changed"
    scheduler.update(answer(scheduler, plan, num_tokens=[4, 4]))


def test_without_drafts_an_answer_may_say_one_each_and_nothing_else() -> None:
    request = make_request("a", 5, max_tokens=40)
    scheduler = decoding(0, request)
    plan = plan_step(scheduler)
    with pytest.raises(ProtocolError):
        scheduler.update(answer(scheduler, plan, num_tokens=[2]))
    assert tokens(scheduler.update(answer(scheduler, plan, num_tokens=[1])), request) == [7]


# -- against a naive model ---------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 16)), min_size=1, max_size=5),
    num_draft_tokens=st.integers(0, 5),
    block_size=st.sampled_from([1, 2, 4]),
    ahead=st.sampled_from([1, 2]),
    seed=st.integers(0, 1 << 16),
)
def test_texts_are_those_without_drafts_whatever_is_accepted(
    shapes: list[tuple[int, int]], num_draft_tokens: int, block_size: int, ahead: int, seed: int
) -> None:
    """A model whose token behind i others is 1000 + i: drafts, preemption and late answers change no text."""
    rng = random.Random(seed)
    usable_blocks = 36 // block_size
    scheduler = with_drafts(
        num_draft_tokens, usable_blocks=usable_blocks, block_size=block_size, seqs=(3,), tokens=(8,)
    )
    worker = NaiveWorker(
        scheduler.configure,
        next_token=lambda token_ids: 1000 + len(token_ids),
        num_accepted=lambda granted: rng.randint(1, granted),
        fails=lambda: False,
        world_of=lambda row: None,
    )
    requests = [
        make_request(str(index), length, max_tokens, first=100 * index)
        for index, (length, max_tokens) in enumerate(shapes)
    ]
    scheduler.add(requests)
    results: deque[StepResult] = deque()
    while not all(request.ended for request in requests):
        plan = scheduler.schedule() if len(results) < ahead else None
        if plan is None:
            scheduler.update(results.popleft())
        else:
            results.append(worker.execute(plan, all_answered=not results))
    for request, (length, max_tokens) in zip(requests, shapes, strict=True):
        assert request.token_ids[length:].tolist() == list(range(1000 + length, 1000 + length + max_tokens))
    assert all(scheduler.update(late).token_ids.size == 0 for late in results)
    assert is_whole(scheduler)


def test_a_lone_request_fills_a_cache_of_full_attention_to_the_last_block() -> None:
    scheduler = with_drafts(5, usable_blocks=4, block_size=4, max_model_len=64)
    request = make_request("a", 5, max_tokens=50)
    run(scheduler, request)
    assert request.num_tokens == 17
    assert scheduler.statistics().num_preemptions == 0
