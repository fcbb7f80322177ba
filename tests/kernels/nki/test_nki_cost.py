"""The predicted cost of the kernels: its limits, and that it follows what is asked for."""

from typing import Any

import pytest
from benchmark_modules import load_benchmark

pytest.importorskip("nki_machine", reason="traces are the emulator's, and here is AWS's nki")


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_benchmark("nki_cost")


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["TRN2", "TRN3"])
def test_no_limit_is_missed(benchmark: Any, generation: str) -> None:
    limited = [case for case in benchmark.CASES if case.limits]
    figures = [benchmark.figure(case, getattr(benchmark, generation)) for case in limited]
    assert len(figures) == 3
    assert [f"{each.case}: {each.bound:.1f}" for each in figures if each.is_missed] == []


def test_padding_rows_move_no_kv(benchmark: Any) -> None:
    padded, alone = (
        benchmark.figure(benchmark.decode_case("", lengths, 512), benchmark.TRN2) for lengths in ([512, 0, 0, 0], [512])
    )
    # Three rows more of queries, outputs, lengths and block ids, each copied to where it is compared.
    assert padded.dma_bytes - alone.dma_bytes < 3 * 2 * 512 * benchmark.HEAD_DIM * benchmark.ITEMSIZE / 8


def test_dma_follows_the_lengths_within_one_table(benchmark: Any) -> None:
    short, long = (
        benchmark.figure(benchmark.decode_case("", [length] * 2, 2048), benchmark.TRN2) for length in (256, 2048)
    )
    assert 6 < long.dma_bytes / short.dma_bytes < 8.5


def test_compute_follows_the_bucket(benchmark: Any) -> None:
    narrow, wide = (
        benchmark.figure(benchmark.decode_case("", [500], table_len), benchmark.TRN2) for table_len in (512, 4096)
    )
    assert wide.busy["TensorE"] > 3 * narrow.busy["TensorE"]


def test_two_cores_halve_the_work(benchmark: Any) -> None:
    one, two = (
        benchmark.figure(benchmark.decode_case("", [1024] * 4, 1024, lnc=lnc), benchmark.TRN2) for lnc in (1, 2)
    )
    assert two.busy["TensorE"] == pytest.approx(one.busy["TensorE"] / 2, rel=0.2)
    assert two.dma_bytes == pytest.approx(one.dma_bytes, rel=0.05)


def test_a_missed_limit_is_told(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    limits = benchmark.Limits({"Trn2": 0.5}, moved=2.0)
    missed = benchmark.figure(benchmark.write_case("write", 4, limits=limits), benchmark.TRN2)
    assert missed.is_missed
    assert 1 <= missed.moved < 1.2
    benchmark.print_table([missed])
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "predicted" in printed
