"""A real system that is offered more than it can do: who is accepted notices nothing, who is not is told so at once."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmark_modules import load_benchmark
from synthetic_oracle import continue_greedily

NUM_TRIES = 2
"""The machine may be busy with something else during one of the two phases that are compared."""


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_benchmark("overload")


def test_only_refusals_for_want_of_room_and_right_answers_come_of_an_overload_and_nothing_is_left(
    benchmark: Any,
) -> None:
    """Whatever the speed. That nothing is left, `measure` waits for."""
    sizes = benchmark.Sizes(
        num_rows=4, num_waiting=2, step_seconds=0.002, full_seconds=1.0, overload_seconds=1.5, factor=6.0
    )
    full, overload = benchmark.measure(sizes)
    statuses = Counter(answer.status for answer in overload.answers)
    assert statuses.keys() == {"OK", "RESOURCE_EXHAUSTED"}
    assert {answer.status for answer in full.answers} <= statuses.keys()
    assert all(answer.retry_seconds for answer in overload.refused())
    assert full.num_wrong() == overload.num_wrong() == 0
    assert overload.watch.num_told > 0
    assert overload.watch.most_running <= sizes.num_rows
    assert overload.watch.most_waiting <= sizes.num_waiting


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_at_twice_its_capacity_for_a_minute_it_keeps_every_promise(benchmark: Any) -> None:
    """1,000 streams. Where others use the machine, the full batch's gaps and the clients' lag say how much longer all
    takes, from one process to the next.
    """
    for _ in range(NUM_TRIES):
        sizes = benchmark.Sizes()
        full, overload = benchmark.measure(sizes)
        slowness = float(np.quantile(full.gaps(), 0.99)) / sizes.step_seconds
        figures = benchmark.figures_of(full, overload, sizes)
        limits = {figure.name: figure.limit for figure in figures if figure.limit is not None}
        told = {figure.name: figure.value for figure in figures}
        if slowness > 1.5:
            limits["refusal, slowest"] *= slowness
            limits["refusal, slowest"] += 3 * told["clients' own lag, worst"]
        missed = {name: (told[name], limit) for name, limit in limits.items() if not told[name] <= limit}
        if not missed:
            return
    pytest.fail(f"missed: {missed}")


def phase_of(benchmark: Any, *answers: Any, resident: tuple[int, ...] = (100,) * 8, num_waiting: int = 16) -> Any:
    """A load of these answers, and nothing else to be seen."""
    watch = benchmark.Watch({"engine": list(resident), "frontend": [100] * 8}, most_waiting=num_waiting)
    return benchmark.Phase(list(answers), [0.0], watch)


def missed_of(benchmark: Any, *answers: Any, **seen: Any) -> list[str]:
    """The figures beyond their limits, where the overload was such and the full batch as it should be."""
    full = phase_of(benchmark, good_answer(benchmark))
    figures = benchmark.figures_of(full, phase_of(benchmark, *answers, **seen), benchmark.Sizes())
    return [figure.name for figure in figures if figure.is_missed]


def good_answer(benchmark: Any) -> Any:
    token_ids = continue_greedily(benchmark.prompt_of(0), benchmark.num_tokens_of(0), ignore_eos=True)
    came = [0.05 * (1 + index) for index in range(len(token_ids))]
    return benchmark.Answer(0, 1.0, ended=came[-1], came=came, token_ids=token_ids)


def test_each_promise_that_is_broken_is_shown(benchmark: Any) -> None:
    good = good_answer(benchmark)
    refused = benchmark.Answer(1, 1.0, ended=0.09, status="RESOURCE_EXHAUSTED", retry_seconds=1.0)
    assert missed_of(benchmark, good, refused) == []
    for broken, name in (
        (replace(good, token_ids=[*good.token_ids[:-1], 999]), "accepted and wrong"),
        (replace(good, token_ids=good.token_ids[:-1]), "accepted and wrong"),
        (replace(good, came=[1.6 * seconds for seconds in good.came]), "gap p99, overload in full"),
        (replace(refused, status="CANCELLED"), "ended otherwise"),
        (replace(refused, retry_seconds=None), "refused without a time to retry"),
        (replace(refused, ended=0.11), "refusal, slowest"),
    ):
        assert missed_of(benchmark, broken, refused if broken.came else good) == [name]
    growing = (100, 100, 100, 100, 101, 102, 103, 103)
    assert missed_of(benchmark, good, refused, resident=growing) == ["memory of the engine, last in second quarter"]
    assert missed_of(benchmark, good, refused, num_waiting=17) == ["most waiting at a time"]
