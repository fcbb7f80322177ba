"""The worker's record on disk: whose it is, what it survives, and what it leaves alone."""

import os
from pathlib import Path

import pytest

from blockplane.data_plane.record import Record, read_record
from blockplane.protos.errors import ConfigurationError
from blockplane.v1 import engine_pb2 as pb


def kinds(path: Path) -> list[str]:
    return [f"{entry.WhichOneof('entry')} {entry.plan.step or entry.result.step}" for entry in read_record(str(path))]


def write(path: Path, *steps: int) -> None:
    record = Record(str(path))
    record.attach(b"model", pb.Configure(num_blocks=7))
    for step in steps:
        record.plan(pb.StepPlan(step=step))
        record.result(pb.StepResult(step=step))
    record.close()


def test_entries_come_back_in_order_and_a_new_attach_follows_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, 1)
    write(path, 2)
    assert kinds(path) == ["attach 0", "plan 1", "result 1", "attach 0", "plan 2", "result 2"]
    first = next(read_record(str(path))).attach
    assert (first.model_fingerprint, first.configure.num_blocks) == (b"model", 7)


def test_an_entry_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = Record(str(path))
    record.plan(pb.StepPlan(step=1))
    assert kinds(path) == ["plan 1"]
    record.close()


def test_only_its_user_may_read_it_whatever_the_file_was_before(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.touch(0o666)
    path.chmod(0o666)
    Record(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("num_lost", [1, 3, 5, 9])
def test_an_entry_that_was_not_written_to_its_end_is_dropped_and_nothing_before_it(
    tmp_path: Path, num_lost: int
) -> None:
    path = tmp_path / "record"
    write(path, 1, 300)
    os.truncate(path, path.stat().st_size - num_lost)
    kept = kinds(path)
    assert kept[:4] == ["attach 0", "plan 1", "result 1", "plan 300"][: len(kept)]
    assert len(kept) in (3, 4)
    write(path, 3)
    assert kinds(path) == [*kept, "attach 0", "plan 3", "result 3"]


def test_nothing_of_a_long_entry_that_was_cut_is_left_behind_a_short_one(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, 1)
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write((1000).to_bytes(4, "little") + b"\0" * 900)
    Record(str(path)).close()
    assert path.stat().st_size == size


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigurationError, match=r"cannot write the record .*link: .*symbolic links; set record"):
        Record(str(tmp_path / "link"))


@pytest.mark.parametrize("content", [b"a letter to a friend", b"x", b"\0" * 40])
def test_a_file_that_is_no_record_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "letter"
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="it holds something else"):
        Record(str(path))
    with pytest.raises(ConfigurationError, match="is no record of a worker"):
        list(read_record(str(path)))
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("path", ["/dev/null", "/", "/nowhere/record"])
def test_what_is_no_file_is_refused(path: str) -> None:
    mode = os.stat(path).st_mode if os.path.exists(path) else None
    with pytest.raises(ConfigurationError, match="cannot write the record"):
        Record(path)
    assert mode is None or os.stat(path).st_mode == mode


def test_two_workers_do_not_share_a_record(tmp_path: Path) -> None:
    record = Record(str(tmp_path / "record"))
    with pytest.raises(ConfigurationError, match="another worker writes it"):
        Record(str(tmp_path / "record"))
    record.close()
    Record(str(tmp_path / "record")).close()


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    record = Record(str(tmp_path / "record"))
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), record._file.fileno())
    with pytest.raises(ConfigurationError, match=r"cannot write the record .*: No space left on device; set record"):
        record.plan(pb.StepPlan(step=1))
    record._file.raw.close()


def test_a_damaged_record_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, 1)
    data = bytearray(path.read_bytes())
    data[24] = 0xFF
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match="is damaged"):
        list(read_record(str(path)))
