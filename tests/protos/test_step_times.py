"""When a worker did what: exact to the microsecond, never out of order, and gone where it cannot be told."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos import wire
from blockplane.protos.plan import StepResult
from blockplane.protos.step_times import StepTimes
from blockplane.v1 import engine_pb2 as pb

HOUR = 3_600_000_000_000


@given(received=st.integers(0, 2**62), gaps=st.lists(st.integers(0, HOUR // 6), min_size=5, max_size=5))
def test_times_are_told_in_whole_microseconds_and_in_order(received: int, gaps: list[int]) -> None:
    marks = (received + np.cumsum(gaps)).tolist()
    times = StepTimes.of(received, *marks)
    assert times is not None
    assert list(times[1:]) == sorted(times[1:])
    for told, mark in zip(times[1:], marks, strict=True):
        assert 0 <= mark - (received + 1000 * told) < 1000


def test_a_step_of_more_than_an_hour_tells_no_times() -> None:
    assert StepTimes.of(5, 5, 5, 5, 5, 5 + HOUR) is not None
    assert StepTimes.of(5, 5, 5, 5, 5, 5 + 2 * HOUR) is None


def test_times_cross_the_wire_and_are_absent_where_the_worker_does_not_tell() -> None:
    for told in (StepTimes(2**63 + 1, 1, 2, 3, 4, 2**32 - 1), StepTimes(1, 0, 0, 0, 0, 0), None):
        packed = b"" if told is None else told.to_bytes()
        proto = wire.result_to_proto(StepResult(7, np.zeros(1, np.int32), times=packed))
        result = wire.result_from_proto(pb.StepResult.FromString(proto.SerializeToString()))
        assert StepTimes.from_bytes(result.times) == told


def test_what_no_worker_packs_tells_nothing() -> None:
    packed = StepTimes(1, 2, 3, 4, 5, 6).to_bytes()
    assert [StepTimes.from_bytes(data) for data in (b"", packed[:-1], packed + b"\0")] == [None] * 3


def test_results_that_differ_in_their_times_alone_are_the_same() -> None:
    tokens = np.zeros(1, np.int32)
    assert StepResult(7, tokens, times=StepTimes(1, 2, 3, 4, 5, 6).to_bytes()) == StepResult(7, tokens)
