"""A worker over one attach after another: what stays, what starts anew, what is told of a fault. Over real sockets."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import grpc
import pytest
from scripted_attaches import (
    CONFIGURE,
    PROMPT,
    Attach,
    Script,
    ScriptedEngine,
    Told,
    column,
    decode,
    listening,
    lone_worker,
    plan,
    prefill,
    runner_of,
)
from synthetic_oracle import continue_greedily

from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.worker import Worker
from blockplane.protos import wire
from blockplane.protos.access import Access
from blockplane.protos.errors import AuthenticationError, BlockplaneError, ConfigurationError, ProtocolError
from blockplane.protos.plan import StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb

Responses = Iterator[pb.AttachWorkerResponse]
EXPECTED = continue_greedily(PROMPT, 8, ignore_eos=True)


@pytest.fixture(autouse=True)
def _attach_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockplane.data_plane.worker.RECONNECT_SECONDS", 0.01)


@cache
def make_model(step_seconds: float) -> SyntheticModel:
    return SyntheticModel("float32", step_seconds=step_seconds)


def make_worker(step_seconds: float = 0.0) -> Worker:
    return lone_worker(make_model(step_seconds), synthetic_model_info(64), 1 << 20)


def run(*scripts: Script, worker: Worker | None = None) -> tuple[ScriptedEngine, Worker]:
    """Let a worker attach once for each script, and once more, to be refused."""
    engine, worker = ScriptedEngine(*scripts), worker or make_worker()
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        worker.serve(address)
    assert engine.errors == []
    return engine, worker


def two_steps_then_lost(attach: Attach) -> Responses:
    yield from attach.configure(replace(CONFIGURE, epoch=11))
    yield plan(prefill(1))
    assert attach.result().token_ids.tolist() == EXPECTED[:1]
    yield plan(decode(2))
    assert attach.result().token_ids.tolist() == EXPECTED[1:2]
    attach.lose()


def test_the_hello_names_the_process_and_what_it_did_last() -> None:
    engine, worker = run(two_steps_then_lost, two_steps_then_lost)
    first, second, third = engine.hellos
    assert first.boot_id == second.boot_id == third.boot_id == worker.boot_id != 0
    assert (first.last_epoch, first.last_step) == (0, 0)
    assert (second.last_epoch, second.last_step) == (11, 2)
    assert first.model_fingerprint == third.model_fingerprint != b""


def test_every_attach_shows_the_token_as_it_is_then(tmp_path: Path) -> None:
    token, shown = tmp_path / "token", []
    token.write_text("first")

    def ends(attach: Attach) -> Responses:
        shown.extend(value for key, value in attach.context.invocation_metadata() if key == "authorization")
        token.write_text("second")
        yield from ()

    engine = ScriptedEngine(ends, ends)
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        make_worker().serve(address, Access(token=str(token)))
    assert shown == ["Bearer first", "Bearer second"]


def test_a_token_that_the_engine_does_not_know_ends_the_worker_for_good() -> None:
    def refuses(attach: Attach) -> Responses:
        attach.context.abort(grpc.StatusCode.UNAUTHENTICATED, "not one of mine.")

    with listening(ScriptedEngine(refuses)) as address, pytest.raises(AuthenticationError, match="not one of mine"):
        make_worker().serve(address)


def test_a_builder_builds_what_it_is_told_and_leaves_without_being_ready() -> None:
    def script(attach: Attach) -> Responses:
        yield pb.AttachWorkerResponse(configure=wire.configure_to_proto(CONFIGURE))
        assert next(attach._requests, None) is None

    engine = ScriptedEngine(script)
    builder = lone_worker(make_model(0.0), synthetic_model_info(64), 1 << 20, serves=False)
    with listening(engine) as address:
        builder.serve(address)
    assert engine.errors == []
    assert runner_of(builder).graphs.num_builds == 2


def test_a_builder_that_cannot_build_what_it_is_told_fails() -> None:
    def script(attach: Attach) -> Responses:
        yield pb.AttachWorkerResponse(configure=wire.configure_to_proto(replace(CONFIGURE, num_blocks=1)))
        attach.next("fault")

    engine = ScriptedEngine(script)
    builder = lone_worker(make_model(0.0), synthetic_model_info(64), 1 << 20, serves=False)
    with listening(engine) as address, pytest.raises(ProtocolError, match="1 blocks, and block 0 is never used"):
        builder.serve(address)


def test_two_workers_of_one_process_image_have_boot_ids_of_their_own() -> None:
    assert make_worker().boot_id != make_worker().boot_id


def test_every_result_names_the_epoch_of_its_attach() -> None:
    def script(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=2**64 - 1))
        yield plan(prefill(1))
        assert attach.result().epoch == 2**64 - 1
        attach.lose()

    run(script)


def test_kv_outlives_the_stream_and_steps_are_numbered_on() -> None:
    """The second attach computes the last token alone, over the KV that the first one wrote."""

    def goes_on(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, epoch=12, keeps_kv=True, last_step=7))
        known = [*PROMPT, *EXPECTED[:2]]
        yield plan(prefill(8, known, num_cached=len(known) - 1))
        assert attach.result().token_ids.tolist() == EXPECTED[2:3]
        attach.lose()

    engine, worker = run(two_steps_then_lost, goes_on)
    assert (engine.hellos[2].last_epoch, engine.hellos[2].last_step) == (12, 8)
    assert runner_of(worker).graphs.num_builds == 2


def test_rows_start_anew_whether_kv_is_kept_or_not() -> None:
    """Row 1 was occupied when the stream broke, and is admitted again."""
    engine, _ = run(two_steps_then_lost, two_steps_then_lost, two_steps_then_lost)
    assert len(engine.hellos) == 4


def test_what_a_row_asked_for_in_one_attach_is_forgotten_in_the_next() -> None:
    def asks(attach: Attach) -> Responses:
        yield from attach.configure()
        yield plan(prefill(1, params=SamplingParams(9, allowed_token_ids=(3,), logprobs=1, prompt_logprobs=1)))
        assert attach.result().token_ids.tolist() == [3]
        attach.lose()

    def asks_nothing(attach: Attach) -> Responses:
        yield from attach.configure()
        yield plan(prefill(1))
        result = attach.result()
        assert result.token_ids.tolist() == EXPECTED[:1]
        assert result.logprobs is None
        assert result.prompt_logprobs is None
        attach.lose()

    run(asks, asks_nothing)


@pytest.mark.parametrize("draft_model", [None, SyntheticModel("float32")], ids=["ngram", "model"])
def test_drafts_start_anew_and_no_graph_is_built_again(draft_model: SyntheticModel | None) -> None:
    configure = replace(CONFIGURE, num_draft_tokens=2)

    def drafts(prompt: list[int]) -> Script:
        def script(attach: Attach) -> Responses:
            yield from attach.configure(configure)
            yield plan(prefill(1, prompt))
            token_ids = attach.result().token_ids.tolist()
            for step in (2, 3):
                yield plan(StepPlan(step, decode_rows=column(1), decode_num_tokens=column(3)))
                token_ids += attach.result().token_ids.tolist()
            assert token_ids == continue_greedily(prompt, len(token_ids), ignore_eos=True)
            attach.lose()

        return script

    worker = lone_worker(
        make_model(0.0), synthetic_model_info(64), 1 << 20, num_draft_tokens=2, draft_model=draft_model
    )
    run(drafts([*PROMPT, *PROMPT]), worker=worker)
    drafts_of_the_first = runner_of(worker)._drafts
    run(drafts([31, 32]), drafts([*PROMPT, *PROMPT]), worker=worker)
    assert runner_of(worker)._drafts is drafts_of_the_first
    assert runner_of(worker).graphs.num_builds == 2


def test_another_configuration_is_built_anew() -> None:
    def other(attach: Attach) -> Responses:
        yield from attach.configure(replace(CONFIGURE, num_blocks=9, num_seqs_buckets=(1, 2)))
        yield plan(prefill(1))
        assert attach.result().token_ids.tolist() == EXPECTED[:1]
        attach.lose()

    _, worker = run(two_steps_then_lost, other)
    assert runner_of(worker).graphs.num_builds == 3
    assert {cache.shape[0] for cache in worker._place.model.blocks().caches} == {9}


def told_a_fault(match: str, *plans: StepPlan, **changes: object) -> Script:
    """Expects, after as many results as there are plans but one, that the worker says why it gives up."""

    def script(attach: Attach) -> Responses:
        yield pb.AttachWorkerResponse(configure=wire.configure_to_proto(replace(CONFIGURE, **changes)))
        if plans:
            attach.next("ready")
        for sent in plans:
            yield plan(sent)
        for _ in plans[1:]:
            attach.next("result")
        assert match in attach.next("fault").fault.message
        attach.context.abort(grpc.StatusCode.INTERNAL, "as you say.")

    return script


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 9}])
def test_kv_that_is_not_there_cannot_be_kept(changes: dict[str, int]) -> None:
    scripts = [two_steps_then_lost] if changes else []
    run(*scripts, told_a_fault("counts on KV from an earlier attach", keeps_kv=True, **changes), two_steps_then_lost)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"num_blocks": 0},
        {"num_blocks": 2**31},
        {"max_model_len": 65},
        {"num_batched_tokens_buckets": ()},
        {"num_seqs_buckets": (2, 1)},
        {"kv_cache_groups": ()},
        {"prefill_multiple_of": 0},
        {"context_parallel_size": 2},
        {"context_parallel_size": 3},
        {"num_draft_tokens": 3},
    ],
)
def test_a_configuration_that_cannot_be_built_is_told_and_the_worker_lives_on(changes: dict[str, object]) -> None:
    run(told_a_fault("the engine", **changes), two_steps_then_lost)


def test_after_a_build_that_failed_nothing_is_there_to_be_kept() -> None:
    engine, _ = run(two_steps_then_lost, told_a_fault("same", num_draft_tokens=3), two_steps_then_lost)
    assert [hello.last_epoch for hello in engine.hellos] == [0, 11, 0, 11]


def test_a_message_out_of_order_is_a_fault_of_its_own() -> None:
    def script(attach: Attach) -> Responses:
        yield plan(prefill(1))
        assert "expected a configure from the engine, got plan" in attach.next("fault").fault.message

    run(script)


def test_a_bad_plan_is_told_and_the_worker_attaches_anew_with_all_that_it_built() -> None:
    bad = StepPlan(3, released_rows=column(0))
    fault = told_a_fault("releases a row that is not occupied", prefill(1), decode(2), bad)
    engine, worker = run(fault, two_steps_then_lost)
    assert (engine.hellos[1].last_epoch, engine.hellos[1].last_step) == (0, 2)
    assert runner_of(worker).graphs.num_builds == 2


def test_a_fault_is_told_behind_all_results_though_the_plans_come_at_once() -> None:
    def hasty(attach: Attach) -> Responses:
        yield from attach.configure()
        for sent in (prefill(1), decode(2), StepPlan(4)):
            yield plan(sent)
        assert [attach.result().step for _ in range(2)] == [1, 2]
        assert "step 4 does not follow step 2" in attach.next("fault").fault.message

    run(hasty, two_steps_then_lost)


def test_an_engine_that_stumbles_is_tried_again() -> None:
    def stumbles(attach: Attach) -> Responses:
        yield from attach.configure()
        raise ZeroDivisionError

    def ends(attach: Attach) -> Responses:
        yield from attach.configure()

    engine, _ = run(stumbles, ends, two_steps_then_lost)
    assert len(engine.hellos) == 4


def test_after_a_step_the_engine_s_complaint_is_about_the_stream() -> None:
    def complains(attach: Attach) -> Responses:
        yield from attach.configure()
        yield plan(prefill(1))
        attach.result()
        attach.context.abort(grpc.StatusCode.INTERNAL, "not what I wanted.")

    run(complains, two_steps_then_lost)


def test_before_any_step_it_is_about_the_worker() -> None:
    def refuses(attach: Attach) -> Responses:
        yield from attach.configure()
        attach.context.abort(grpc.StatusCode.INTERNAL, "not what I wanted.")

    with listening(ScriptedEngine(refuses)) as address, pytest.raises(BlockplaneError, match="not what I wanted"):
        make_worker().serve(address)


def test_it_lives_while_it_builds_and_computes() -> None:
    """Two graphs and a step of 0.3 s each, with a sign of life every 40 ms."""

    def script(attach: Attach) -> Responses:
        begun = time.monotonic()
        yield from attach.configure(replace(CONFIGURE, heartbeat_milliseconds=40))
        built, while_building, attach.num_heartbeats = time.monotonic(), attach.num_heartbeats, 0
        yield plan(prefill(1))
        attach.result()
        # A busy machine makes all of it longer.
        assert 4 <= while_building <= (built - begun) / 0.04 + 1
        assert 2 <= attach.num_heartbeats <= (time.monotonic() - built) / 0.04 + 1
        attach.lose()

    run(script, worker=make_worker(step_seconds=0.3))


def test_no_heartbeat_is_sent_where_none_is_asked_for() -> None:
    """It builds for longer than it would be silent before it is told."""

    def script(attach: Attach) -> Responses:
        yield from attach.configure()
        yield plan(prefill(1))
        attach.result()
        assert attach.num_heartbeats == 0
        attach.lose()

    run(script, worker=make_worker(step_seconds=0.55))


def test_it_lives_before_the_engine_has_said_a_word() -> None:
    def silent(attach: Attach) -> Responses:
        for _ in range(1):
            assert next(attach._requests).WhichOneof("message") == "heartbeat"
        yield from attach.configure()
        attach.lose()

    run(silent)


def test_its_pace_counts_steps_and_what_lies_between_them() -> None:
    def script(attach: Attach) -> Responses:
        time.sleep(1.0)
        yield from attach.configure()
        yield plan(prefill(1))
        attach.result()
        time.sleep(0.2)
        yield plan(decode(2))
        attach.result()
        attach.lose()

    _, worker = run(script, script, worker=make_worker(step_seconds=0.1))
    assert worker.pace.num_steps == 4
    assert 0.4 <= worker.pace.busy_seconds < 1.4
    assert 0.4 <= worker.pace.idle_seconds < 1.4, "what lies between two attaches is no step's gap"


class Leaver:
    """A worker that serves in a thread of its own, as a signal finds it."""

    def __init__(self, address: str) -> None:
        self.worker = make_worker()
        self._pool = ThreadPoolExecutor(1)
        self._served = self._pool.submit(self.worker.serve, address)

    def has_ended(self) -> bool:
        """Raises what ended it otherwise."""
        return self._served.result(20) is None


def test_who_leaves_answers_on_until_the_engine_ends_the_stream() -> None:
    is_told = Told()

    def script(attach: Attach) -> Responses:
        yield from attach.configure()
        yield plan(prefill(1))
        attach.result()
        is_told.set()
        attach.next("leaving")
        yield plan(decode(2))
        assert attach.result().token_ids.tolist() == EXPECTED[1:2]

    engine = ScriptedEngine(script)
    with listening(engine) as address:
        leaver = Leaver(address)
        is_told.wait()
        assert leaver.worker.leave()
        assert leaver.has_ended()
    assert (engine.errors, len(engine.hellos)) == ([], 1)


def test_who_leaves_does_so_though_the_stream_breaks() -> None:
    is_told = Told()

    def script(attach: Attach) -> Responses:
        yield from attach.configure()
        is_told.set()
        attach.next("leaving")
        attach.context.abort(grpc.StatusCode.INTERNAL, "what?")

    with listening(ScriptedEngine(script)) as address:
        leaver = Leaver(address)
        is_told.wait()
        while not leaver.worker.leave():
            pass
        assert leaver.has_ended()


def test_who_serves_nobody_has_nothing_to_wait_for() -> None:
    assert not make_worker().leave()
