"""What an engine tells of itself: as it stands, and counted once."""

import random
from dataclasses import replace

import pytest
from driving import (
    FULL,
    answer,
    finish,
    make_request,
    make_scheduler,
    plan_step,
    run_step,
    two_that_do_not_fit,
    window,
)
from walk import Walk, random_configure, random_operation

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.statistics import EngineStatistics, Statistics
from blockplane.protos.wire import statistics_to_proto


def test_a_fresh_scheduler_has_nothing_to_tell() -> None:
    statistics = make_scheduler(groups=(FULL, window(8))).statistics()
    assert statistics == Statistics(0, 0, 0, 0.0, (0, 0), 0, 0, 0, 0, 0, 0)


def test_those_that_run_and_those_that_wait_are_told_apart() -> None:
    scheduler = make_scheduler(seqs=(2,), usable_blocks=10, tokens=(32,))
    scheduler.add([make_request(name, 7, first=100 * index) for index, name in enumerate("abc")])
    run_step(scheduler)
    statistics = scheduler.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.num_waiting_tokens) == (2, 1, 7)
    assert statistics.kv_cache_usage == pytest.approx(4 / 10)


def test_cached_tokens_are_counted_once_however_often_a_request_is_admitted() -> None:
    scheduler, old, new = two_that_do_not_fit()
    finish(scheduler, old, new)
    before = scheduler.statistics()
    assert before.num_preemptions == 1
    assert (before.num_admitted, before.num_prompt_tokens, before.num_cached_tokens) == (2, 11, 0)
    again = make_request("again", 9, max_tokens=1)
    scheduler.add([again])
    finish(scheduler, again)
    after = scheduler.statistics()
    assert (after.num_admitted, after.num_prompt_tokens, after.num_cached_tokens) == (3, 20, 4)


def test_blocks_that_all_running_requests_share_are_told_per_group() -> None:
    scheduler = make_scheduler(groups=(FULL, window(16)), tokens=(64,))
    scheduler.add([make_request("a", 13, max_tokens=20)])
    run_step(scheduler)
    assert scheduler.statistics().num_common_prefix_blocks == (4, 4)
    scheduler.add([make_request("b", 10, max_tokens=20)])
    run_step(scheduler)
    assert scheduler.statistics().num_common_prefix_blocks == (2, 2)
    for _ in range(7):
        run_step(scheduler)
    assert scheduler.statistics().num_common_prefix_blocks == (2, 0), "the first block left the window of one"


def test_drafts_are_counted_as_they_are_answered_though_their_request_has_ended() -> None:
    """Two rows guess three tokens each; one of them is aborted before the answer comes."""
    scheduler = make_scheduler(configure={"num_draft_tokens": 3})
    requests = [make_request(name, 5, max_tokens=40, first=100 * index) for index, name in enumerate("ab")]
    scheduler.add(requests)
    run_step(scheduler)
    plan = plan_step(scheduler)
    scheduler.end(requests[0])
    scheduler.update(replace(answer(scheduler, plan, num_tokens=[3, 2]), num_draft_tokens=6))
    statistics = scheduler.statistics()
    assert (statistics.num_draft_tokens, statistics.num_accepted_tokens) == (6, 3)
    scheduler.update(answer(scheduler, plan_step(scheduler)))
    assert scheduler.statistics() == replace(statistics, kv_cache_usage=scheduler.statistics().kv_cache_usage)


@pytest.mark.parametrize("seed", range(3))
def test_usage_is_what_is_not_free_and_counts_never_go_down(seed: int) -> None:
    rng = random.Random(seed)
    walk = Walk(random_configure(rng), rng)
    scheduler, before = walk.scheduler, walk.scheduler.statistics()
    for _ in range(300):
        getattr(walk, random_operation(rng))()
        if walk.scheduler is not scheduler:
            scheduler, before = walk.scheduler, walk.scheduler.statistics()
        statistics, pool = scheduler.statistics(), scheduler.blocks.pool
        assert statistics.kv_cache_usage == 1 - len(pool.free_list()) / pool.num_usable
        for name in ("num_admitted", "num_prompt_tokens", "num_cached_tokens", "num_preemptions"):
            assert getattr(statistics, name) >= getattr(before, name)
        assert statistics.num_cached_tokens <= statistics.num_prompt_tokens
        before = statistics


def test_every_figure_has_its_field_on_the_wire() -> None:
    group = Statistics(1, 2, 3, 0.5, (4, 5), 6, 7, 8, 9, 10, 11, 12, 13)
    proto = statistics_to_proto(EngineStatistics(group, {6: group, 7: group}, 21, 22, 23, 24))
    *total, groups = [value for _, value in proto.ListFields()]
    figures = [1, 2, 3, 0.5, [4, 5], *range(6, 14)]
    assert total == [*figures, 22, 2, 21, 23, 24]
    assert [[value for _, value in group.ListFields()] for group in groups] == [[6, *figures], [7, *figures]]


def test_without_a_worker_there_is_little_to_tell() -> None:
    statistics = Engine(load_config({}, {})).statistics()
    assert statistics == EngineStatistics(Statistics(0, 0, 0, 0.0, (), 0, 0, 0, 0, 0, 0), {})
