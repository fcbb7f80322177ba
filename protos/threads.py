"""How many threads a CPU worker may use: the cores of its affinity and of its cgroup. Knows nothing of torch."""

import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def num_usable_cores(root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Cores that this process may keep busy, at least 1.

    The least of its affinity, which a cgroup's cpuset narrows, and of every CPU quota from its cgroup up to the root:
    threads beyond a quota are stopped for the rest of each period, together.

    Args:
        root: where cgroups are mounted. own_cgroups: names this process's, as /proc/self/cgroup does.
    """
    limits = [len(os.sched_getaffinity(0))]
    group = own_cgroup(own_cgroups)
    for folder in (root / group, *(root / group).parents):
        if folder.is_relative_to(root):
            limits += [limit for limit in (_quota(folder), _cpuset(folder)) if limit is not None]
    return max(1, min(limits))


def own_cgroup(own_cgroups: Path) -> str:
    """The path of this process's cgroup below the root; the root itself, "", where it is not told (cgroups 1)."""
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")


def _quota(folder: Path) -> int | None:
    """Whole cores of `cpu.max`, which reads "quota period" in microseconds or "max period" (Linux, cgroup-v2.rst).

    Rounded down: of 2.5 cores, a third thread would wait half of the time, and the others for it.
    """
    quota, *period = _read(folder / "cpu.max").split() or ["max"]
    return None if quota == "max" or not period else int(quota) // int(period[0])


def _cpuset(folder: Path) -> int | None:
    """How many cores `cpuset.cpus.effective` lists, such as "0-3,8"; None = it is not there."""
    ranges = [part.split("-") for part in _read(folder / "cpuset.cpus.effective").strip().split(",") if part]
    return sum(int(bounds[-1]) - int(bounds[0]) + 1 for bounds in ranges) or None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
