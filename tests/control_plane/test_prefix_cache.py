"""Prefixes that are shared: what is found, by whom, from when on, and what must never be found."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import make_request, make_scheduler, run_step

from blockplane.control_plane.engine import prefix_cache
from blockplane.control_plane.engine.block_pool import BlockPool
from blockplane.control_plane.engine.prefix_cache import BlockContent, PrefixCache
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.protos.plan import StepPlan, StepResult

B = 4


def contents_of(cache: PrefixCache, token_ids: list[int], **extras: str) -> list[BlockContent]:
    contents: list[BlockContent] = []
    cache.extend(contents, cache.root(extras), np.array(token_ids, np.int32))
    return contents


def finish(scheduler: Scheduler, *requests: Request) -> list[StepPlan]:
    """Run until these have ended, then anything else that is queued stays."""
    plans = []
    while not all(request.ended for request in requests):
        plans.append(run_step(scheduler)[0])
    return plans


def scheduled_tokens(plans: list[StepPlan]) -> int:
    return sum(int(plan.prefill_num_tokens.sum()) for plan in plans)


# -- the cache by itself -----------------------------------------------------------------------------------------------


def test_only_full_blocks_have_content() -> None:
    cache = PrefixCache(B)
    assert [len(contents_of(cache, list(range(n)))) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_contents_do_not_depend_on_how_they_were_extended(token_ids: list[int], cuts: list[int]) -> None:
    cache = PrefixCache(B)
    contents: list[BlockContent] = []
    for end in [*sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]:
        cache.extend(contents, cache.root({}), np.array(token_ids[len(contents) * B : end], np.int32))
    assert contents == contents_of(cache, token_ids)


def test_a_block_is_found_behind_its_own_prefix_alone() -> None:
    cache = PrefixCache(B)
    first, second = contents_of(cache, [1, 1, 1, 1, 2, 2, 2, 2])
    cache.publish(7, first)
    cache.publish(8, second)
    assert cache.find([first, second]) == [7, 8]
    assert cache.find(contents_of(cache, [2, 2, 2, 2, 1, 1, 1, 1])) == []
    assert cache.find(contents_of(cache, [1, 1, 1, 1, 2, 2, 2, 3])) == [7]


def test_a_salt_changes_every_key_of_the_chain() -> None:
    cache = PrefixCache(B)
    tokens = list(range(12))
    plain, salted = contents_of(cache, tokens), contents_of(cache, tokens, salt="a")
    assert not {content.key for content in plain} & {content.key for content in salted}
    assert contents_of(cache, tokens, salt="a") == salted


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"adapter": "X"}, {"salt": "X"}),
        ({"adapter": "Xsalt"}, {"adapter": "X", "salt": ""}),
        ({"adapter": "X", "salt": "Y"}, {"adapter": "Y", "salt": "X"}),
        ({"salt": ""}, {}),
    ],
)
def test_a_value_of_one_kind_is_none_of_another(one: dict[str, str], other: dict[str, str]) -> None:
    cache = PrefixCache(B)
    assert cache.root(one) != cache.root(other)


def test_two_caches_have_unrelated_keys() -> None:
    assert contents_of(PrefixCache(B), [1, 2, 3, 4]) != contents_of(PrefixCache(B), [1, 2, 3, 4])


def test_content_that_two_blocks_hold_is_found_in_the_first_until_that_is_forgotten() -> None:
    cache = PrefixCache(B)
    (content,) = contents_of(cache, [1, 2, 3, 4])
    cache.publish(5, content)
    cache.publish(6, content)
    assert cache.find([content]) == [5]
    cache.forget(6)
    assert cache.find([content]) == [5]
    cache.forget(5)
    assert cache.find([content]) == []


def test_after_a_reset_nothing_is_found() -> None:
    cache = PrefixCache(B)
    (content,) = contents_of(cache, [1, 2, 3, 4])
    cache.publish(5, content)
    cache.reset()
    assert cache.find([content]) == []
    cache.publish(6, content)
    assert cache.find([content]) == [6]


# -- the pool by itself ------------------------------------------------------------------------------------------------


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(7, on_reuse=lambda block_id: None)
    held = pool.allocate(3)
    assert held is not None
    before = OrderedDict(pool._free), list(pool._num_holders)
    assert pool.allocate(4) is None
    assert (pool._free, pool._num_holders) == before
    assert list(pool._free) == list(before[0]), "not even the order"


def test_the_block_that_is_free_longest_is_reused_first_and_a_chain_s_tail_before_its_head() -> None:
    reused: list[int] = []
    pool = BlockPool(7, on_reuse=reused.append)
    first, second = pool.allocate(3), pool.allocate(3)
    assert first is not None
    assert second is not None
    pool.release(second)
    pool.release(first)
    assert pool.allocate(6) == [*reversed(second), *reversed(first)]
    assert reused[6:] == [*reversed(second), *reversed(first)]


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(3, on_reuse=lambda block_id: None)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.hold(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 1
    assert pool.num_free_among(block_ids) == 0
    pool.release(block_ids)
    assert pool.num_free == 2
    pool.hold(block_ids)
    assert pool.num_free == 1


# -- through the scheduler ---------------------------------------------------------------------------------------------


def test_the_second_of_two_equal_prompts_computes_its_last_block_only() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14, max_tokens=1), make_request("second", 14, max_tokens=1)
    scheduler.add(first)
    finish(scheduler, first)
    scheduler.add(second)
    (plan,) = finish(scheduler, second)
    assert plan.admissions[0].num_computed_tokens == 12
    assert plan.prefill_num_tokens.tolist() == [2]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)


@pytest.mark.parametrize("num_tokens", [k * B + offset for k in (1, 2, 3) for offset in (-1, 0, 1)])
def test_a_hit_never_covers_the_last_token(num_tokens: int) -> None:
    scheduler = make_scheduler(tokens=(64,))
    for name in ("first", "second"):
        request = make_request(name, num_tokens, max_tokens=1)
        scheduler.add(request)
        (plan,) = finish(scheduler, request)
    assert plan.prefill_num_tokens.tolist() == [num_tokens - (num_tokens - 1) // B * B]


def test_what_a_request_generated_is_found_by_one_that_continues_it() -> None:
    scheduler = make_scheduler(tokens=(64,))
    request = make_request("first", 6, max_tokens=8)
    scheduler.add(request)
    finish(scheduler, request)
    turn = Request("next turn", [*request.token_ids, 1, 2, 3], 17, request.params, seed=0)
    scheduler.add(turn)
    finish(scheduler, turn)
    assert turn.num_cached_tokens == 12, "the 13th token was computed too, in a block that is not full"


def test_two_equal_prompts_at_once_are_computed_once_and_neither_reads_what_its_own_plan_writes() -> None:
    scheduler = make_scheduler(tokens=(64,))
    requests = [make_request(name, 14, max_tokens=1) for name in ("first", "second")]
    for request in requests:
        scheduler.add(request)
    plans = finish(scheduler, *requests)
    assert [plan.prefill_num_tokens.tolist() for plan in plans] == [[14], [2]]


def test_32_prompts_with_one_long_prefix_compute_it_once() -> None:
    scheduler = make_scheduler(usable_blocks=400, tokens=(32,), seqs=(32,), max_model_len=256)
    requests = [make_request(str(index), 102, max_tokens=1) for index in range(32)]
    for index, request in enumerate(requests):
        request.token_ids[100:] = [200 + index, 300 + index]
        scheduler.add(request)
    assert scheduled_tokens(finish(scheduler, *requests)) == 100 + 32 * 2


def test_one_that_waits_for_a_block_lets_others_pass() -> None:
    scheduler = make_scheduler(tokens=(64,))
    for name, first in (("one", 1), ("same", 1), ("other", 50)):
        scheduler.add(make_request(name, 14, first=first))
    plan, _ = run_step(scheduler)
    assert [admission.token_ids[0] for admission in plan.admissions] == [1, 50]
    plan, _ = run_step(scheduler)
    assert [admission.num_computed_tokens for admission in plan.admissions] == [12]


def test_an_aborted_request_s_blocks_are_found_since_its_plan_was_sent() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14), make_request("second", 14)
    scheduler.add(first)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.end(first)
    scheduler.update(StepResult(plan.step, np.array([7], np.int32)))
    scheduler.add(second)
    assert run_step(scheduler)[0].admissions[0].num_computed_tokens == 12


def test_a_request_cancelled_before_its_plan_leaves_nothing_to_find() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14), make_request("second", 14)
    scheduler.add(first)
    scheduler.end(first)
    scheduler.add(second)
    assert run_step(scheduler)[0].admissions[0].num_computed_tokens == 0


def test_reused_blocks_are_found_no_more_from_the_first_of_them_on() -> None:
    """Everything else is allocated until two of the prefix's three blocks are reused: its tail goes first."""
    scheduler = make_scheduler(usable_blocks=6, tokens=(64,))
    first = make_request("first", 13, max_tokens=1)
    scheduler.add(first)
    finish(scheduler, first)
    # Two blocks were never used, the unfinished one and the prefix's last two are reused, its head stays.
    other = make_request("other", 20, max_tokens=1, first=50)
    scheduler.add(other)
    finish(scheduler, other)
    again = make_request("again", 13, max_tokens=1)
    scheduler.add(again)
    finish(scheduler, again)
    assert again.num_cached_tokens == 4


