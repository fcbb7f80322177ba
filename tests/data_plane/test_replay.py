"""What a worker recorded, run again: bit for bit the same, or told where it is not."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
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

from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.record import Record, read_record
from blockplane.data_plane.replay import Replay
from blockplane.protos.errors import ConfigurationError, ReplayError
from blockplane.protos.plan import Admission, StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import StructuredOutput
from blockplane.v1 import engine_pb2 as pb

TOLD = SamplingParams(9, 0.9, ignore_eos=True, logprobs=2, prompt_logprobs=1)
REPEATING = [5, 6, 7, 5, 6, 7, 5, 6]
ECHO = SamplingParams(9, ignore_eos=True, allowed_token_ids=(5, 6, 7))
"""What it says was there before, so that drafts are found."""
DRAFTING = replace(CONFIGURE, num_draft_tokens=2)


@cache
def make_model(dtype: str = "float32") -> SyntheticModel:
    return SyntheticModel(dtype)


def steps(*plans: StepPlan, **changes: object) -> Script:
    """Two plans are in flight, and what comes is not looked at; then the stream breaks."""

    def script(attach: Attach) -> Iterator[pb.AttachWorkerResponse]:
        yield from attach.configure(replace(CONFIGURE, **changes))
        for sent in plans:
            yield plan(sent)
        for _ in plans:
            attach.result()
        attach.lose()

    return script


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three attaches of one worker: KV is kept for the second, and the last one ends with a bad plan."""
    path = str(tmp_path_factory.mktemp("replay") / "record")
    drafted = StepPlan(3, decode_rows=column(1), decode_num_tokens=column(3))

    def bad(attach: Attach) -> Iterator[pb.AttachWorkerResponse]:
        yield from attach.configure(DRAFTING)
        for sent in (prefill(1), StepPlan(3)):
            yield plan(sent)
        attach.next("result")
        attach.next("fault")

    engine = ScriptedEngine(
        steps(prefill(1, REPEATING, params=ECHO), decode(2), drafted, epoch=1, num_draft_tokens=2),
        steps(prefill(9, REPEATING, 7, TOLD), decode(10), epoch=2, num_draft_tokens=2, keeps_kv=True, last_step=8),
        steps(prefill(1, params=TOLD), epoch=3, num_draft_tokens=2),
        bad,
    )
    record = Record(path)
    worker = lone_worker(make_model(), synthetic_model_info(64), 1 << 20, num_draft_tokens=2, record=record)
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        worker.serve(address)
    record.close()
    assert engine.errors == []
    return path


def replay(path: str, model: SyntheticModel | None = None, num_draft_tokens: int = 2) -> Replay:
    again = Replay(model or make_model(), synthetic_model_info(64), num_draft_tokens)
    for entry in read_record(path):
        again.take(entry)
    again.end()
    return again


def changed(path: str, copy: Path, step: int, change: Callable[[pb.StepResult], None]) -> str:
    """A copy of the record in which the first result of that step is another."""
    with open(copy, "wb") as file:
        file.write(b"blockplane record 1\n")
        for entry in read_record(path):
            if entry.result.step == step:
                change(entry.result)
                step = -1
            data = entry.SerializeToString()
            file.write(len(data).to_bytes(4, "little") + data)
    return str(copy)


def test_a_record_replays_bit_for_bit_over_attaches_drafts_and_told_tokens(recorded: str) -> None:
    again = replay(recorded)
    assert (again.num_attaches, again.num_results) == (4, 7)
    results = [entry.result for entry in read_record(recorded) if entry.HasField("result")]
    assert any(result.num_draft_tokens for result in results)
    assert any(result.HasField("prompt_logprobs") for result in results)
    assert {result.epoch for result in results} == {0, 1, 2, 3}


def test_a_record_of_structured_output_replays_bit_for_bit_and_where_none_is_known_is_refused(tmp_path: Path) -> None:
    """One row prefilled, one that comes with what it has said, and drafts, of which the grammar forbids some."""
    path, structured = str(tmp_path / "record"), StructuredOutput("regex", r"(\x05\x06\x07)*\x05{2}\x07+")
    echo = SamplingParams(12, structured=structured)
    drafted = StepPlan(3, decode_rows=column(1), decode_num_tokens=column(3))
    resumed = Admission(0, column(*PROMPT, 5, 6), len(PROMPT), 0, replace(echo, temperature=9.0), 8)
    joining = StepPlan(
        4,
        admissions=(resumed,),
        block_rows=column(0, 0, 0),
        block_ids=column(5, 6, 7),
        prefill_rows=column(0),
        prefill_num_tokens=column(len(PROMPT) + 2),
    )
    plans = prefill(1, REPEATING, params=echo), decode(2), drafted, joining, StepPlan(5, decode_rows=column(0, 1))
    engine = ScriptedEngine(steps(*plans, epoch=1, num_draft_tokens=2))
    info, record = synthetic_model_info(64), Record(path)
    worker = lone_worker(make_model(), info, 1 << 20, num_draft_tokens=2, record=record, grammars=Grammars(info, 1))
    with listening(engine) as address, pytest.raises(ConfigurationError, match="that was all"):
        worker.serve(address)
    record.close()
    assert engine.errors == []
    results = [entry.result for entry in read_record(path) if entry.HasField("result")]
    assert sum(result.num_draft_tokens for result in results) > 0
    assert set(np.frombuffer(results[3].token_ids, np.int32)) <= {5, 6, 7}
    again = Replay(make_model(), info, 2, grammars=Grammars(info, 1))
    for entry in read_record(path):
        again.take(entry)
    assert again.num_results == len(plans)
    with pytest.raises(ReplayError, match="structured output"):
        replay(path)


