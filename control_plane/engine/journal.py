"""The engine's journal: one thread that commits what the engine writes, in its order. Knows neither engine nor network.

What is written while a commit is under way goes into the next one, all of it together. Once a write has failed none
succeeds any more, so that the file never holds a step without those before it: what a client got is at most what the
file has.
"""

import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from blockplane.control_plane.engine.journal_entries import JournaledRequest, JournalEntry
from blockplane.control_plane.engine.journal_file import JournalFile
from blockplane.protos.errors import UnavailableError

logger = logging.getLogger(__name__)

_Written: TypeAlias = Callable[[UnavailableError | None], None]
_Found: TypeAlias = Callable[[JournaledRequest | UnavailableError | None], None]


@dataclass(frozen=True, slots=True)
class _Write:
    entry: JournalEntry
    done: _Written


@dataclass(frozen=True, slots=True)
class _Find:
    request_id: str
    caller: str
    done: _Found


class Journal:
    """Writes and reads in the order in which it is told, and calls back from its own thread, in that order too."""

    def __init__(self, path: str, keep_seconds: float, clock: Callable[[], float] = time.time) -> None:
        """Open the file; requests are forgotten `keep_seconds` after their end. `clock`: the Unix clock's seconds.

        Raises:
            ConfigurationError: the file cannot be had.
        """
        self._path, self._keep_seconds, self._clock = path, keep_seconds, clock
        self._file = JournalFile(path)
        self._failure: UnavailableError | None = None
        self._next_number = self._file.next_number
        self.num_commits = 0
        self._items: queue.SimpleQueue[_Write | _Find | None] = queue.SimpleQueue()
        self._next_deletion = 0.0
        self._writer = threading.Thread(target=self._run, name="journal", daemon=True)

    def load(self) -> list[JournaledRequest]:
        """The requests that have not ended, as they were accepted; asked for before the first write."""
        return list(self._file.live())

    def start(self) -> None:
        self._writer.start()

    def draw_number(self) -> int:
        """A number for a request, larger than all before."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def write(self, entry: JournalEntry, done: _Written) -> None:
        """Have `done` called once the entry is in the file, or with why it is not."""
        self._items.put(_Write(entry, done))

    def find(self, request_id: str, caller: str, done: _Found) -> None:
        """Have `done` called with the caller's newest request of that id, as all that was written before leaves it."""
        self._items.put(_Find(request_id, caller, done))

    def close(self) -> None:
        """Commit what was written and let go of the file."""
        self._items.put(None)
        self._writer.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = self._gather()
            is_open = None not in items
            writes: list[_Write] = []
            for item in items:
                if isinstance(item, _Write):
                    writes.append(item)
                    continue
                self._commit(writes)
                writes = []
                if item is not None:
                    self._look_up(item)
            self._commit(writes)
            self._tidy()
        with contextlib.suppress(sqlite3.Error):
            self._file.close()

    def _gather(self) -> list[_Write | _Find | None]:
        """All that waits; if nothing does, wait for something, but not past the next deletion."""
        items: list[_Write | _Find | None] = []
        until_deletion = max(0.0, self._next_deletion - time.monotonic())
        with contextlib.suppress(queue.Empty):
            items.append(self._items.get(timeout=until_deletion if self._failure is None else None))
            while True:
                items.append(self._items.get_nowait())
        return items

    def _commit(self, writes: list[_Write]) -> None:
        if writes and self._failure is None:
            try:
                self._file.append([write.entry for write in writes], self._clock())
                self.num_commits += 1
            except (sqlite3.Error, OSError) as error:
                self._fail(error)
        for write in writes:
            write.done(self._failure)

    def _look_up(self, item: _Find) -> None:
        if self._failure is None:
            try:
                item.done(self._file.find(item.request_id, item.caller))
                return
            except (sqlite3.Error, OSError) as error:
                self._fail(error)
        item.done(self._failure)

    def _tidy(self) -> None:
        if self._failure is not None:
            return
        before = None
        if time.monotonic() >= self._next_deletion:
            self._next_deletion = time.monotonic() + min(60.0, max(1.0, self._keep_seconds / 10))
            before = self._clock() - self._keep_seconds
        try:
            self._file.tidy(before)
        except (sqlite3.Error, OSError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = UnavailableError(
            f"the journal {self._path} cannot be written ({error}); make room for it and start the engine again."
        )
        logger.error("%s", self._failure)