def test_a_prefix_counts_against_the_room_only_where_nobody_holds_it() -> None:
    """A cached prefix of three free blocks and four new ones do not fit in six; three and three do."""
    for num_tokens, fits in ((25, False), (24, True)):
        scheduler = make_scheduler(usable_blocks=6, tokens=(64,))
        first = make_request("first", 13, max_tokens=1)
        scheduler.add(first)
        finish(scheduler, first)
        request = make_request("next", num_tokens, max_tokens=1)
        prefix = list(range(1, 4))
        scheduler.blocks.enter(request)
        assert sorted(scheduler.blocks.find_prefix(request)) == prefix
        before = list(scheduler.blocks.pool._free), list(scheduler.blocks.pool._num_holders)
        assert scheduler.blocks.has_room(request, prefix, reserve=0) is fits
        assert (list(scheduler.blocks.pool._free), scheduler.blocks.pool._num_holders) == before


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(usable_blocks=8, tokens=(64,), max_model_len=64)
    old, new = make_request("old", 12, max_tokens=12), make_request("new", 13, max_tokens=12, first=50)
    scheduler.add(old)
    scheduler.add(new)
    run_step(scheduler)
    while not scheduler.waiting:
        run_step(scheduler)
    resumed_length = new.num_tokens
    plans = finish(scheduler, old)
    plans += finish(scheduler, new)
    (readmission,) = [admission for plan in plans for admission in plan.admissions]
    assert len(readmission.token_ids) == resumed_length
    assert readmission.num_computed_tokens > 0
    (resumed,) = [plan for plan in plans if plan.admissions]
    assert resumed.prefill_num_tokens.tolist() == [resumed_length - readmission.num_computed_tokens]
    assert new.num_cached_tokens == 0, "counted once, at its first admission"


def test_requests_of_different_salts_share_nothing() -> None:
    scheduler = make_scheduler(tokens=(64,))
    cached = []
    for name, salt in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "")):
        request = make_request(name, 14, max_tokens=1)
        request.cache_salt = salt
        scheduler.add(request)
        finish(scheduler, request)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 12, 0]


def test_a_key_that_always_collides_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache.PrefixCache, "_digest", lambda cache, data: b"7")
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14, max_tokens=1), make_request("second", 14, max_tokens=1, first=50)
    for request in (first, second):
        scheduler.add(request)
        finish(scheduler, request)
    assert second.num_cached_tokens == 0


def test_a_failed_request_s_blocks_are_not_found() -> None:
    scheduler = make_scheduler(tokens=(64,))
    first, second = make_request("first", 14), make_request("second", 14)
    scheduler.add(first)
    run_step(scheduler, token_id=-1)
    scheduler.add(second)
    assert run_step(scheduler)[0].admissions[0].num_computed_tokens == 0


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler = Scheduler(make_scheduler().configure, (), 10, prefix_caching=False)
    for name in ("first", "second"):
        request = make_request(name, 14, max_tokens=1)
        scheduler.add(request)
        finish(scheduler, request)
        assert request.num_cached_tokens == 0
