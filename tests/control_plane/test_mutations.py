"""Whether the scheduler's tests would notice a broken line: most of 60 that are drawn at random must be."""

import sys

import mutation
import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_at_least_57_of_60_broken_lines_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutation.py", "--seed", "1", "--count", "60", "--survivors", "3"])
    is_short_of_it = mutation.main()
    with capsys.disabled():
        print(capsys.readouterr().out)
    assert not is_short_of_it


def test_a_drawn_line_is_changed_once_and_still_python() -> None:
    mutants = mutation.draw(seed=7, count=40)
    assert len({(mutant.path, mutant.line) for mutant in mutants}) == 40
    assert mutants == mutation.draw(seed=7, count=40)
    for mutant in mutants:
        source = (mutation.ROOT / mutant.path).read_text()
        assert mutation.mutated(mutant, source) != mutation.mutated(None, source)
        compile(mutation.mutated(mutant, source), mutant.path, "exec")
