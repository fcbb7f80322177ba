"""The journal: what was committed is there after any crash, nothing else is, and nobody but its owner reads it."""

import os
import shutil
import sqlite3
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockplane.control_plane.engine import journal_file
from blockplane.control_plane.engine.journal import Journal
from blockplane.control_plane.engine.journal_entries import (
    AcceptedRequest,
    JournaledRequest,
    JournalEntry,
    SampleEnding,
    sample_number,
)
from blockplane.control_plane.engine.journal_file import JournalFile
from blockplane.protos.errors import ConfigurationError, UnavailableError

SECONDS = 10


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


@pytest.fixture
def file(path: str) -> Iterator[JournalFile]:
    file = JournalFile(path)
    yield file
    file.close()


def request(number: int, request_id: str = "r", caller: str = "", num_samples: int = 1) -> AcceptedRequest:
    return AcceptedRequest(number, request_id, caller, "m", b"submission", num_samples, 5.0, 7.5)


def accepting(*accepted: AcceptedRequest) -> JournalEntry:
    return JournalEntry(accepted)


def telling(*tokens: tuple[int, int]) -> JournalEntry:
    """Tokens by the samples' numbers."""
    numbers, token_ids = zip(*tokens, strict=True)
    return JournalEntry((), np.array(numbers, np.int64), np.array(token_ids, np.int32))


def ending(*numbers: int) -> JournalEntry:
    return JournalEntry(endings=tuple(SampleEnding(number, b"end") for number in numbers))


def outputs(journaled: JournaledRequest | None) -> list[list[int]]:
    assert journaled is not None
    return [token_ids.tolist() for token_ids in journaled.output_token_ids]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_request_comes_back_as_it_was_accepted(file: JournalFile) -> None:
    accepted = AcceptedRequest(3, "id", "ada", "gemma", b"\0\xff", 2, 1.25, None)
    file.append([accepting(accepted)], 0.0)
    (journaled,) = file.live()
    assert journaled.accepted == accepted
    assert outputs(journaled) == [[], []]
    assert journaled.endings == (None, None)


@pytest.mark.parametrize("num_steps", [1, journal_file.FOLD_STEPS, 2 * journal_file.FOLD_STEPS + 1])
def test_each_sample_has_its_own_tokens_in_their_order(path: str, num_steps: int) -> None:
    file = JournalFile(path)
    first, second = sample_number(1, 0), sample_number(1, 1)
    file.append([accepting(request(1, num_samples=2))], 0.0)
    for step in range(num_steps):
        file.append([telling((second, 1000 + step), (first, step))], 0.0)
        file.tidy()
    assert rows_in(file)["steps"] == num_steps % journal_file.FOLD_STEPS
    expected = [[*range(num_steps)], [*range(1000, 1000 + num_steps)]]
    assert outputs(file.find("r", "")) == expected
    file.append([telling((first, 5))], 0.0)
    file.close()
    again = JournalFile(path)
    again.append([telling((first, 6))], 0.0)
    assert outputs(again.find("r", "")) == [expected[0] + [5, 6], expected[1]]
    again.close()


def test_a_request_lives_until_all_its_samples_have_ended(file: JournalFile) -> None:
    file.append([accepting(request(1, num_samples=2)), ending(sample_number(1, 1))], 0.0)
    (journaled,) = file.live()
    assert journaled.endings == (None, b"end")
    file.append([ending(sample_number(1, 0))], 0.0)
    assert not list(file.live())
    found = file.find("r", "")
    assert found is not None
    assert found.endings == (b"end", b"end")


def test_only_the_caller_finds_a_request_and_finds_the_newest_of_an_id(file: JournalFile) -> None:
    mine, old, new = request(1, caller="ada"), request(2), request(3)
    file.append([accepting(mine, old), ending(sample_number(2, 0)), accepting(new)], 0.0)
    for caller, expected in ("ada", mine), ("", new):
        found = file.find("r", caller)
        assert found is not None
        assert found.accepted == expected
    assert file.find("r", "eve") is None
    assert file.find("other", "") is None


def test_ended_requests_are_forgotten_in_time_and_others_are_not(file: JournalFile) -> None:
    numbers = [1, 2, 3]
    file.append([accepting(*(request(number, f"r{number}") for number in numbers))], 0.0)
    file.append([telling(*((sample_number(number, 0), number) for number in numbers))], 0.0)
    file.append([ending(sample_number(1, 0))], now=10.0)
    file.append([ending(sample_number(2, 0))], now=20.0)
    file.delete_ended(before=20.0)
    assert file.find("r1", "") is None
    assert outputs(file.find("r2", "")) == [[2]]
    assert outputs(file.find("r3", "")) == [[3]]
    file.delete_ended(before=21.0)
    assert rows_in(file) == {"requests": 1, "steps": 0, "chunks": 1, "endings": 0}


