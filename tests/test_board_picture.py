"""The picture of the Grafana board: its queries as a Prometheus is asked them, and values in their units; no run."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BOARD = ROOT / "deploy" / "grafana" / "blockplane.json"
SPAN_SECONDS = 3


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import board

    yield board
    del sys.modules["board"]


def test_each_query_is_asked_once_with_nothing_of_grafana_s_left_in_it(board: Any, monkeypatch, tmp_path: Path):
    asked = []

    def answer(prometheus: str, query: str, span: Any) -> list[Any]:
        asked.append(query)
        return []

    monkeypatch.setattr(board, "ask", answer)
    board.save_board(BOARD, "http://nowhere", board.Span(0.0, SPAN_SECONDS), tmp_path / "board.png")
    queries = [
        target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel.get("targets", [])
    ]
    assert len(asked) == len(queries) > 40
    assert not any("$" in query for query in asked)
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "percentunit", "25 %"),
        (0.0, "s", "0 s"),
        (0.0625, "s", "62.5 ms"),
        (1.5, "s", "1.5 s"),
        (0.0, "bytes", "0 B"),
        (1536.0, "bytes", "1.5 KiB"),
        (2.0**41, "bytes", "2.05e+03 GiB"),
        (12.0, "cps", "12/s"),
        (1800.0, "short", "1800"),
    ],
)
def test_values_are_written_in_their_unit(board: Any, value: float, unit: str, text: str):
    assert board.in_unit(value, unit) == text
