"""When a worker did what, told with each result over a real socket: in order, on its own clock, and in no record."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drafting import SETTINGS, target
from planes_in_process import Planes
from scripted_attaches import Attach, ScriptedEngine, decode, listening, lone_worker, plan, prefill
from test_fused_sampling import FUSED

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.record import Record, read_record
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.step_times import StepTimes
from blockplane.v1 import engine_pb2 as pb

STEP_SECONDS = 0.1


def run(record: Record | None = None) -> list[StepTimes | None]:
    """What a worker tells of three steps whose plans come at once."""
    told = []

    def three_steps(attach: Attach) -> Iterator[pb.AttachWorkerResponse]:
        yield from attach.configure()
        for each in (prefill(1), decode(2), decode(3)):
            yield plan(each)
        told.extend(StepTimes.from_bytes(attach.result().times) for _ in range(3))

    engine = ScriptedEngine(three_steps)
    model = SyntheticModel("float32", step_seconds=STEP_SECONDS)
    worker = lone_worker(model, synthetic_model_info(64), 1 << 20, record=record)
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        worker.serve(address)
    assert engine.errors == []
    return told


@pytest.fixture(autouse=True)
def _attach_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockplane.data_plane.worker.RECONNECT_SECONDS", 0.01)


def test_each_result_tells_when_its_step_was_where_and_the_next_begins_behind_it() -> None:
    before = time.monotonic_ns()
    told = run()
    after = time.monotonic_ns()
    end_before = before
    for times in told:
        assert times is not None
        assert before < times.received < after
        assert list(times[1:]) == sorted(times[1:])
        began, sent = times.received + 1000 * times.began, times.received + 1000 * times.sent
        assert end_before <= began + 1000
        assert sent <= after
        assert times.computed - times.prepared >= 1e6 * STEP_SECONDS, "the forward is what takes long"
        end_before = sent
    assert told[2] is not None
    assert told[2].began >= 1e6 * STEP_SECONDS, "it was there while the one before it was computed"


def test_a_record_has_no_times_so_that_it_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    record = Record(str(tmp_path / "record"))
    told = run(record)
    record.close()
    assert all(told)
    entries = [entry for entry in read_record(str(tmp_path / "record")) if entry.WhichOneof("entry") == "result"]
    assert [entry.result.step for entry in entries] == [1, 2, 3]
    assert not any(entry.result.times for entry in entries)


@pytest.mark.parametrize(("backend", "is_fused"), [(CPU, False), (FUSED, True)])
def test_where_one_graph_computes_and_samples_both_are_done_at_once(backend: Backend, is_fused: bool) -> None:
    pair = Planes(target(), SETTINGS, backend=backend)
    pair.submit(np.arange(40, 60).tolist(), SamplingParams(4, ignore_eos=True))
    pair.run()
    prepared, computed, sampled = pair.runner.marks
    assert prepared < computed <= sampled
    assert (computed == sampled) == is_fused
