"""The journal's file: requests, their tokens and their ends in SQLite, one transaction at a time. Knows no threads.

A step's tokens are one row of `steps`, whatever the number of streams. Every FOLD_STEPS steps they are turned about
into `chunks`, one for each sample, so that a sample's tokens are read and deleted without those of others.

SQLite writes ahead (WAL) and hands each commit to the operating system, but waits for the disk at checkpoints only
(https://www.sqlite.org/pragma.html#pragma_synchronous): what is committed outlives this process, not a loss of power.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from blockplane.control_plane.engine.journal_entries import (
    AcceptedRequest,
    JournaledRequest,
    JournalEntry,
    SampleEnding,
    sample_number,
)
from blockplane.protos.columns import column_from_bytes, column_to_bytes
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.plan import Int32Array
from blockplane.protos.sampling import MAX_SAMPLES

FOLD_STEPS = 128
FORMAT = 1
_LOCK_SECONDS = 5.0
"""So long an engine that was killed may take to let go of the file."""

_SCHEMA = """
CREATE TABLE requests (
    number INTEGER PRIMARY KEY, request_id TEXT, caller TEXT, model TEXT, submission BLOB, num_samples INTEGER,
    arrival REAL, deadline REAL, num_live INTEGER, ended REAL);
CREATE INDEX requests_by_id ON requests (request_id);
CREATE INDEX requests_by_end ON requests (ended);
CREATE TABLE steps (step INTEGER PRIMARY KEY, sample_numbers BLOB, token_ids BLOB);
CREATE TABLE chunks (sample_number INTEGER, step INTEGER, token_ids BLOB, PRIMARY KEY (sample_number, step))
    WITHOUT ROWID;
