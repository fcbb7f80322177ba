"""Prefixes that are shared: what is found, by whom, from when on, and what must never be found."""

from typing import Any

import numpy as np
import pytest
from driving import (
    FULL,
    Watcher,
    answer,
    finish,
    is_whole,
    make_request,
    make_scheduler,
    plan_step,
    run,
    run_step,
    tokens,
    window,
)

from blockplane.control_plane.engine.kv_blocks import Prefix
from blockplane.control_plane.engine.request import Request
from blockplane.protos.plan import StepPlan

B = 4


def scheduled_tokens(plans: list[StepPlan]) -> int:
    return sum(int(plan.prefill_num_tokens.sum()) for plan in plans)


def test_the_second_of_two_equal_prompts_computes_its_last_block_only() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14, max_tokens=1), make_request("second", 14, max_tokens=1)
    (cold,), (warm,) = run(scheduler, first), run(scheduler, second)
    assert warm.admissions[0].num_computed_tokens == 12
    assert warm.prefill_num_tokens.tolist() == [2]
    assert warm.block_ids.tolist() == [*cold.block_ids[:3].tolist(), 5], "the first three of four are the same blocks"
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)


@pytest.mark.parametrize("num_tokens", [k * B + offset for k in (1, 2, 3) for offset in (-1, 0, 1)])
def test_a_hit_never_covers_the_last_token(num_tokens: int) -> None:
    scheduler = make_scheduler(tokens=(64,))
    for _ in range(2):
        (plan,) = run(scheduler, make_request("a", num_tokens, max_tokens=1))
    assert plan.prefill_num_tokens.tolist() == [num_tokens - (num_tokens - 1) // B * B]


@pytest.mark.parametrize("suffix", [1, B - 1, B, B + 1, 15, 16, 17])
@pytest.mark.parametrize("prefix", [B, 2 * B, 3 * B + 1])
def test_behind_a_cached_prefix_just_the_rest_is_computed_and_in_the_same_segments(prefix: int, suffix: int) -> None:
    """Warm or cold the segments end at the same tokens, or fall out."""
    plans = {}
    for caching in (False, True):
        scheduler = make_scheduler(tokens=(16,), prefix_caching=caching)
        run(scheduler, make_request("prefix", prefix, max_tokens=1))
        request = make_request("a", prefix + suffix, max_tokens=3)
        request.token_ids[prefix:] += 1000
        plans[caching] = run(scheduler, request)
        assert request.num_tokens == prefix + suffix + 3
    cached = plans[True][0].admissions[0].num_computed_tokens
    assert cached == prefix // B * B
    assert scheduled_tokens(plans[True]) == scheduled_tokens(plans[False]) - cached


def test_what_a_request_generated_is_found_by_one_that_continues_it() -> None:
    scheduler = make_scheduler(tokens=(64,))
    request = make_request("first", 6, max_tokens=8)
    run(scheduler, request)
    turn = make_request("next turn", 17, max_tokens=1)
    turn.token_ids = np.append(request.token_ids, np.array([1, 2, 3], np.int32))
    run(scheduler, turn)
    assert turn.num_cached_tokens == 12, "the 13th token was computed too, in a block that is not full"


def test_two_equal_prompts_at_once_are_computed_once_and_neither_reads_what_its_own_plan_writes() -> None:
    scheduler = make_scheduler(tokens=(64,))
    requests = [make_request(name, 14, max_tokens=1) for name in ("first", "second")]
    scheduler.add(requests)
    plans = finish(scheduler, *requests)
    assert [plan.prefill_num_tokens.tolist() for plan in plans] == [[14], [2]]


def test_one_that_waits_for_a_block_lets_others_pass() -> None:
    scheduler = make_scheduler(tokens=(64,))
    scheduler.add([make_request(name, 14, first=first) for name, first in (("one", 1), ("same", 1), ("other", 50))])
    plan, _ = run_step(scheduler)
    assert [admission.token_ids[0] for admission in plan.admissions] == [1, 50]
    plan, _ = run_step(scheduler)
    assert [admission.num_computed_tokens for admission in plan.admissions] == [12]


def test_followers_wait_until_the_leader_has_all_that_they_share_and_no_longer() -> None:
    """A leader of ten blocks, four in each step; the follower shares six of them."""
    scheduler = make_scheduler(tokens=(16,))
    leader, follower = make_request("leader", 40, max_tokens=1), make_request("follower", 40, max_tokens=1)
    follower.token_ids[24:] += 1000
    scheduler.add([leader, follower])
    plans = finish(scheduler, leader, follower)
    assert [plan.prefill_num_tokens.tolist() for plan in plans] == [[16], [16], [8, 8], [8]]
    assert follower.num_cached_tokens == 24


def test_one_that_waits_behind_another_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once before it waits, and once when the leader, three segments later, has what they share."""
    scheduler = make_scheduler(tokens=(16,))
    leader, follower = make_request("leader", 47, max_tokens=1), make_request("follower", 47, max_tokens=1)
    find_prefix = scheduler.blocks.find_prefix
    looked_up: list[Request] = []

    def listening(request: Request) -> Prefix:
        looked_up.append(request)
        return find_prefix(request)

    monkeypatch.setattr(scheduler.blocks, "find_prefix", listening)
    scheduler.add([leader, follower])
    finish(scheduler, leader, follower)
    assert (looked_up.count(leader), looked_up.count(follower)) == (1, 2)
    assert follower.num_cached_tokens == 44


def test_nobody_waits_for_a_block_that_it_could_not_share() -> None:
    """The block with its last token is computed in any case."""
    scheduler = make_scheduler(tokens=(64,))
    run(scheduler, make_request("first", 5, max_tokens=1))
    scheduler.add([make_request("one", 8), make_request("same", 8)])
    assert run_step(scheduler)[0].prefill_num_tokens.tolist() == [4, 4]


def test_the_last_block_that_can_be_shared_is_waited_for_too() -> None:
    scheduler = make_scheduler(tokens=(64,))
    run(scheduler, make_request("first", 5, max_tokens=1))
    leader, follower = (make_request(name, 9, max_tokens=1) for name in ("leader", "follower"))
    scheduler.add([leader, follower])
    finish(scheduler, leader, follower)
    assert (leader.num_cached_tokens, follower.num_cached_tokens) == (4, 8)


def test_what_is_cached_takes_nothing_of_the_prefill_budget() -> None:
    scheduler = make_scheduler(tokens=(16,))
    run(scheduler, make_request("first", 14, max_tokens=1))
    scheduler.add([make_request("cold", 14, first=50), make_request("warm", 14)])
    assert run_step(scheduler)[0].prefill_num_tokens.tolist() == [14, 2]


def test_a_follower_goes_on_alone_when_its_leader_is_gone() -> None:
    scheduler = make_scheduler(tokens=(16,))
    leader, follower = make_request("leader", 40, max_tokens=1), make_request("follower", 40, max_tokens=1)
    scheduler.add([leader, follower])
    run_step(scheduler)
    assert follower.row is None
    scheduler.end(leader)
    plan, _ = run_step(scheduler)
    assert [admission.num_computed_tokens for admission in plan.admissions] == [16]
    finish(scheduler, follower)
    assert is_whole(scheduler)


def test_an_aborted_requests_blocks_are_found_since_its_plan_was_sent() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14), make_request("second", 14)
    scheduler.add([first])
    plan = plan_step(scheduler)
    scheduler.end(first)
    scheduler.update(answer(scheduler, plan))
    scheduler.add([second])
    assert run_step(scheduler)[0].admissions[0].num_computed_tokens == 12


def test_a_request_cancelled_before_its_plan_leaves_nothing_to_find() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14), make_request("second", 14)
    scheduler.add([first])
    scheduler.end(first)
    scheduler.add([second])
    plan, outputs = run_step(scheduler)
    assert plan.admissions[0].num_computed_tokens == 0
    assert tokens(outputs, second) == [7]


def test_reused_blocks_are_found_no_more_from_the_first_of_them_on() -> None:
    """Everything else is allocated until two of the prefix's three blocks are reused: its tail goes first."""
    scheduler = make_scheduler(usable_blocks=6, tokens=(64,))
    run(scheduler, make_request("first", 13, max_tokens=1))
    # Two blocks were never used, the unfinished one and the prefix's last two are reused, its head stays.
    run(scheduler, make_request("other", 20, max_tokens=1, first=50))
    again, other_again = (
        make_request("again", 13, max_tokens=1),
        make_request("other again", 20, max_tokens=1, first=50),
    )
    run(scheduler, again)
    assert again.num_cached_tokens == 4
    run(scheduler, other_again)
    assert other_again.num_cached_tokens == 8, "of five blocks the last three are reused, the last of all first"


@pytest.mark.parametrize(("num_tokens", "fits"), [(25, False), (24, True)])
def test_a_prefix_counts_against_the_room_only_where_nobody_holds_it(num_tokens: int, fits: bool) -> None:
    """A cached prefix of three free blocks and four new ones do not fit in six; three and three do."""
    scheduler = make_scheduler(usable_blocks=6, tokens=(64,))
    run(scheduler, make_request("first", 13, max_tokens=1))
    blocks = scheduler.blocks
    request = make_request("next", num_tokens, max_tokens=1)
    blocks.enter(request)
    before = blocks.pool.free_list(), [blocks.pool.num_holders(block_id) for block_id in range(7)]
    prefix = blocks.find_prefix(request)
    assert prefix.block_ids.ravel().tolist() == [1, 2, 3]
    assert blocks.has_room(num_tokens, prefix, num_rows=0) is fits
    assert (blocks.pool.free_list(), [blocks.pool.num_holders(block_id) for block_id in range(7)]) == before
    assert blocks.find_prefix(request).block_ids.ravel().tolist() == [1, 2, 3]
    if fits:
        blocks.take(0, prefix)
        assert blocks.grow(np.array([0]), np.array([3])) is not None
        assert blocks.pool.num_free == 0


def test_a_prefix_that_others_hold_takes_no_room() -> None:
    """A running one holds the three blocks and one of its own; two of six are free: for one and a reserve."""
    for num_tokens, fits in ((16, True), (17, False)):
        scheduler = make_scheduler(usable_blocks=6, tokens=(64,))
        scheduler.add([make_request("first", 13)])
        run_step(scheduler)
        scheduler.add([make_request("next", num_tokens)])
        assert len(run_step(scheduler)[0].admissions) == fits


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """It computes its length less the hit; what was cached is counted at the first admission alone."""
    scheduler = make_scheduler(usable_blocks=8, tokens=(64,), max_model_len=64)
    old, new = make_request("old", 12, max_tokens=12), make_request("new", 13, max_tokens=12, first=50)
    scheduler.add([old, new])
    run_step(scheduler)
    while not len(scheduler.waiting):
        run_step(scheduler)
    resumed_length = new.num_tokens
    plans = finish(scheduler, old, new)
    (resumed,) = [plan for plan in plans if plan.admissions]
    (admission,) = resumed.admissions
    assert len(admission.token_ids) == resumed_length
    assert admission.num_computed_tokens > 0
    assert resumed.prefill_num_tokens.tolist() == [resumed_length - admission.num_computed_tokens]
    assert new.num_cached_tokens == 0


def test_requests_of_different_salts_share_nothing() -> None:
    scheduler = make_scheduler(tokens=(64,))
    requests = [make_request(salt, 14, max_tokens=1, cache_salt=salt) for salt in ("a", "b", "a", "", "a", "")]
    for request in requests:
        run(scheduler, request)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 12, 0, 12, 12]


