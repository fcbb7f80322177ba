"""Thread counts from the files of a control group, made up."""

import os
from pathlib import Path

import pytest

from blockplane.protos.threads import num_usable_cores


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def cores(root: Path, own: str = "0::/a/b\n", **files: str) -> int:
    """Usable cores where `files` are written: `a__b__cpu_max` is a/b/cpu.max."""
    for name, text in files.items():
        *folders, file = name.split("__")
        file = {"cpu_max": "cpu.max", "cpuset": "cpuset.cpus.effective"}[file]
        folder = root.joinpath("cgroup", *folders)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    (root / "own").write_text(own)
    return num_usable_cores(root / "cgroup", root / "own")


def test_without_limits_all_cores_of_the_affinity_are_used(tmp_path: Path) -> None:
    assert cores(tmp_path) == 16
    assert cores(tmp_path, a__b__cpu_max="max 100000\n") == 16


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("1000000 50000", 16), ("6000 2000\n", 3)],
)
def test_a_quota_is_whole_cores_and_at_least_one(tmp_path: Path, cpu_max: str, expected: int) -> None:
    assert cores(tmp_path, a__b__cpu_max=cpu_max) == expected


def test_the_least_quota_on_the_way_to_the_root_holds(tmp_path: Path) -> None:
    assert cores(tmp_path, a__b__cpu_max="800000 100000", a__cpu_max="300000 100000") == 3
    assert cores(tmp_path, cpu_max="200000 100000") == 2


def test_a_sibling_s_quota_does_not_matter(tmp_path: Path) -> None:
    assert cores(tmp_path, a__c__cpu_max="100000 100000") == 16


def test_a_container_s_root_is_its_own_group(tmp_path: Path) -> None:
    assert cores(tmp_path, own="0::/\n", cpu_max="200000 100000") == 2
    assert cores(tmp_path, own="3:cpu:/x\n1:name=systemd:/x\n", cpu_max="200000 100000") == 2


@pytest.mark.parametrize(("cpuset", "expected"), [("0-3,8\n", 5), ("7\n", 1), ("\n", 16), ("0-63", 16)])
def test_a_cpuset_is_counted(tmp_path: Path, cpuset: str, expected: int) -> None:
    assert cores(tmp_path, a__b__cpuset=cpuset) == expected


def test_where_there_are_no_control_groups_the_affinity_holds(tmp_path: Path) -> None:
    assert num_usable_cores(tmp_path / "none", tmp_path / "none") == 16
