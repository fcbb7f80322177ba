"""A worker group's logged steps as operators are told of them: in columns, on one clock. Knows no group."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockplane.control_plane.engine.clock_offset import Nanoseconds, clock_offsets
from blockplane.control_plane.engine.step_log import LoggedStep
from blockplane.protos.columns import column_to_bytes, int64_column_to_bytes
from blockplane.protos.step_times import StepTimes
from blockplane.v1 import admin_pb2 as pb

_OURS = ("scheduled", "planned", "answered", "settled", "delivered")
_WORKERS = ("received", "began", "prepared", "computed", "sampled", "sent")
_COUNTS = ("num_prefill_tokens", "num_decode_tokens", "num_bucket_tokens", "num_plan_bytes")


def steps_to_proto(group: int, steps: Sequence[LoggedStep], clock: Callable[[], float]) -> pb.GetStepsResponse:
    """`clock`: that of the log; it is set against the time of day once, so that all steps stand on one clock."""
    columns = _columns(steps)
    ours = {name: _nanoseconds(columns[name]) for name in _OURS}
    told = [index for index, times in enumerate(columns["times"]) if times is not None]
    workers = np.zeros((len(_WORKERS), len(steps)), np.int64)
    if told:
        times = _worker_times([columns["times"][index] for index in told])
        workers[:, told] = _on_our_clock(times, ours["planned"][told], ours["answered"][told])
    told_times = ours | dict(zip(_WORKERS, workers, strict=True))
    epoch = time.time_ns() - round(clock() * 1e9)
    return pb.GetStepsResponse(
        group=group,
        steps=int64_column_to_bytes(np.array(columns["step"], np.int64)),
        **{name: int64_column_to_bytes(np.where(column, column + epoch, 0)) for name, column in told_times.items()},
        **{name: column_to_bytes(np.array(columns[name], np.int32)) for name in _COUNTS},
    )


def _columns(steps: Sequence[LoggedStep]) -> dict[str, Sequence[Any]]:
    if not steps:
        return dict.fromkeys(LoggedStep._fields, ())
    return dict(zip(LoggedStep._fields, zip(*steps, strict=True), strict=True))


def _nanoseconds(seconds: Sequence[float]) -> Nanoseconds:
    return np.rint(np.array(seconds) * 1e9).astype(np.int64)


def _worker_times(told: Sequence[StepTimes]) -> Nanoseconds:
    """int64 [num_times, num_steps] on the worker's clock, made ascending whatever the worker told."""
    received, *microseconds = np.array(told, np.uint64).T.astype(np.int64)
    times = np.stack((received, *(received + 1000 * each for each in microseconds)))
    ascending: NDArray[np.int64] = np.maximum.accumulate(times, axis=0)
    return ascending


def _on_our_clock(times: Nanoseconds, planned: Nanoseconds, answered: Nanoseconds) -> Nanoseconds:
    """The same on the engine's, all between plan and answer: a worker's own word is not taken for more."""
    moved = times - clock_offsets(planned, times[0], times[-1], answered)
    between: Nanoseconds = np.clip(moved, planned, answered)
    return between
