"""What is logged of steps: every station of every answered step, and totals that a plain recount agrees with."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_driver import Clock
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.group_counts import STEP_SECONDS
from blockplane.control_plane.engine.step_log import NUM_KEPT, LoggedStep, StepLog
from blockplane.protos.histogram import Histogram
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.step_times import StepTimes

CONFIGURE = Configure(4, 64, 128, (16, 64), (1, 4, 8), prefill_multiple_of=8, num_draft_tokens=2)
TIMES = StepTimes(1, 2, 3, 4, 5, 6)


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def bucket(num: int, buckets: tuple[int, ...]) -> int:
    return min((each for each in buckets if each >= num), default=0) if num else 0


@dataclass
class Recount:
    """The same by the definitions, one number at a time."""

    steps: list[LoggedStep] = field(default_factory=list)
    idle_seconds: float = 0.0

    def totals(self) -> dict[str, float]:
        ends = [0.0, *(step.answered for step in self.steps)]
        return {
            "num_steps": len(self.steps),
            "num_plan_bytes": sum(step.num_plan_bytes for step in self.steps),
            "step_seconds": sum(
                step.answered - max(step.planned, before) for step, before in zip(self.steps, ends, strict=False)
            ),
            "idle_seconds": self.idle_seconds,
            "num_computed_tokens": sum(step.num_prefill_tokens + step.num_decode_tokens for step in self.steps),
            "num_bucket_tokens": sum(step.num_bucket_tokens for step in self.steps),
        }


class Walk:
    """A log, told of steps as a group and its driver do, and what it is to say of them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.histogram = Histogram(STEP_SECONDS)
        self.log = StepLog(CONFIGURE, self.clock, self.histogram)
        self.told = Recount()
        self.in_flight: list[LoggedStep] = []
        self.step = 0
        self.num_decodes = 0
        self.nothing_since: float | None = None

    def plan(
        self,
        num_decodes: int | None,
        segments: list[int],
        num_bytes: int,
        seconds: tuple[float, float],
        has_run: bool = True,
    ) -> None:
        """`num_decodes`: None = as in the last plan."""
        began = self.clock.now
        self.step += 1
        rows = column(list(range(len(segments))))
        decode_rows = None if num_decodes is None else column(list(range(num_decodes)))
        plan = StepPlan(self.step, prefill_rows=rows, prefill_num_tokens=column(segments), decode_rows=decode_rows)
        self.clock.now += seconds[0]
        self.log.scheduled(plan, began, has_run and not self.in_flight)
        self.log.sent(num_bytes)
        planned = self.clock.now
        self.clock.now += seconds[1]
        if num_decodes is not None:
            self.num_decodes = num_decodes
        packed = sum(-(-each // 8) * 8 for each in segments)
        num_bucket = 3 * bucket(self.num_decodes, (1, 4, 8)) + bucket(packed, (16, 64))
        if not self.in_flight and self.nothing_since is not None and has_run:
            self.told.idle_seconds += planned - self.nothing_since
        self.in_flight.append(
            LoggedStep(
                self.step, sum(segments), self.num_decodes, num_bucket, num_bytes, began, planned, 0, 0, 0, TIMES
            )
        )

    def answer(self, num_drafts: int, seconds: tuple[float, float]) -> None:
        step = self.in_flight.pop(0)
        result = StepResult(step.step, column([]), num_draft_tokens=num_drafts, times=TIMES.to_bytes())
        answered = self.clock.now
        self.clock.now += seconds[0]
        self.log.settled(result, answered)
        settled = self.clock.now
        self.clock.now += seconds[1]
        self.log.delivered()
        self.told.steps.append(
            step._replace(
                num_decode_tokens=step.num_decode_tokens + num_drafts,
                answered=answered,
                settled=settled,
                delivered=self.clock.now,
            )
        )
        self.nothing_since = answered if not self.in_flight else None

    def lose(self) -> None:
        self.log.begin_attach()
        self.in_flight, self.num_decodes, self.nothing_since = [], 0, None


seconds = st.tuples(st.floats(0, 0.02), st.floats(0, 0.02))
plans = st.builds(
    lambda *arguments: ("plan", arguments),
    st.none() | st.integers(0, 8),
    st.lists(st.integers(1, 16), max_size=4),
    st.integers(0, 5000),
    seconds,
    st.booleans(),
)
answers = st.builds(lambda *arguments: ("answer", arguments), st.integers(0, 16), seconds)


@given(st.lists(plans | answers | st.just(("lose", ())), max_size=60))
def test_every_answered_step_is_logged_with_its_stations_and_the_totals_are_their_sums(
    operations: list[tuple[str, tuple]],
) -> None:
    walk = Walk()
    for name, arguments in operations:
        may_be = {"plan": len(walk.in_flight) < 2, "answer": bool(walk.in_flight), "lose": True}
        if may_be[name]:
            getattr(walk, name)(*arguments)
    assert walk.log.last() == walk.told.steps
    assert walk.log.totals() == pytest.approx(walk.told.totals())
    assert sum(walk.histogram.counts) == len(walk.told.steps)
    assert walk.histogram.sum == pytest.approx(walk.log.totals()["step_seconds"])


def test_the_last_steps_are_kept_and_all_are_counted() -> None:
    walk = Walk()
    for _ in range(NUM_KEPT + 300):
        walk.plan(None, [], 5, (0.0, 0.01))
        walk.answer(0, (0.0, 0.0))
    assert sum(walk.histogram.counts) >= NUM_KEPT, "counted as they come, whether or not somebody asks"
    assert walk.log.last() == walk.told.steps[-NUM_KEPT:]
    assert walk.log.last(3) == walk.told.steps[-3:]
    assert walk.log.last(0) == []
    assert walk.log.totals() == pytest.approx(walk.told.totals())


def test_the_rows_of_a_lost_attach_decode_no_more() -> None:
    walk = Walk()
    walk.plan(5, [], 5, (0.0, 0.01))
    walk.answer(0, (0.0, 0.0))
    walk.lose()
    walk.plan(None, [3], 5, (0.0, 0.01))
    walk.answer(0, (0.0, 0.0))
    assert walk.log.last() == walk.told.steps
    assert [step.num_decode_tokens for step in walk.log.last()] == [5, 0]


def test_what_waits_for_the_journal_is_delivered_step_by_step() -> None:
    log = StepLog(CONFIGURE, clock := Clock(), Histogram(STEP_SECONDS))
    for step in (1, 2):
        log.scheduled(StepPlan(step), 0.0, True)
    for step in (1, 2):
        log.settled(StepResult(step, column([])), 1.0)
    clock.now = 5.0
    log.committed()
    assert [step.delivered for step in log.last()] == [5.0, 0.0]
    clock.now = 6.0
    log.committed()
    assert [step.delivered for step in log.last()] == [5.0, 6.0]