def test_one_that_opts_out_neither_finds_nor_leaves_anything() -> None:
    scheduler = make_scheduler(tokens=(64,))
    requests = [make_request("a", 14, max_tokens=5, skip_prefix_cache=skips) for skips in (True, False, True, False)]
    for request in requests:
        run(scheduler, request)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 12]


def test_renewed_weights_leave_nothing_of_the_old_ones_to_find() -> None:
    scheduler = make_scheduler(tokens=(64,))
    requests = [make_request("a", 14, max_tokens=1) for _ in range(4)]
    run(scheduler, requests[0])
    scheduler.renew_weights()
    run(scheduler, requests[1])
    run(scheduler, requests[2])
    scheduler.renew_weights()
    run(scheduler, requests[3])
    assert [request.num_cached_tokens for request in requests] == [0, 0, 12, 0]


def test_renewed_weights_count_for_those_that_wait_and_what_runs_leaves_nothing_for_them() -> None:
    scheduler = make_scheduler(tokens=(8,), seqs=(1,))
    running, waiting = make_request("running", 14, max_tokens=4), make_request("waiting", 14, max_tokens=1)
    scheduler.add([running, waiting])
    run_step(scheduler)
    scheduler.renew_weights()
    finish(scheduler, running, waiting)
    assert waiting.num_cached_tokens == 0
    again = make_request("again", 14, max_tokens=1)
    run(scheduler, again)
    assert again.num_cached_tokens == 12


