"""What `make test` asks of buf: that the protos still fit the last release's, and that it would notice if not."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT / "protos/released.binpb"
BUF = Path(sysconfig.get_path("scripts"), "buf")


def breaks(protos: Path) -> str:
    """What buf says against the protos of a folder laid out as the repository is; empty = they break nothing."""
    command = [BUF, "breaking", "--against", RELEASED]
    checked = subprocess.run(command, cwd=protos, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode in (0, 100), checked.stderr
    return checked.stdout


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos/v1", tmp_path / "blockplane/v1", ignore=shutil.ignore_patterns("*.py*"))
    return tmp_path


def test_peers_and_clients_of_the_last_release_understand_these_protos(protos: Path) -> None:
    assert breaks(protos) == ""


@pytest.mark.parametrize(
    ("file", "line", "changed"),
    [
        ("engine.proto", "fixed64 epoch = 7;", "uint64 epoch = 7;"),
        ("engine.proto", "bytes released_rows = 2;", ""),
        ("inference.proto", "rpc Abort(AbortRequest) returns (AbortResponse);", ""),
    ],
)
def test_a_change_that_they_would_not_understand_is_found(protos: Path, file: str, line: str, changed: str) -> None:
    path = protos / "blockplane/v1" / file
    text = path.read_text()
    assert line in text
    path.write_text(text.replace(line, changed))
    assert f"blockplane/v1/{file}" in breaks(protos)


def test_the_release_is_whole() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes()).file
    services = {service.name for file in files for service in file.service}
    assert {"Engine", "Inference"} <= services


def test_the_release_is_that_of_the_last_tag(tmp_path: Path) -> None:
    tag = _git("describe", "--tags", "--abbrev=0")
    if tag is None:
        pytest.skip("nothing was tagged yet, or this is no clone that has the tags")
    (tmp_path / "blockplane/v1").mkdir(parents=True)
    (tmp_path / "buf.yaml").write_text(_git("show", f"{tag}:buf.yaml") or "")
    for name in (_git("ls-tree", "--name-only", f"{tag}:protos/v1") or "").split():
        if name.endswith(".proto"):
            (tmp_path / "blockplane/v1" / name).write_text((_git("show", f"{tag}:protos/v1/{name}") or "") + "\n")
    command = [BUF, "build", "--exclude-source-info", "--output", "-"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    assert built.stdout == RELEASED.read_bytes()


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
