"""The control plane's benchmark on sizes that take no time, so that it cannot rot; its numbers prove nothing here."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_benchmark("control_plane")


@pytest.fixture(scope="module")
def tiny(benchmark: Any) -> Any:
    return benchmark.Sizes((1, 3), (1_000, 1_100), num_rounds=1, num_steps=20, num_prompts=2, num_growth_rows=2)


class FakePeer:
    """Answers as vllm_scheduler.py does, and takes a second for everything."""

    def __init__(self) -> None:
        self.loads: list[dict[str, Any]] = []

    def send(self, request: dict[str, Any]) -> None:
        self.loads.append(request["load"])

    def receive(self) -> dict[str, Any]:
        return {"version": "0"}

    def ask(self, request: dict[str, Any]) -> Any:
        if "decode" in request:
            return [1e6] * request["decode"]
        return dict.fromkeys(("hashing", "lookup", "cold", "cached"), 1e6)


def test_every_figure_is_measured_and_compared(benchmark: Any, tiny: Any) -> None:
    peer = FakePeer()
    figures = benchmark.measure(tiny, peer)
    assert [figure.name for figure in figures[:4]] == [
        "step of 2 rows, 1,000 free blocks",
        "step of 2 rows, 1,100 free blocks",
        "step of 1 rows",
        "step of 3 rows",
    ]
    assert len(figures) == 2 + 2 * (2 + 4)
    assert all(0 < figure.median <= figure.p99 for figure in figures)
    compared = figures[2:]
    assert all(figure.reference == 1e6 and figure.ratio < 1 and not figure.is_missed for figure in compared)
    assert [load["max_num_seqs"] for load in peer.loads] == [2, 4, 1] * 2
    json.dumps(peer.loads)


def test_without_vllm_only_growth_is_compared(benchmark: Any, tiny: Any) -> None:
    figures = benchmark.measure(replace(tiny, num_rows=(1,)), None)
    assert [figure.name for figure in figures if figure.ratio is not None] == ["step of 2 rows, 1,100 free blocks"]


def test_a_miss_is_shown_and_only_fails_a_check(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slow = benchmark.Figure("step of 1 rows", "full", 30.0, 40.0, reference=50.0, ratio=0.6, target=0.5)
    monkeypatch.setattr(benchmark, "measure", lambda sizes, peer: [slow, replace(slow, median=25.0, ratio=0.5)])
    for flags, expected in (["--quick"], 0), (["--check", "--json", str(tmp_path / "figures")], 1):
        monkeypatch.setattr(sys, "argv", ["control_plane.py", *flags])
        assert benchmark.main() == expected
        _, missed, met = capsys.readouterr().out.splitlines()
        assert missed.endswith("0.600   0.500  MISSED")
        assert met.endswith("0.500   0.500")
    figures = json.loads((tmp_path / "figures").read_text())["figures"]
    assert [(figure["ratio"], figure["is_missed"]) for figure in figures] == [(0.6, True), (0.5, False)]


def test_a_measured_step_reuses_cached_blocks_and_ends_no_row(benchmark: Any) -> None:
    own = benchmark.ControlPlane(benchmark.decode_load("hybrid", 4, num_steps=64))
    blocks, pool = own.scheduler.blocks, own.scheduler.blocks.pool
    was_cached = np.array([place is not None for place in blocks.cache._key_of_block])
    num_before, taken = blocks.num_blocks.sum(), []
    forget, pool._on_reuse = pool._on_reuse, lambda block_ids: (taken.append(block_ids), forget(block_ids))
    own.decode(64)
    assert blocks.num_blocks.sum() - num_before == 4 * 64 // 16
    assert len(np.concatenate(taken)) == 6 * 4 * 64 // 16
    # Where one block of a window was reused before, the others of its entry are found no more.
    assert was_cached[np.concatenate(taken)].mean() > 0.9
    assert own.scheduler.rows.num_running == 4
    assert len(own.scheduler._in_flight) == 2
