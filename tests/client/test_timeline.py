"""Steps as a trace: which slice stands on which track, side by side where they overlap, read back from the file."""

import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto
from perfetto_reader import ReadTrace

from blockplane.client import trace
from blockplane.client.cli import main
from blockplane.client.engine_values import GroupSteps
from blockplane.client.timeline import STATIONS, TRACKS, UNTOLD, Lanes, counters_of, slices_of
from blockplane.client.trace_file import trace_of
from blockplane.protos.errors import ConfigurationError

TIMES = (*(name for _, name, _ in STATIONS), "delivered")
NOW = 1_900_000_000_000_000_000


def group_steps(times: np.ndarray, group: int = 0, first: int = 1) -> GroupSteps:
    """`times`: int64 [num_steps, num_stations + 1]."""
    columns: dict[str, Any] = dict(zip(TIMES, times.T, strict=True))
    numbers = np.arange(first, first + len(times))
    counts = {name: (numbers * factor).astype(np.int32) for factor, name in enumerate(GroupSteps.__slots__[-4:], 1)}
    return GroupSteps(group=group, steps=numbers, **columns, **counts)


def two_in_flight(num_steps: int, group: int = 0) -> GroupSteps:
    """Each plan goes out while the one before it is on its way, too."""
    stations = np.array([0, 1, 700, 800, 850, 1000, 1010, 1020, 1300, 1310, 1340])
    return group_steps(NOW + 500 * np.arange(num_steps)[:, None] + stations, group)


@st.composite
def any_steps(draw: st.DrawFn) -> GroupSteps:
    """Of workers that tell and that do not, delivered or not yet."""
    gaps = draw(st.lists(st.lists(st.integers(0, 900), min_size=11, max_size=11), min_size=1, max_size=6))
    times = np.cumsum(np.array(gaps), axis=1)
    # The engine plans one step after the other; what lies behind that may overlap as it will.
    times += NOW + (np.cumsum(times[:, 1]) - times[:, 1])[:, None]
    for index in range(len(gaps)):
        if draw(st.booleans()):
            times[index, 2:8] = 0
        if draw(st.booleans()):
            times[index, 10] = 0
    return group_steps(times)


@given(any_steps())
def test_the_slices_of_a_step_follow_each_other_from_its_planning_to_its_delivery(steps: GroupSteps) -> None:
    by_step = defaultdict(list)
    for each in slices_of(steps):
        by_step[each.place].append(each)
    assert len(by_step) == len(steps.steps)
    for index, slices in by_step.items():
        ordered = sorted(slices, key=lambda each: (each.begin, each.end))
        assert ordered[0].begin == steps.scheduled[index]
        assert ordered[-1].end == (steps.delivered[index] or steps.settled[index])
        assert all(one.end == other.begin for one, other in pairwise(ordered))


def test_a_worker_that_tells_nothing_has_one_track_in_place_of_the_inner_ones() -> None:
    times = np.array([[NOW + 10 * each for each in range(11)]])
    times[0, 2:8] = 0
    tracks = [each.track for each in slices_of(group_steps(times))]
    assert tracks == ["schedule", "settle", "delivery", UNTOLD[0]]


def test_padding_is_what_the_bucket_has_beyond_the_tokens() -> None:
    steps = two_in_flight(2)
    counters = {counter.name: counter.values.tolist() for counter in counters_of(steps)}
    assert counters == {"tokens": [3, 6], "padding": [0, 0], "plan": [4, 8]}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_what_lies_in_one_lane_never_overlaps(spans: list[tuple[int, int]]) -> None:
    lanes, by_lane = Lanes(), defaultdict(list)
    begin = 0
    for pause, length in spans:
        begin += pause
        by_lane[lanes.lane(begin, begin + length)].append((begin, begin + length))
    for lane in by_lane.values():
        assert all(one[1] <= other[0] for one, other in pairwise(lane))


def assert_holds(read: ReadTrace, steps: GroupSteps) -> None:
    """The file has the steps' slices, all of them and no other, each on its group's track."""
    expected = defaultdict(list)
    for each in slices_of(steps):
        expected[f"worker group {steps.group}/{each.track}"].append(
            (f"step {steps.steps[each.place]}", each.begin, each.end)
        )
    for path, slices in expected.items():
        assert sorted(read.slices[path]) == sorted(slices)
    for counter in counters_of(steps):
        assert read.counters[f"worker group {steps.group}/{counter.name}"] == counter.values.tolist()


def test_a_file_read_back_has_every_slice_of_every_group_and_nothing_else() -> None:
    groups = [two_in_flight(5), two_in_flight(3, group=1)]
    read = ReadTrace(trace_of(groups))
    for steps in groups:
        assert_holds(read, steps)
    assert sum(map(len, read.slices.values())) == (5 + 3) * len(STATIONS)
    assert len(read.flows) == 5 + 3, "an arrow for each step of each group"
    assert set(read.flows.values()) == {len(STATIONS)}
    assert read.arguments[0] == {
        "step": 1,
        "prefill tokens": 1,
        "decode tokens": 2,
        "bucket tokens": 3,
        "plan bytes": 4,
    }


@settings(max_examples=40)
@given(any_steps())
def test_whatever_the_steps_are_they_can_be_read_back(steps: GroupSteps) -> None:
    assert_holds(ReadTrace(trace_of([steps])), steps)


def test_tracks_stand_in_the_order_of_a_step_s_way() -> None:
    read = ReadTrace(trace_of([two_in_flight(2)]))
    group = next(track for track in read.tracks.values() if not track.parent_uuid)
    assert group.child_ordering == perfetto.TrackDescriptor.EXPLICIT
    ranks = {track.name: track.sibling_order_rank for track in read.tracks.values() if track.parent_uuid}
    assert sorted(ranks, key=ranks.__getitem__) == [*TRACKS[:-1], "tokens", "padding", "plan"]


def test_plans_that_overlap_on_the_wire_lie_side_by_side_under_one_name() -> None:
    read = ReadTrace(trace_of([two_in_flight(4)]))
    assert [track.name for track in read.tracks.values()].count("wire out") == 2


def test_without_perfetto_s_messages_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'blockplane\[trace\]'"):
        trace_of([two_in_flight(1)])


class FakeAdmin:
    """Tells of the steps that it is given."""

    def __init__(self, *groups: GroupSteps) -> None:
        self.groups = groups

    def __enter__(self) -> "FakeAdmin":
        return self

    def __exit__(self, *_: object) -> None: ...

    def get_steps(self, num_steps: int) -> tuple[GroupSteps, ...]:
        assert num_steps == 7
        return self.groups


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *groups: GroupSteps) -> int:
    monkeypatch.setattr(trace, "connect_engine", lambda flags: FakeAdmin(*groups))
    return main(["trace", "--steps", "7", "--output", str(path)])


def test_the_command_writes_the_file_and_says_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    assert run(monkeypatch, path, two_in_flight(3), group_steps(np.zeros((0, 11), np.int64), group=1)) == 0
    assert capsys.readouterr().out.startswith(f"3 steps of 1 worker group in {path}, ")
    assert_holds(ReadTrace(path.read_bytes()), two_in_flight(3))


def test_the_command_says_in_a_sentence_why_there_is_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path / "trace") == 1
    assert "send a request first" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path, two_in_flight(1)) == 1
    assert "name another file" in capsys.readouterr().err
