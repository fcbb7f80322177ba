"""Random walks over the scheduler: short ones in the gate, 10^5 operations among the slow tests."""

import random

import pytest
from walk import Walk, random_configure, random_operation


def walk(seed: int, num_operations: int) -> Walk:
    rng = random.Random(seed)
    steps = Walk(random_configure(rng), rng)
    for _ in range(num_operations):
        getattr(steps, random_operation(rng))()
    steps.settle()
    return steps


@pytest.mark.parametrize("seed", range(40))
def test_what_must_hold_holds_whatever_happens(seed: int) -> None:
    walk(seed, num_operations=250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_it_holds_for_a_hundred_thousand_operations(seed: int) -> None:
    walk(seed, num_operations=1000)


def test_walks_reach_what_they_are_for() -> None:
    """Rows give way, prefixes are found, drafts are granted, windows are left, decodes are parked.

    Or the walk would prove little.
    """
    num_preemptions = num_cached_tokens = num_windows_left = num_drafting = num_parked = 0
    for seed in range(16):
        rng = random.Random(seed)
        steps = Walk(random_configure(rng), rng)
        for _ in range(150):
            getattr(steps, random_operation(rng))()
            num_windows_left += bool(steps.scheduler.blocks._first_block.any())
            num_parked += any(request.is_parked and request.last_step for request in steps.live.values())
        statistics = steps.scheduler.statistics()
        num_preemptions += statistics.num_preemptions
        num_cached_tokens += statistics.num_cached_tokens
        num_drafting += steps.configure.num_draft_tokens > 0
    assert min(num_preemptions, num_cached_tokens, num_windows_left, num_drafting, num_parked) > 3
