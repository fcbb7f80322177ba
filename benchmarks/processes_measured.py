"""CPU time and memory of a process and all that descend from it, read from Linux's /proc; knows not what they are."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")
SAMPLE_SECONDS = 2.0
"""Between two looks at the memory: each walks the page tables, which takes some 7 ms for a gigabyte of small pages."""

_TICKS = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """CPU seconds of a process, its ended threads included, and of each of its threads that lives, by its id.

    The thread that the process began with has the process's own id.
    """

    name: str
    seconds: float
    threads: Mapping[int, float]


def process_tree(pid: int) -> list[int]:
    """A process and its descendants, parents first; those that are gone are left out."""
    found = [pid]
    for each in found:
        for children in (PROC / str(each)).glob("task/*/children"):
            with suppress(*_GONE):
                found += map(int, children.read_text().split())
    return [each for each in found if (PROC / str(each)).exists()]


def times_of(pid: int, called: Callable[[str], str]) -> dict[int, ProcessTimes]:
    """What each process of a tree has used so far. `called` makes a name of a command line."""
    times = {}
    for each in process_tree(pid):
        with suppress(*_GONE):
            command = (PROC / str(each) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            times[each] = ProcessTimes(called(command.strip()), _process_seconds(each), _thread_seconds(each))
    return times


def times_between(before: Mapping[int, ProcessTimes], after: Mapping[int, ProcessTimes]) -> dict[int, ProcessTimes]:
    """What those that live at the end used in between."""
    none = ProcessTimes("", 0.0, {})
    used = {}
    for pid, last in after.items():
        first = before.get(pid, none)
        threads = {thread: seconds - first.threads.get(thread, 0.0) for thread, seconds in last.threads.items()}
        used[pid] = ProcessTimes(last.name, last.seconds - first.seconds, threads)
    return used


def _process_seconds(pid: int) -> float:
    """User and system time of /proc/PID/stat, behind the name in parentheses (proc_pid_stat(5)); in clock ticks."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _thread_seconds(pid: int) -> dict[int, float]:
    """/proc/PID/task/TID/schedstat begins with nanoseconds on a CPU (Linux, sched-stats.rst)."""
    seconds = {}
    for task in (PROC / str(pid) / "task").iterdir():
        with suppress(*_GONE):
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def busy_seconds() -> float:
    """What all cores were busy for since the machine started, with what its host took from them (proc_stat(5))."""
    user, nice, system, _idle, _waiting, *interrupts_and_stolen = map(int, _first_line(PROC / "stat").split()[1:9])
    return (user + nice + system + sum(interrupts_and_stolen)) / _TICKS


def _first_line(file: Path) -> str:
    return file.read_text().partition("\n")[0]


def tree_bytes(pid: int) -> int:
    """The proportional set size of a process tree: a page that several processes share counts once in the sum."""
    return sum(map(_pss_bytes, process_tree(pid)))


def _pss_bytes(pid: int) -> int:
    with suppress(*_GONE):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


class PeakMemory:
    """The most that a process tree was seen to hold, looked at every SAMPLE_SECONDS while this is entered.

    Attributes:
        largest: bytes, since it was entered.
    """

    def __init__(self, pid: int) -> None:
        self.largest = 0
        self._recent = 0
        self._pid = pid
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="peak memory")

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._watcher.join()

    def take(self) -> int:
        """Look, and return the most since this was called last."""
        self._look()
        recent, self._recent = self._recent, 0
        return recent

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        num_bytes = tree_bytes(self._pid)
        self._recent = max(self._recent, num_bytes)
        self.largest = max(self.largest, num_bytes)
