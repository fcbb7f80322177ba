"""`blockplane top`: rates out of two looks, and what is drawn of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import running_fake_engine, statistics, worker
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from blockplane.client import cli
from blockplane.client.engine_values import WorkerStatus
from blockplane.client.rates import Look, Rates, rates
from blockplane.client.top_view import bar, frame, sparkline
from blockplane.protos.statistics import EngineStatistics, Statistics

NONE = Statistics(0, 0, 0, 0.0, (), 0, 0, 0, 0, 0, 0)
BEFORE = replace(NONE, num_steps=10, num_admitted=4, num_prompt_tokens=100, num_cached_tokens=50, num_plan_bytes=900)
AFTER = replace(
    BEFORE,
    num_running=7,
    num_waiting=2,
    num_parked=1,
    kv_cache_usage=0.25,
    num_steps=30,
    num_admitted=10,
    num_prompt_tokens=300,
    num_cached_tokens=200,
    num_plan_bytes=1900,
    step_seconds=1.0,
    idle_seconds=0.5,
    num_computed_tokens=600,
    num_bucket_tokens=800,
    num_draft_tokens=10,
    num_accepted_tokens=4,
)


def worker_status(group: int, state: str, statistics: Statistics | None) -> WorkerStatus:
    return WorkerStatus(group, state, "ipv4:x", 1, 4, "synthetic", b"", 0, 9.0, 101, 16, statistics)


def look(seconds: float, of_group: Statistics | None, state: str = "ready") -> Look:
    groups = {} if of_group is None else {3: of_group}
    return Look(seconds, EngineStatistics(of_group or NONE, groups), (worker_status(3, state, of_group),))


def drawn(before: Look, after: Look, history: tuple[float, ...] = ()) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - it lives as long
    console.print(frame("title", before, after, history))
    return console.export_text()


def test_rates_are_differences():
    assert rates(BEFORE, AFTER, 2.0) == Rates(
        tokens_per_second=300.0,
        admitted_per_second=3.0,
        hit_rate=0.75,
        padding=0.25,
        step_seconds=0.05,
        plan_bytes=50.0,
        idle_share=0.25,
        acceptance=0.4,
    )


def test_where_nothing_happened_there_is_no_share_of_it():
    told = rates(AFTER, AFTER, 1.0)
    assert (told.tokens_per_second, told.admitted_per_second, told.idle_share) == (0.0, 0.0, 0.0)
    assert (told.hit_rate, told.padding, told.step_seconds, told.plan_bytes, told.acceptance) == (None,) * 5


def test_an_engine_that_tells_of_no_steps_is_not_taken_for_one_that_computes_nothing():
    told = rates(NONE, replace(NONE, num_admitted=1), 1.0)
    assert (told.tokens_per_second, told.idle_share, told.admitted_per_second) == (None, None, 1.0)


@pytest.mark.parametrize(
    ("before", "after"), [(None, AFTER), (AFTER, BEFORE), (AFTER, NONE), (replace(BEFORE, num_steps=11), BEFORE)]
)
def test_a_group_that_came_anew_has_no_rates_yet(before: Statistics | None, after: Statistics):
    assert rates(before, after, 1.0) == Rates()


counts = st.builds(
    replace,
    st.just(NONE),
    num_steps=st.integers(0, 9),
    num_bucket_tokens=st.integers(50, 99),
    num_computed_tokens=st.integers(0, 50),
    num_prompt_tokens=st.integers(50, 99),
    num_cached_tokens=st.integers(0, 50),
    idle_seconds=st.floats(0, 9),
)


@given(counts, st.floats(0.01, 10))
def test_shares_since_the_beginning_lie_between_0_and_1(after: Statistics, seconds: float):
    told = rates(NONE, after, seconds)
    for share in (told.hit_rate, told.padding, told.idle_share):
        assert share is None or 0 <= share <= 1


def test_a_frame_has_a_line_for_each_worker_and_one_for_all():
    lines = drawn(look(0.0, BEFORE), look(2.0, AFTER), (100.0, 300.0)).splitlines()
    assert lines[0].strip() == "title"
    assert lines[1].startswith("running 7   waiting 2   parked 1   held 0")
    assert "tokens/s 300   requests/s 3.0   drafts 40% right   ▃█" in lines[2]
    (row,) = (line.split() for line in lines if " ready " in line)
    assert row == [
        *("3", "ready", "7", "2", "1", "██░░░░░░", "25%", "25/100", "75%", "25%", "50.0", "ms", "50", "B", "25%", "300")
    ]


def test_what_is_not_known_yet_is_a_dash():
    (row,) = (
        line.split() for line in drawn(look(0.0, None), look(1.0, None, "building")).splitlines() if "buil" in line
    )
    assert row == ["3", "building", *["-"] * 11]


def test_without_workers_it_says_so():
    bare = Look(0.0, EngineStatistics(NONE, {}), ())
    assert "no worker is attached" in drawn(bare, bare)


def test_a_frame_fits_a_line_of_100_columns_with_large_numbers():
    large = replace(AFTER, kv_cache_usage=1.0, num_computed_tokens=10**6, num_running=256, num_waiting=1024)
    before, after = look(0.0, BEFORE), look(1.0, large, "reloading")
    after = replace(after, workers=(replace(after.workers[0], num_blocks=131_073, group=12),))
    assert "…" not in drawn(before, replace(after, statistics=EngineStatistics(large, {12: large})))


@given(st.floats(0, 1))
def test_a_bar_is_as_long_whatever_it_says(share: float):
    assert len(bar(share).plain) == len("████████ 100%")


@given(st.lists(st.floats(0, 1e9), max_size=80))
def test_a_sparkline_has_a_cell_for_each_value_and_a_full_one_for_the_largest(values: list[float]):
    line = sparkline(values)
    assert len(line) == len(values)
    assert not any(values) or line[values.index(max(values))] == "█"


def test_once_prints_a_frame_of_one_interval_and_saves_it(tmp_path: Path, capsys):
    with running_fake_engine() as engine:
        engine.workers = [worker(0)]
        engine.statistics.groups.append(statistics(0))
        svg = tmp_path / "top.svg"
        arguments = ["top", "--engine-address", engine.address, "--interval", "0.1", "--svg", str(svg)]
        assert cli.main(arguments) == 0
        assert [name for name, _ in engine.calls] == ["GetStatistics", "ListWorkers"] * 2
    assert f"blockplane {engine.address}" in (shown := capsys.readouterr().out)
    assert "50/100" in shown
    assert svg.read_text().startswith("<svg")


def test_no_engine_is_one_sentence_and_exit_1(free_address: str, capsys):
    assert cli.main(["top", "--once", "--engine-address", free_address]) == 1
    assert capsys.readouterr().err.startswith(f"blockplane top: no server answers on {free_address}")
