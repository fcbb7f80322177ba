"""A worker that is told to read other weights, over a real socket, and what its record says of it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_attaches import (
    CONFIGURE,
    PROMPT,
    Attach,
    Script,
    ScriptedEngine,
    column,
    decode,
    listening,
    lone_worker,
    plan,
    prefill,
)
from synthetic_oracle import continue_greedily

from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.record import Record, read_record
from blockplane.data_plane.reloading import WeightSource
from blockplane.data_plane.replay import Replay
from blockplane.protos.config import load_config
from blockplane.protos.errors import ConfigurationError
from blockplane.v1 import engine_pb2 as pb

Responses = Iterator[pb.AttachWorkerResponse]
OLD, NEW = (continue_greedily(PROMPT, 3, ignore_eos=True, seed=seed) for seed in (0, 7))
INFO = synthetic_model_info(64)


@pytest.fixture(autouse=True)
def _attach_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockplane.data_plane.worker.RECONNECT_SECONDS", 0.01)


class SlowSource(WeightSource):
    """Reads for a while, and may fail as nobody foresaw."""

    seconds, fault = 0.0, ""

    def read(self, name: str) -> Callable[[], None]:
        time.sleep(self.seconds)
        if self.fault:
            raise ValueError(self.fault)
        return super().read(name)


def model_and_weights() -> tuple[SyntheticModel, SlowSource]:
    model, config = SyntheticModel("float32"), load_config({"model": "synthetic"}, {})
    return model, SlowSource(model, INFO, config)


def run(*scripts: Script, record: Record | None = None, fault: str = "", seconds: float = 0.0) -> ScriptedEngine:
    model, weights = model_and_weights()
    weights.fault, weights.seconds = fault, seconds
    engine, worker = ScriptedEngine(*scripts), lone_worker(model, INFO, 1 << 20, record=record, weights=weights)
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        worker.serve(address)
    assert engine.errors == []
    return engine


def reload(model: str) -> pb.AttachWorkerResponse:
    return pb.AttachWorkerResponse(reload=pb.ReloadWeights(model=model))


def reloads(attach: Attach) -> Responses:
    """Two tokens of the old weights, then the same request anew, in the same row, with the new ones."""
    yield from attach.configure(replace(CONFIGURE, epoch=1))
    yield plan(prefill(1))
    yield plan(decode(2))
    assert [int(attach.result().token_ids[0]) for _ in range(2)] == OLD[:2]
    yield reload("synthetic-7")
    reloaded = attach.next("reloaded").reloaded
    assert reloaded.failure == ""
    attach.fingerprint = reloaded.model_fingerprint  # type: ignore[attr-defined]
    yield from again(attach)
    attach.lose()


def again(attach: Attach) -> Responses:
    anew = prefill(3)
    yield plan(replace(anew, released_rows=anew.prefill_rows, decode_rows=column()))
    yield plan(decode(4))
    assert [int(attach.result().token_ids[0]) for _ in range(2)] == NEW[:2]


def test_steps_after_a_reload_are_of_the_new_weights_and_the_next_hello_says_so() -> None:
    assert OLD[:2] != NEW[:2]
    engine = run(reloads)
    first, second = engine.hellos
    assert (first.reloads_weights, first.weight_epoch, second.weight_epoch) == (True, 0, 1)
    assert second.model_fingerprint == engine.attaches[0].fingerprint != first.model_fingerprint  # type: ignore[attr-defined]
    assert (second.last_epoch, second.last_step) == (1, 4)


@pytest.mark.parametrize(
    ("fault", "name", "sentence"),
    [
        ("", "nowhere", "nowhere has no weights for the synthetic model; name synthetic or synthetic-N."),
        ("disk on fire", "synthetic-7", "reading them failed: ValueError('disk on fire')."),
    ],
)
def test_a_reload_that_fails_is_told_and_the_worker_serves_on(fault: str, name: str, sentence: str) -> None:
    def script(attach: Attach) -> Responses:
        yield from attach.configure()
        yield plan(prefill(1))
        attach.result()
        yield reload(name)
        assert attach.next("reloaded").reloaded.failure == sentence
        yield plan(decode(2))
        assert attach.result().token_ids.tolist() == OLD[1:2]
        attach.lose()

    first, second = run(script, fault=fault).hellos
    assert (second.weight_epoch, second.model_fingerprint) == (0, first.model_fingerprint)


def test_it_lives_while_it_reads() -> None:
    def script(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, heartbeat_milliseconds=40))
        attach.num_heartbeats = 0
        yield reload("")
        attach.next("reloaded")
        assert attach.num_heartbeats >= 3
        attach.lose()

    run(script, seconds=0.4)


def test_a_worker_without_a_source_says_that_it_cannot_and_takes_a_reload_for_a_fault() -> None:
    def script(attach: Attach) -> Responses:
        yield from attach.configure()
        yield reload("")
        assert "expected a plan from the engine, got reload" in attach.next("fault").fault.message

    engine, worker = ScriptedEngine(script), lone_worker(model_and_weights()[0], INFO, 1 << 20)
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        worker.serve(address)
    assert not engine.hellos[0].reloads_weights


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    record = Record(str(tmp_path / "record"))
    run(reloads, record=record)
    record.close()
    return str(tmp_path / "record")


def replayed(path: str, *, has_source: bool = True, spoil: bool = False) -> Replay:
    model, weights = model_and_weights()
    again = Replay(model, INFO, weights=weights if has_source else None)
    for entry in read_record(path):
        if spoil and entry.HasField("reload"):
            entry.reload.model = "synthetic-8"
        again.take(entry)
    again.end()
    return again


def test_a_record_with_a_reload_replays_bit_for_bit(recorded: str) -> None:
    again = replayed(recorded)
    assert (again.num_attaches, again.num_results) == (1, 4)


def test_a_reload_whose_weights_are_not_there_any_more_is_refused(recorded: str) -> None:
    with pytest.raises(ConfigurationError, match=r"after 2 equal results.*synthetic-8.*others are there now"):
        replayed(recorded, spoil=True)
    with pytest.raises(ConfigurationError, match=r"after 2 equal results.*not there any more: this replay reads none"):
        replayed(recorded, has_source=False)
