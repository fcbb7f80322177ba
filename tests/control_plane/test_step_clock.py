"""How long a step may take: learnt from steps before it, generous to whoever was mistaken for dead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.step_clock import FIRST_STEP_SECONDS, MARGIN, MAX_FACTOR, StepClock

FLOOR = 30.0

paces = st.floats(1e-3, 100)


def test_before_anything_is_learnt_a_step_may_take_as_long_as_a_first_one_does() -> None:
    assert StepClock(FLOOR).limit(1) == FIRST_STEP_SECONDS
    assert StepClock(2 * FIRST_STEP_SECONDS).limit(1) == 2 * FIRST_STEP_SECONDS


def test_quick_steps_leave_the_floor() -> None:
    clock = StepClock(FLOOR)
    clock.took(0.01, 64)
    assert clock.limit(64) == clock.limit(1) == FLOOR


def test_more_tokens_may_take_longer_in_proportion_and_fewer_as_long() -> None:
    clock = StepClock(FLOOR)
    clock.took(4.0, 100)
    assert clock.limit(1000) == pytest.approx(MARGIN * 40)
    assert clock.limit(100) == clock.limit(1) == pytest.approx(MARGIN * 4)


@given(paces, st.integers(0, 4096), st.lists(st.tuples(st.floats(1e-3, 1), st.integers(0, 4096)), max_size=30))
def test_a_step_like_one_of_the_last_thirty_is_never_late(
    seconds: float, num_tokens: int, others: list[tuple[float, int]]
) -> None:
    clock = StepClock(FLOOR)
    clock.took(seconds, num_tokens)
    for other in others:
        clock.took(*other)
    assert clock.limit(num_tokens) > seconds


def test_a_slow_hour_is_forgotten_in_time() -> None:
    clock = StepClock(FLOOR)
    clock.took(60.0, 1)
    assert clock.limit(1) == pytest.approx(600)
    for _ in range(1000):
        clock.took(0.01, 1)
    assert clock.limit(1) == FLOOR


def test_each_loss_doubles_the_limit_up_to_a_bound_and_work_takes_that_back() -> None:
    clock = StepClock(FLOOR)
    clock.took(0.01, 1)
    limits = []
    for _ in range(8):
        clock.lost()
        limits.append(clock.limit(1) / FLOOR)
    assert limits == [2, 4, 8, 16, 32, 64, 64, 64]
    assert limits[-1] == MAX_FACTOR
    for _ in range(1000):
        clock.took(0.01, 1)
    assert clock.limit(1) == FLOOR


@given(paces.map(lambda seconds: 100 * seconds))
def test_a_host_however_slow_is_not_mistaken_for_a_dead_one_for_ever(seconds: float) -> None:
    """It takes so long for its first step, whatever is asked; all it needs is to be given up a few times."""
    clock = StepClock(FLOOR)
    for _ in range(10):
        if clock.limit(1) > min(seconds, MAX_FACTOR * FIRST_STEP_SECONDS - 1):
            return
        clock.lost()
    raise AssertionError(f"it never got {seconds} s")