CREATE TABLE endings (sample_number INTEGER PRIMARY KEY, ending BLOB);
"""

_REQUEST = "number, request_id, caller, model, submission, num_samples, arrival, deadline"

_SELECT = f"SELECT {_REQUEST} FROM requests"  # noqa: S608 - constants

_INT64 = np.dtype("<i8")


class JournalFile:
    """One open file. Its methods raise sqlite3.Error where the disk fails, and have then changed nothing in it."""

    def __init__(self, path: str) -> None:
        """Open the file, or make it; only its owner can read it, and one engine at a time has it.

        Raises:
            ConfigurationError: it cannot be had, is no journal, or one of another version.
        """
        try:
            _make_private(path)
            self._file = sqlite3.connect(path, timeout=_LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from None
        try:
            self._prepare(path)
            self._read_state()
        except sqlite3.Error as error:
            self._file.close()
            raise _unusable(path, error) from None
        except ConfigurationError:
            self._file.close()
            raise

    def _read_state(self) -> None:
        ((last,),) = self._file.execute("SELECT COALESCE(MAX(number), 0) FROM requests")
        self.next_number: int = last + 1
        self._unfolded = [
            (np.frombuffer(numbers, _INT64), column_from_bytes(token_ids))
            for numbers, token_ids in self._file.execute("SELECT sample_numbers, token_ids FROM steps ORDER BY step")
        ]
        ((self._step,),) = self._file.execute(
            "SELECT MAX((SELECT COALESCE(MAX(step), 0) FROM steps), (SELECT COALESCE(MAX(step), 0) FROM chunks))"
        )

    def _prepare(self, path: str) -> None:
        execute = self._file.execute
        # One engine has the file for as long as it lives: no other could be told what is in flight.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("BEGIN IMMEDIATE")
        ((version,),) = execute("PRAGMA user_version")
        ((num_tables,),) = execute("SELECT COUNT(*) FROM sqlite_master")
        if version == 0 and num_tables == 0:
            for statement in _SCHEMA.split(";"):
                execute(statement)
            execute(f"PRAGMA user_version = {FORMAT}")
        elif version != FORMAT:
            raise ConfigurationError(
                f"{path} has format {version} and this version writes {FORMAT}; name another file."
            )
        execute("COMMIT")

    def close(self) -> None:
        self._file.close()

    def append(self, entries: Sequence[JournalEntry], now: float) -> None:
        """Add entries in one transaction. `now`: seconds of the Unix clock, when requests that end with them ended."""
        steps = [(entry.sample_numbers, entry.token_ids) for entry in entries if entry.token_ids.size]
        accepted = [request for entry in entries for request in entry.accepted]
        endings = [ending for entry in entries for ending in entry.endings]
        with self._transaction():
            if accepted:
                self._insert_requests(accepted)
            self._file.executemany(
                "INSERT INTO steps VALUES (?, ?, ?)",
                (
                    (step, numbers.astype(_INT64, copy=False).tobytes(), column_to_bytes(token_ids))
                    for step, (numbers, token_ids) in enumerate(steps, self._step + 1)
                ),
            )
            if endings:
                self._insert_endings(endings, now)
        self._step += len(steps)
        self._unfolded += steps

    def _insert_requests(self, accepted: Sequence[AcceptedRequest]) -> None:
        self._file.executemany(
            f"INSERT INTO requests ({_REQUEST}, num_live) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608 - constant
            (
                (
                    request.number,
                    request.request_id,
                    request.caller,
                    request.model,
                    request.submission,
                    request.num_samples,
                    request.arrival,
                    request.deadline,
                    request.num_samples,
                )
                for request in accepted
            ),
        )

    def _insert_endings(self, endings: Sequence[SampleEnding], now: float) -> None:
        self._file.executemany(
            "INSERT INTO endings VALUES (?, ?)", ((ending.sample_number, ending.ending) for ending in endings)
        )
        self._file.executemany(
            "UPDATE requests SET num_live = num_live - 1, ended = CASE WHEN num_live = 1 THEN ? END WHERE number = ?",
            ((now, ending.sample_number // MAX_SAMPLES) for ending in endings),
        )

    def tidy(self, ended_before: float | None = None) -> None:
        """Do what is due, while nobody waits; and forget requests that ended before that time, if one is given."""
        if len(self._unfolded) >= FOLD_STEPS:
            self.fold()
        if ended_before is not None:
            self.delete_ended(ended_before)

    def fold(self) -> None:
        """Turn the steps' tokens about into chunks of each sample."""
        if not self._unfolded:
            return
        numbers = np.concatenate([numbers for numbers, _ in self._unfolded])
        token_ids = np.concatenate([token_ids for _, token_ids in self._unfolded])
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
        parts = np.split(token_ids[order], starts[1:])
        with self._transaction():
            self._file.executemany(
                "INSERT INTO chunks VALUES (?, ?, ?)",
                (
                    (sample, self._step, column_to_bytes(part))
                    for sample, part in zip(numbers[starts].tolist(), parts, strict=True)
                ),
            )
            self._file.execute("DELETE FROM steps")
        self._unfolded = []

    def delete_ended(self, before: float) -> None:
        """Forget requests that ended before that time, seconds of the Unix clock."""
        numbers = self._file.execute("SELECT number FROM requests WHERE ended < ?", (before,)).fetchall()
        if not numbers:
            return
        self.fold()
        with self._transaction():
            for table in ("chunks", "endings"):
                self._file.executemany(
                    f"DELETE FROM {table} WHERE sample_number BETWEEN ? AND ?",  # noqa: S608 - constants
                    ((sample_number(number, 0), sample_number(number + 1, 0) - 1) for (number,) in numbers),
                )
            self._file.executemany("DELETE FROM requests WHERE number = ?", numbers)

    def live(self) -> Iterator[JournaledRequest]:
        """The requests of which some sample has not ended, in the order in which they were accepted."""
        self.fold()
        rows = self._file.execute(f"{_SELECT} WHERE ended IS NULL ORDER BY number")
        yield from map(self._journaled, rows.fetchall())

    def find(self, request_id: str, caller: str) -> JournaledRequest | None:
        """The caller's newest request of that id; None = it has none here."""
        self.fold()
        rows = self._file.execute(
            f"{_SELECT} WHERE request_id = ? AND caller = ? ORDER BY number DESC LIMIT 1", (request_id, caller)
        )
        row = rows.fetchone()
        return None if row is None else self._journaled(row)

    def _journaled(self, row: tuple[int, str, str, str, bytes, int, float, float | None]) -> JournaledRequest:
        accepted = AcceptedRequest(*row)
        numbers = [sample_number(accepted.number, index) for index in range(accepted.num_samples)]
        return JournaledRequest(accepted, tuple(map(self._output, numbers)), tuple(map(self._ending, numbers)))

    def _output(self, number: int) -> Int32Array:
        chunks = self._file.execute("SELECT token_ids FROM chunks WHERE sample_number = ? ORDER BY step", (number,))
        return column_from_bytes(b"".join(token_ids for (token_ids,) in chunks))

    def _ending(self, number: int) -> bytes | None:
        row = self._file.execute("SELECT ending FROM endings WHERE sample_number = ?", (number,)).fetchone()
        return None if row is None else bytes(row[0])

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._file)


class _Transaction:
    """All that is executed inside, or nothing of it."""

    def __init__(self, file: sqlite3.Connection) -> None:
        self._file = file

    def __enter__(self) -> None:
        self._file.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._file.execute("COMMIT")
        elif self._file.in_transaction:
            self._file.execute("ROLLBACK")


def _unusable(path: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"cannot use {path} as a journal ({error}); name another file.")


def _make_private(path: str) -> None:
    """Make the file if it is not there, and let only its owner at it; a link is not followed. SQLite gives the files
    that it puts beside it the same mode.
    """
    descriptor = os.open(Path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        # Closed before SQLite opens it: to close any descriptor of a file drops the process's locks on it.
        os.close(descriptor)