def test_after_a_reset_nothing_that_was_cached_is_found_and_what_comes_then_is() -> None:
    scheduler = make_scheduler(tokens=(64,), groups=(FULL, window(8)))
    requests = [make_request("a", 14, max_tokens=1) for _ in range(3)]
    run(scheduler, requests[0])
    scheduler.blocks.cache.reset()
    run(scheduler, requests[1])
    run(scheduler, requests[2])
    assert [request.num_cached_tokens for request in requests] == [0, 0, 12]
    assert is_whole(scheduler)


class AlwaysSeven:
    """A hash of which nobody should rely on more than it gives."""

    def copy(self) -> "AlwaysSeven":
        return self

    def update(self, data: bytes) -> None:
        pass

    def digest(self) -> bytes:
        return b"7"


@pytest.mark.parametrize("together", [False, True])
def test_a_key_that_always_collides_shares_nothing(together: bool) -> None:
    scheduler = make_scheduler(tokens=(64,))
    scheduler.blocks.cache._hash = AlwaysSeven()  # type: ignore[assignment]
    first, second = make_request("first", 14, max_tokens=1), make_request("second", 14, max_tokens=1, first=50)
    if together:
        scheduler.add([first, second])
        finish(scheduler, first, second)
    else:
        run(scheduler, first)
        run(scheduler, second)
    assert second.num_cached_tokens == 0
    assert second.token_ids.tolist() == [*range(50, 64), 7]
    assert is_whole(scheduler)


