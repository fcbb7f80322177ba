"""`ensure_nki` takes AWS's package where there is one, and the emulator where there is a placeholder or nothing."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def first_line_of(source: str, path: Path) -> str:
    command = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(path)!r}]\n{source}"
    return subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout.strip()


def test_a_placeholder_without_instructions_is_replaced_even_when_imported(tmp_path) -> None:
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("")
    source = "import nki; from nki_on_cpu import ensure_nki; print(ensure_nki()); import nki; print(nki.jit.__name__)"
    assert first_line_of(source, tmp_path).split() == ["True", "jit"]


def test_a_package_with_instructions_stays(tmp_path) -> None:
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "__init__.py").write_text("")
    (tmp_path / "nki" / "isa.py").write_text("")
    source = "from nki_on_cpu import ensure_nki; print(ensure_nki()); import nki; print(hasattr(nki, 'jit'))"
    assert first_line_of(source, tmp_path).split() == ["False", "False"]


def test_a_second_call_changes_nothing(tmp_path) -> None:
    source = (
        "from nki_on_cpu import ensure_nki; ensure_nki(); n = len(sys.path); print(ensure_nki(), n == len(sys.path))"
    )
    assert first_line_of(source, tmp_path).split() == ["True", "True"]