def another_token(result: pb.StepResult) -> None:
    result.token_ids = column(99).tobytes()


def one_bit_of_a_logprob(result: pb.StepResult) -> None:
    logprobs = np.frombuffer(result.logprobs.logprobs, np.int32).copy()
    logprobs[1] ^= 1
    result.logprobs.logprobs = logprobs.tobytes()


def one_bit_of_the_prompt(result: pb.StepResult) -> None:
    logprobs = np.frombuffer(result.prompt_logprobs.logprobs, np.int32).copy()
    logprobs[3] ^= 1
    result.prompt_logprobs.logprobs = logprobs.tobytes()


def another_number(result: pb.StepResult) -> None:
    result.num_tokens = column(1, 1).tobytes()


def no_logprobs(result: pb.StepResult) -> None:
    result.ClearField("logprobs")


def another_epoch(result: pb.StepResult) -> None:
    result.epoch += 1


@pytest.mark.parametrize(
    ("step", "change", "expected"),
    [
        (2, another_token, r"after 1 equal results, step 2 differs in row 1: token_ids 99 on record, \d+ now\."),
        (9, one_bit_of_a_logprob, r"after 3 .* step 9 differs in row 1: logprobs -\S+ on record, -\S+ now\."),
        (9, no_logprobs, r"step 9 differs in logprobs' num_entries: absent on record, 1 entries now\."),
        (3, another_number, r"step 3 differs in num_tokens: 2 entries on record, 1 entries now\."),
        (10, another_epoch, r"step 10 differs in epoch 3 on record, 2 now\."),
    ],
)
def test_the_first_difference_is_told_with_its_step_row_and_values(
    recorded: str, tmp_path: Path, step: int, change: Callable[[pb.StepResult], None], expected: str
) -> None:
    with pytest.raises(ReplayError, match=expected):
        replay(changed(recorded, tmp_path / "copy", step, change))


def test_a_bit_of_a_told_prompt_is_a_difference(recorded: str, tmp_path: Path) -> None:
    lines = list(read_record(recorded))
    place = next(index for index, entry in enumerate(lines) if len(entry.result.prompt_logprobs.logprobs) > 12)
    one_bit_of_the_prompt(lines[place].result)
    again = Replay(make_model(), synthetic_model_info(64), 2)
    for entry in lines[:place]:
        again.take(entry)
    with pytest.raises(ReplayError, match=r"step 1 differs in entry 3: prompt_logprobs -"):
        again.take(lines[place])


def test_a_record_of_another_model_is_refused(recorded: str) -> None:
    with pytest.raises(ConfigurationError, match="the record is not of synthetic as these settings load it"):
        replay(recorded, make_model("bfloat16"))


def test_a_record_without_its_beginning_is_refused(recorded: str) -> None:
    _, first, result, *_ = read_record(recorded)
    with pytest.raises(ConfigurationError, match="a plan before any attach"):
        Replay(make_model(), synthetic_model_info(64), 2).take(first)
    with pytest.raises(ConfigurationError, match="a result without its plan"):
        Replay(make_model(), synthetic_model_info(64), 2).take(result)


def test_a_plan_that_was_not_answered_runs_again_and_is_told_of(
    recorded: str, caplog: pytest.LogCaptureFixture
) -> None:
    attach, first, *_ = read_record(recorded)
    again = Replay(make_model(), synthetic_model_info(64), 2)
    again.take(attach)
    again.take(first)
    again.end()
    assert "step 1 has no result on record; it is computed now" in caplog.text
    replay(recorded)
    assert "step 3 has no result on record; it is refused now too: the engine sent a bad plan" in caplog.text


def test_the_command_says_that_all_is_the_same_or_ends_with_1(recorded: str, tmp_path: Path) -> None:
    settings = ["--model=synthetic", "--dtype=float32", "--max-model-len=64", "--num-draft-tokens=2", "--num-threads=1"]
    copy = changed(recorded, tmp_path / "copy", 2, another_token)
    same, different = (
        subprocess.run(
            [sys.executable, "-m", "blockplane.client", "replay", path, *settings], capture_output=True, text=True
        )
        for path in (recorded, copy)
    )
    assert (same.returncode, same.stdout) == (0, "7 results of 4 attaches are the same, bit for bit.\n"), same.stderr
    assert different.returncode == 1
    assert "\nblockplane replay: after 1 equal results, step 2 differs in row 1: token_ids 99 on" in different.stderr