def rows_in(file: JournalFile) -> dict[str, int]:
    tables = ("requests", "steps", "chunks", "endings")
    return {table: file._file.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables}


def test_a_failed_append_leaves_nothing_of_it(file: JournalFile) -> None:
    file.append([accepting(request(1))], 0.0)
    with pytest.raises(sqlite3.IntegrityError):
        file.append([accepting(request(2, "new")), telling((64, 1)), accepting(request(1))], 0.0)
    assert file.find("new", "") is None
    assert outputs(file.find("r", "")) == [[]]


def test_only_its_owner_may_read_any_of_its_files(path: str) -> None:
    old_mask = os.umask(0)
    try:
        file = JournalFile(path)
        file.append([accepting(request(1))], 0.0)
        files = list(Path(path).parent.iterdir())
        assert len(files) >= 2, "the write-ahead log stands beside it"
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
        file.close()
        os.chmod(path, 0o644)
        JournalFile(path).close()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    finally:
        os.umask(old_mask)


def test_a_link_is_not_followed(path: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch(mode=0o644)
    os.symlink(target, path)
    with pytest.raises(ConfigurationError, match=r"cannot use .*journal.*name another file"):
        JournalFile(path)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_second_engine_is_refused_the_file(path: str, file: JournalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "_LOCK_SECONDS", 0.05)
    with pytest.raises(ConfigurationError, match="locked"):
        JournalFile(path)
    file.append([accepting(request(1))], 0.0)


def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(path: str) -> None:
    Path(path).write_bytes(b"precious" * 1000)
    with pytest.raises(ConfigurationError, match="not a database"):
        JournalFile(path)
    assert Path(path).read_bytes() == b"precious" * 1000


@pytest.mark.parametrize("statement", ["PRAGMA user_version = 2", "CREATE TABLE others (x)"])
def test_a_journal_of_another_format_is_refused(path: str, statement: str) -> None:
    with sqlite3.connect(path) as other:
        other.execute(statement)
    other.close()
    with pytest.raises(ConfigurationError, match=r"has format . and this version writes 1"):
        JournalFile(path)


# -- any history, and a crash at any commit ----------------------------------------------------------------------------


class Model:
    """What the file should say, in plain lists."""

    def __init__(self) -> None:
        self.requests: dict[int, AcceptedRequest] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ended: set[int] = set()

    def samples(self) -> list[int]:
        return [
            sample_number(number, index)
            for number, accepted in self.requests.items()
            for index in range(accepted.num_samples)
        ]

    def open_samples(self) -> list[int]:
        return [number for number in self.samples() if number not in self.ended]

    def live(self) -> dict[int, list[list[int]]]:
        return {
            number: [self.tokens[sample_number(number, index)] for index in range(accepted.num_samples)]
            for number, accepted in self.requests.items()
            if any(sample_number(number, index) not in self.ended for index in range(accepted.num_samples))
        }


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_copy_of_the_files_after_any_commit_holds_exactly_what_was_committed(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_file, "FOLD_STEPS", 3)
        path = str(Path(folder, "journal"))
        file, model = JournalFile(path), Model()
        for index in range(data.draw(st.integers(1, 5), "transactions")):
            file.append([_draw_entry(data, model) for _ in range(data.draw(st.integers(1, 3)))], 0.0)
            file.tidy()
            copy = Path(folder, f"copy{index}")
            copy.mkdir()
            for part in Path(folder).glob("journal*"):
                shutil.copy(part, copy / part.name)
            crashed = JournalFile(str(copy / "journal"))
            assert {found.accepted.number: outputs(found) for found in crashed.live()} == model.live()
            for number, accepted in model.requests.items():
                found = crashed.find(accepted.request_id, "")
                assert found is not None
                assert found.accepted == accepted
                assert [end is not None for end in found.endings] == [
                    sample_number(number, sample) in model.ended for sample in range(accepted.num_samples)
                ]
            assert crashed.next_number == len(model.requests) + 1
            crashed.close()
        file.close()


def _draw_entry(data: st.DataObject, model: Model) -> JournalEntry:
    accepted = []
    for num_samples in data.draw(st.lists(st.integers(1, 3), max_size=2), "accepted"):
        number = len(model.requests) + 1
        accepted.append(request(number, f"r{number}", num_samples=num_samples))
        model.requests[number] = accepted[-1]
    samples = model.open_samples()
    told = data.draw(st.lists(st.sampled_from(samples), max_size=6), "told") if samples else []
    tokens = [(number, data.draw(st.integers(0, 2**31 - 1))) for number in told]
    for number, token_id in tokens:
        model.tokens[number].append(token_id)
    ended = data.draw(st.sets(st.sampled_from(samples), max_size=2), "ended") if samples else set()
    model.ended |= ended
    numbers, token_ids = zip(*tokens, strict=True) if tokens else ((), ())
    return JournalEntry(
        tuple(accepted),
        np.array(numbers, np.int64),
        np.array(token_ids, np.int32),
        tuple(SampleEnding(number, b"end") for number in ended),
    )


# -- the thread --------------------------------------------------------------------------------------------------------


class Calls:
    """What a journal called back, in order."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self.threads: set[str] = set()
        self._came = threading.Semaphore(0)

    def __call__(self, value: object) -> None:
        self.values.append(value)
        self.threads.add(threading.current_thread().name)
        self._came.release()

    def wait(self, number: int) -> None:
        for _ in range(number):
            assert self._came.acquire(timeout=SECONDS)


def started(path: str, keep_seconds: float = 3600.0) -> Journal:
    journal = Journal(path, keep_seconds)
    journal.start()
    return journal


def test_what_was_called_back_is_in_the_file_at_that_moment(path: str) -> None:
    journal, seen, calls = started(path), list[list[list[int]]](), Calls()

    def look(value: UnavailableError | None) -> None:
        folder = Path(path).parent / f"copy{len(seen)}"
        folder.mkdir()
        for part in Path(path).parent.glob("journal*"):
            shutil.copy(part, folder)
        copy = JournalFile(str(folder / "journal"))
        seen.append(outputs(copy.find("r", "")))
        copy.close()
        calls(value)

    number = journal.draw_number()
    journal.write(accepting(request(number)), look)
    for token_id in range(3):
        journal.write(telling((sample_number(number, 0), token_id)), look)
    calls.wait(4)
    journal.close()
    # Later entries may be in the same commit.
    assert all(tokens[0] == list(range(len(tokens[0]))) for tokens in seen)
    assert [len(tokens[0]) >= index for index, tokens in enumerate(seen)] == [True] * 4
    assert calls.threads == {"journal"}


def test_what_is_looked_up_holds_what_was_written_before_and_nothing_later(path: str) -> None:
    journal, calls = started(path), Calls()
    journal.write(accepting(request(1)), calls)
    journal.write(telling((64, 7)), calls)
    journal.find("r", "", calls)
    journal.write(telling((64, 8)), calls)
    journal.find("r", "eve", calls)
    journal.close()
    written, told, found, later, unknown = calls.values
    assert isinstance(found, JournaledRequest)
    assert outputs(found) == [[7]]
    assert (written, told, later, unknown) == (None, None, None, None)


def test_what_lives_is_loaded_when_the_journal_opens_and_numbers_go_on(path: str) -> None:
    journal, calls = started(path), Calls()
    number = journal.draw_number()
    journal.write(accepting(request(number)), calls)
    journal.write(telling((sample_number(number, 0), 9)), calls)
    journal.close()
    assert calls.values == [None, None], "closing commits what was written"
    again = Journal(path, 3600.0)
    (journaled,) = again.load()
    assert outputs(journaled) == [[9]]
    assert again.draw_number() == number + 1
    again.start()
    again.close()


def test_after_a_write_that_failed_all_fail_with_what_to_do(path: str) -> None:
    journal, calls = started(path), Calls()
    journal.write(accepting(request(1)), calls)
    calls.wait(1)
    while not journal._next_deletion:
        time.sleep(0.01)
    # As if a minute had passed.
    journal._next_deletion = 0.0
    journal._file._file.execute("PRAGMA query_only = ON")
    for _ in range(2):
        journal.write(telling((64, 1)), calls)
    calls.wait(2)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.02, "its thread waits and does not spin"
    journal._file._file.execute("PRAGMA query_only = OFF")
    journal.write(telling((64, 2)), calls)
    journal.find("r", "", calls)
    journal.close()
    first, *others = calls.values
    assert first is None
    assert len(others) == 4
    for error in others:
        assert isinstance(error, UnavailableError)
        assert "journal cannot be written" in str(error)
        assert "start the engine again" in str(error)
    again = Journal(path, 3600.0)
    assert [outputs(journaled) for journaled in again.load()] == [[[]]], "nothing came after what had failed"
    again.start()
    again.close()


def test_the_thread_forgets_ended_requests_by_itself(path: str) -> None:
    now = 100.0
    journal, calls = Journal(path, keep_seconds=10.0, clock=lambda: now), Calls()
    journal.start()
    journal.write(accepting(request(1)), calls)
    journal.write(ending(64), calls)
    journal.find("r", "", calls)
    calls.wait(3)
    assert isinstance(calls.values[2], JournaledRequest)
    now = 111.0
    for _ in range(SECONDS * 20):
        journal.find("r", "", calls)
        calls.wait(1)
        if calls.values[-1] is None:
            break
        threading.Event().wait(0.05)
    assert calls.values[-1] is None
    journal.close()
