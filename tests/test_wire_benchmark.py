"""The wire's benchmark on sizes that take no time, so that it cannot rot; its times prove nothing here."""

from typing import Any

import pytest
from benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_benchmark("wire")


@pytest.mark.parametrize(("block_size", "most"), [(16, 160), (128, 64)])
def test_a_plan_of_256_rows_is_tens_of_bytes(benchmark: Any, block_size: int, most: int) -> None:
    plan, result = benchmark.measure_bytes("full", block_size, 256, benchmark.Sizes(num_plans=64))
    assert plan.target == most
    assert 5 < plan.median <= most
    assert plan.median <= plan.other
    assert 4 * 256 < result.median < 4 * 256 + 64


def test_a_plan_s_new_blocks_name_a_block_in_each_group(benchmark: Any) -> None:
    sizes = benchmark.Sizes(num_plans=64)
    (one, _), (six, _) = (benchmark.measure_bytes(layout, 16, 64, sizes) for layout in ("full", "hybrid"))
    num_blocks = (one.median - 9) / 8
    assert six.median == pytest.approx(9 + num_blocks * (4 + 6 * 4), rel=0.1)


def test_a_round_trip_is_compared_with_the_pings_of_its_turn(benchmark: Any) -> None:
    turns = [{"steps": [9.0, 0.004, 0.004, 0.004], "pings": [9.0, 0.001, 0.001, 0.001]}] * 2
    turns += [{"steps": [0.003] * 4, "pings": [0.002] * 4}]
    figure = benchmark.round_trip("x", turns, {"own": [0.001], "own_in_pings": [0.0]})
    assert figure.compared == pytest.approx(3)
    assert figure.beside == pytest.approx(1000)
    assert figure.median == pytest.approx(3000)
    assert figure.is_missed


def test_round_trips_are_measured_over_a_socket(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    figures = benchmark.measure_round_trips("unix", benchmark.Sizes(num_rows=(1, 3), num_turns=2, num_steps=8))
    assert [figure.name for figure in figures] == [
        f"round trip: unix, {num_rows} rows, {when}" for num_rows in (1, 3) for when in ("at once", "after 1 ms")
    ]
    assert all(figure.median > 0 and figure.beside > 0 for figure in figures)
    assert "one plan in flight" not in capsys.readouterr().err, "decode-only steps run ahead"


@pytest.mark.slow
def test_a_worker_s_waits_are_measured_through_a_proxy(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "NUM_WAITING_ROWS", 4)
    figure = benchmark.measure_waits("1 ms each way", benchmark.Sizes(num_turns=2, num_steps=8))
    assert figure.median > 0
    assert figure.beside > 0
