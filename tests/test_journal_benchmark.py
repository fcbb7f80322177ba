"""The journal's benchmark on sizes that take no time, so that it cannot rot; its numbers prove nothing here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import load_benchmark

from blockplane.control_plane.engine.journal import Journal


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_benchmark("journal")


def test_what_is_measured_is_in_the_file_and_only_with_a_journal(benchmark: Any, tmp_path: Path) -> None:
    sizes = benchmark.Sizes(num_turns=2, num_steps=8)
    figure = asyncio.run(benchmark.measure(sizes, 3, tmp_path))
    assert (tmp_path / "journal-3").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["journal-3"], "closed and complete"
    assert min(figure.cpu_without, figure.cpu_with, figure.bytes_per_token) > 0
    assert figure.later_p50 <= figure.later_p99 <= figure.later_max
    journal = Journal(str(tmp_path / "journal-3"), 3600)
    lengths = {len(output) for request in journal.load() for output in request.output_token_ids}
    journal.start()
    journal.close()
    # A few more come while not all streams decode yet.
    assert min(lengths) >= 2 + 2 * 8
