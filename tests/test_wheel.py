"""What `pip install .` gives: one package under one name, the generated protobuf code in it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_holds_every_module_once_and_nothing_beside_the_package(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].removesuffix(".dist-info").split("-")[0] for name in names} == {"blockplane"}
    folders = ("client", "control_plane", "data_plane", "kernels", "protos")
    modules = {path.relative_to(source).as_posix() for folder in folders for path in (source / folder).rglob("*.py")}
    # The generated code has one place, under the name that it is imported by.
    expected = {f"blockplane/{name}".replace("blockplane/protos/v1/", "blockplane/v1/") for name in modules}
    assert {name for name in names if name.endswith(".py")} == expected | {"blockplane/__init__.py"}
    assert {"blockplane/v1/inference.proto", "blockplane/v1/engine.proto", "blockplane/py.typed"} <= set(names)
