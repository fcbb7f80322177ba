"""The watchdog: whom it ends, and whom it leaves alone."""

import logging
import time
from threading import Event

import pytest

from blockplane.data_plane.ranks.process_ranks import Wait
from blockplane.data_plane.ranks.watchdog import EXIT_BLOCKED, Watchdog

GRACE = 0.2


class Watched:
    """A main thread that waits, or not."""

    def __init__(self, seconds: float = GRACE) -> None:
        self.wait: Wait | None = None
        self.has_ended, self.is_told, self.is_killed = Event(), Event(), Event()
        self.dog = Watchdog(lambda: self.wait, self.has_ended, self.is_told, seconds, self.is_killed.set)


def test_a_wait_that_outlasts_the_stream_ends_the_process_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.wait = Wait("an all_reduce", time.monotonic())
    with caplog.at_level(logging.CRITICAL):
        watched.has_ended.set()
        assert watched.is_killed.wait(20)
    assert "still waits in an all_reduce for others that are gone" in caplog.text
    assert f"with status {EXIT_BLOCKED}" in caplog.text


def test_a_wait_that_no_signal_gets_through_to_ends_the_process_too(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.wait = Wait("a broadcast", time.monotonic())
    watched.is_told.set()
    assert watched.is_killed.wait(20)
    assert "a signal came" in caplog.text


def test_a_wait_goes_on_as_long_as_the_stream_does() -> None:
    watched = Watched()
    watched.wait = Wait("a broadcast", time.monotonic() - 1000)
    assert not watched.is_killed.wait(3 * GRACE)
    watched.dog.stop()


def test_an_old_wait_has_its_seconds_from_the_stream_s_end_on() -> None:
    watched = Watched(seconds=4.0)
    watched.wait = Wait("a broadcast", time.monotonic() - 1000)
    watched.has_ended.set()
    assert not watched.is_killed.wait(1.0)
    watched.dog.stop()


def test_waits_that_end_are_none_that_blocks() -> None:
    watched = Watched()
    watched.has_ended.set()
    until = time.monotonic() + 5 * GRACE
    while time.monotonic() < until:
        watched.wait = Wait("a broadcast", time.monotonic())
        time.sleep(GRACE / 20)
    is_killed = watched.is_killed.is_set()
    watched.dog.stop()
    assert not is_killed


def test_work_without_a_wait_may_take_its_time_and_whoever_is_out_is_safe() -> None:
    watched = Watched()
    watched.has_ended.set()
    assert not watched.is_killed.wait(3 * GRACE)
    watched.dog.stop()
    watched.wait = Wait("a broadcast", 0.0)
    assert not watched.is_killed.wait(3 * GRACE)