def test_a_failed_requests_blocks_are_not_found() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14), make_request("second", 14)
    scheduler.add([first])
    run_step(scheduler, token_id=-1)
    scheduler.add([second])
    assert run_step(scheduler)[0].admissions[0].num_computed_tokens == 0


def test_neither_are_those_that_it_filled_while_it_decoded() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first = make_request("first", 6, max_tokens=20)
    scheduler.add([first])
    for _ in range(4):
        run_step(scheduler)
    run_step(scheduler, token_id=-1)
    probe = make_request("second", 9, max_tokens=1)
    probe.token_ids[6:] = 7
    run(scheduler, probe)
    assert probe.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler = make_scheduler(tokens=(64,), prefix_caching=False)
    for _ in range(2):
        request = make_request("a", 14, max_tokens=6)
        run(scheduler, request)
        assert request.num_cached_tokens == 0


def test_a_watcher_hears_of_full_attentions_blocks_when_they_can_be_found() -> None:
    """Of a prompt's when its plan is made, of generated ones when they are answered; of the full attention alone."""
    watcher = Watcher()
    scheduler = make_scheduler(tokens=(64,), groups=(FULL, window(4)), watcher=watcher)
    scheduler.add([make_request("a", 9, max_tokens=20)])
    plan = plan_step(scheduler)
    assert [heard[3] for heard in watcher.heard] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    scheduler.update(answer(scheduler, plan))
    watcher.heard.clear()
    for _ in range(2):
        run_step(scheduler)
    plan = plan_step(scheduler)
    assert watcher.heard == []
    scheduler.update(answer(scheduler, plan))
    assert [heard[3] for heard in watcher.heard] == [[9, 7, 7, 7]]


@pytest.mark.parametrize(("salt", "groups"), [("a", (FULL,)), ("", (window(8),))])
def test_a_watcher_hears_of_nothing_salted_and_of_no_window(salt: str, groups: Any) -> None:
    watcher = Watcher()
    scheduler = make_scheduler(tokens=(64,), groups=groups, watcher=watcher)
    run(scheduler, make_request("a", 14, max_tokens=10, cache_salt=salt))
    assert watcher.heard == []


def test_a_watcher_hears_when_a_block_is_reused() -> None:
    watcher = Watcher()
    scheduler = make_scheduler(usable_blocks=4, tokens=(64,), watcher=watcher)
    run(scheduler, make_request("a", 14, max_tokens=1))
    stored = [heard[1] for heard in watcher.heard]
    watcher.heard.clear()
    scheduler.add([make_request("b", 5, max_tokens=1, first=50)])
    plan_step(scheduler)
    assert watcher.heard[0] == ("removed", stored[2]), "the tail, of which the unfinished fourth block went first"
    assert [heard[0] for heard in watcher.heard] == ["removed", "stored"]


def test_a_watcher_hears_of_the_public_after_the_weights_are_renewed() -> None:
    watcher = Watcher()
    scheduler = make_scheduler(tokens=(8,), watcher=watcher)
    old = make_request("old", 16, max_tokens=1)
    scheduler.add([old])
    run_step(scheduler)
    watcher.heard.clear()
    scheduler.renew_weights()
    assert watcher.heard == [("cleared",)]
    watcher.heard.clear()
    finish(scheduler, old)
    assert watcher.heard == [], "nobody could find what goes on with the old ones"
    run(scheduler, make_request("new", 5, max_tokens=1))
    assert [heard[3] for heard in watcher.heard] == [[1, 2, 3, 4]]
