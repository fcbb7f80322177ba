"""The worker step's benchmark on sizes that take no time, so that it cannot rot; its numbers prove nothing here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_benchmark("worker_step")


def test_every_load_is_measured_in_parts(benchmark: Any) -> None:
    figures = benchmark.measure(benchmark.Sizes((1, 64), (1, 2), num_turns=2, num_steps=8))
    assert [(figure.num_rows, figure.num_groups) for figure in figures] == [(1, 1), (64, 1), (1, 2), (64, 2)]
    assert all(0 < figure.best <= figure.median for figure in figures)
    assert all(figure.parts.keys() == set(benchmark.PARTS) for figure in figures)
    assert [figure.budget for figure in figures] == [None, 150, None, 150]


def test_a_measured_step_decodes_every_row_and_one_row_in_a_block_gets_a_block(benchmark: Any) -> None:
    load = benchmark.DecodingRows(3, 2)
    tokens, blocks = load.rows.num_tokens.copy(), load.rows.block_table.num_blocks.copy()
    load.turn(4 * benchmark.BLOCK_SIZE)
    assert (load.rows.num_tokens[:3] - tokens[:3] == 4 * benchmark.BLOCK_SIZE).all()
    assert (load.rows.block_table.num_blocks[:3] - blocks[:3] == 4).all()


def test_a_miss_is_shown_and_only_fails_a_check(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = dict.fromkeys(benchmark.PARTS, 50.0)
    slow = benchmark.Figure(64, 1, 240.0, 200.0, parts, budget=100.0)
    monkeypatch.setattr(benchmark, "measure", lambda sizes: [slow, benchmark.Figure(64, 6, 240.0, 100.0, parts, 100.0)])
    monkeypatch.setattr(benchmark, "measure_sampling", lambda num_turns: [])
    monkeypatch.setattr(benchmark, "recorded", list)
    monkeypatch.setattr(benchmark, "measure_padding", lambda requests: [])
    for flags, expected in (["--quick"], 0), (["--check", "--json", str(tmp_path / "figures")], 1):
        monkeypatch.setattr(sys, "argv", ["worker_step.py", *flags])
        assert benchmark.main() == expected
        _, missed, met, *_ = capsys.readouterr().out.splitlines()
        assert missed.endswith("2.000  MISSED")
        assert met.endswith("1.000")
    figures = json.loads((tmp_path / "figures").read_text())["figures"]
    assert [(figure["ratio"], figure["is_missed"]) for figure in figures] == [(2.0, True), (1.0, False)]


def test_each_way_to_sample_is_set_beside_an_arg_max_and_a_pass(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = benchmark.measure_sampling(2, num_rows=2, vocab_size=512)
    assert [figure.budget for figure in figures if figure.way == "top-k 64, top-p 0.95"] == [1.5]
    assert all(figure.milliseconds > 0 and figure.ratio > 0 for figure in figures)
    benchmark.print_beside([benchmark.SamplingFigure("slow", 4.0, 2.0, 1.5)], [])
    assert "slow                                4.0    2.00    1.50  MISSED" in capsys.readouterr().out


def test_padding_is_what_buckets_add_to_recorded_requests(benchmark: Any) -> None:
    requests = benchmark.recorded(("W3",))
    assert [(request.num_prompt_tokens, request.params.max_tokens) for request in requests] == [(512, 128)]
    prefill, decode = benchmark.measure_padding(requests)
    assert (prefill.num_steps, prefill.num_actual, prefill.num_computed, prefill.waste) == (1, 512, 512, 0.0)
    assert (decode.num_steps, decode.num_actual, decode.num_computed, decode.waste) == (127, 127, 127, 0.0)
    three = benchmark.PaddingFigure("decode", 1, 3, 4)
    assert three.waste == 0.25
