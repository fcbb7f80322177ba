"""The placement benchmark on few requests, so that it cannot rot; and that its figures are of what they say."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_benchmark("placement")


@pytest.fixture(scope="module")
def figures(benchmark: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "WINDOW_SECONDS", 0.2)
        return benchmark.measure(150, ("scarce",))


def test_every_policy_is_measured_and_one_group_alone_computes_each_prefix_once(figures: Any) -> None:
    assert [figure.policy for figure in figures] == ["single", "prefix", "load", "turns"] * 2
    for single, *others in (figures[:4], figures[4:]):
        num_prefixes = round(150 * (1 - single.cached * 1088 / 1024))
        assert 10 < num_prefixes <= 16
        assert single.cached_ratio == single.imbalance == 1
        assert all(0 < figure.cached <= single.cached for figure in others)


def test_turns_and_loads_are_policies_of_their_own(figures: Any) -> None:
    _, prefix, load, turns = figures[:4]
    assert prefix.cached > 1.2 * max(load.cached, turns.cached)
    assert len({prefix.imbalance, load.imbalance, turns.imbalance}) == 3


def test_a_miss_is_shown_and_only_fails_a_check(
    benchmark: Any, figures: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = replace(figures[1], cached_ratio=0.94, imbalance=1.1, window_imbalance=1.21)
    monkeypatch.setattr(benchmark, "measure", lambda *_: [replace(bad, policy="load"), bad])
    for flags, expected in (["--quick"], 0), (["--check", "--json", str(tmp_path / "figures")], 1):
        monkeypatch.setattr(sys, "argv", ["placement.py", *flags])
        assert benchmark.main() == expected
        lines = capsys.readouterr().out.splitlines()
        assert "MISSED" not in lines[1]
        assert lines[2].endswith("MISSED cached_ratio  MISSED window_imbalance")
    told = json.loads((tmp_path / "figures").read_text())["figures"]
    assert [figure["misses"] for figure in told] == [[], ["cached_ratio", "window_imbalance"]]
