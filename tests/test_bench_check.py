"""The guard of the benchmarks' ratios: it finds numbers, judges them, and fails where one is missed."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import FOLDER, load_benchmark

DOCUMENT = {"figures": [{"name": "a", "size": 1, "us": 4.0}, {"name": "a", "size": 2, "us": 10}], "share": 0.25}


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load_benchmark("check")


def us(size: int) -> list[Any]:
    return ["figures", {"name": "a", "size": size}, "us"]


def test_a_number_is_found_by_keys_and_by_the_fields_of_a_list_s_element(check: ModuleType) -> None:
    assert check.number_at(DOCUMENT, ["share"]) == 0.25
    assert check.number_at(DOCUMENT, us(2)) == 10


@pytest.mark.parametrize(
    "place", [["absent"], us(3), ["figures", {"name": "a"}, "us"], ["figures"], ["figures", {"size": 1}, "name"]]
)
def test_what_is_not_one_number_is_an_error_and_never_a_pass(check: ModuleType, place: list[Any]) -> None:
    with pytest.raises(LookupError):
        check.number_at(DOCUMENT, place)


def test_a_ratio_is_of_two_numbers_of_one_run_or_stands_there(check: ModuleType) -> None:
    assert check.Bound("s", "x", us(2), us(1), at_most=3).ratio(DOCUMENT) == 2.5
    assert check.Bound("s", "x", ["share"], at_most=3).ratio(DOCUMENT) == 0.25


def test_a_bound_has_one_side(check: ModuleType) -> None:
    for sides in {}, {"at_least": 1.0, "at_most": 2.0}:
        with pytest.raises(ValueError, match="one of at_least and at_most"):
            check.Bound("s", "x", ["share"], **sides)


def test_the_bound_itself_is_met_and_a_nan_meets_nothing(check: ModuleType) -> None:
    least, most = check.Bound("s", "x", ["a"], at_least=0.5), check.Bound("s", "x", ["a"], at_most=0.5)
    assert [least.is_met(ratio) for ratio in (0.4, 0.5, 0.6, float("nan"))] == [False, True, True, False]
    assert [most.is_met(ratio) for ratio in (0.4, 0.5, 0.6, float("nan"))] == [True, True, False, False]


def test_of_several_runs_the_best_ratio_counts(check: ModuleType) -> None:
    bounds = [check.Bound("s", "x", ["a"], at_least=1), check.Bound("s", "y", ["a"], at_most=1)]
    assert [verdict.ratio for verdict in check.verdicts_of(bounds, [{"a": 2}, {"a": 3}, {"a": 1}])] == [3, 1]


def test_only_a_script_that_misses_runs_again(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"good": [1.0], "late": [9.0, 2.0], "bad": [9.0, 8.0]}
    monkeypatch.setattr(check, "measured", lambda script: {"ratio": answers[script].pop(0)})
    verdicts = list(check.judge([check.Bound(script, "x", ["ratio"], at_most=2) for script in answers]))
    assert [(verdict.ratio, verdict.is_met) for verdict in verdicts] == [(1, True), (2, True), (8, False)]
    assert answers == {"good": [], "late": [], "bad": []}


def test_a_miss_is_shown_and_fails_the_run(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bounds = [check.Bound("fast", "a", ["ratio"], at_least=0.5), check.Bound("slow", "b", ["ratio"], at_most=0.5)]
    monkeypatch.setattr(check, "read_bounds", lambda: bounds)
    monkeypatch.setattr(check, "measured", lambda script: {"ratio": 0.75})
    for flags, status in ([], 1), (["fast"], 0), (["slow", "--json", str(tmp_path / "ratios")], 1):
        monkeypatch.setattr(sys, "argv", ["check.py", *flags])
        assert check.main() == status
        out = capsys.readouterr().out
        assert ("MISSED" in out) == bool(status)
    (told,) = json.loads((tmp_path / "ratios").read_text())
    assert (told["script"], told["ratio"], told["is_met"]) == ("slow", 0.75, False)


def test_a_script_that_fails_ends_the_check_with_its_words(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("print('out of wind'); raise SystemExit(3)")
    monkeypatch.setattr(check, "FOLDER", tmp_path)
    with pytest.raises(SystemExit, match=r"out of wind\n\nbroken ended with 3"):
        check.measured("broken")


def test_a_script_is_asked_for_its_quick_form(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "told.py").write_text("import json, sys; json.dump(sys.argv[1:], open(sys.argv[3], 'w'))")
    monkeypatch.setattr(check, "FOLDER", tmp_path)
    assert check.measured("told")[:2] == ["--quick", "--json"]


def test_the_committed_bounds_are_of_scripts_that_are_there(check: ModuleType) -> None:
    bounds = check.read_bounds()
    assert {bound.script for bound in bounds} <= {file.stem for file in FOLDER.glob("*.py")}
    assert len({bound.says for bound in bounds}) == len(bounds)
