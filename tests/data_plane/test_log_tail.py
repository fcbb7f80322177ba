"""The last lines of a process's log."""

import logging
from collections.abc import Iterator

import pytest

from blockplane.data_plane.log_tail import MAX_BYTES, MAX_LINES, LogTail, keep_log_tail


@pytest.fixture
def tail() -> Iterator[LogTail]:
    tail = keep_log_tail()
    yield tail
    logging.getLogger().removeHandler(tail)


def test_the_newest_lines_are_kept_whoever_writes_them(tail: LogTail) -> None:
    for number in range(MAX_LINES):
        logging.getLogger(f"somebody.{number % 3}").warning("line %d\nand its second", number)
    lines = tail.text().splitlines()
    assert len(lines) == MAX_LINES
    assert lines[0].endswith(f"line {MAX_LINES // 2}")
    assert lines[-1] == "and its second"


def test_long_lines_are_cut_at_their_beginning_and_between_characters(tail: LogTail) -> None:
    logging.getLogger("somebody").warning("é" * MAX_BYTES + "!")
    text = tail.text()
    assert MAX_BYTES - 2 <= len(text.encode()) <= MAX_BYTES
    assert text.endswith("é!")


def test_nothing_is_said_of_nothing(tail: LogTail) -> None:
    assert tail.text() == ""
