"""Draws a Grafana board without Grafana: its panels in their places, their queries put to a Prometheus. Knows no run.

What is drawn is the board's own JSON, as far as it says: titles, places, queries, legends, units. How it looks is ours.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

_COLUMNS, _UNIT_INCHES, _WIDTH_INCHES = 24, 0.235, 13.0
"""Of a board's grid, and how large it is drawn."""
_VARIABLES = {"$__rate_interval": "10s", "$model_name": ".*", "$engine": ".*"}
_STEP_SECONDS = 1.0
_COLUMN_LETTERS = 18
"""Of a legend with two columns."""
_SIZES = ("B", "KiB", "MiB", "GiB")
_COLOURS = ("#3b6ea5", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#64b5cd")


class Span(NamedTuple):
    """Seconds since the epoch."""

    begin: float
    end: float


def save_board(board: Path, prometheus: str, span: Span, png: Path) -> None:
    """`prometheus`: its address, with http://."""
    panels = json.loads(board.read_text())["panels"]
    num_units = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(_WIDTH_INCHES, num_units * _UNIT_INCHES))
    for panel in panels:
        at = panel["gridPos"]
        left, top = at["x"] / _COLUMNS, 1 - at["y"] / num_units
        width, height = at["w"] / _COLUMNS, at["h"] / num_units
        if panel["type"] == "row":
            figure.text(0.006, top - height / 2, panel["title"], fontsize=11, fontweight="bold", va="center")
            continue
        # Around them: titles above, numbers to the left and below.
        axes = figure.add_axes((left + 0.042, top - 0.87 * height, width - 0.05, 0.72 * height))
        _draw(axes, panel, prometheus, span)
    figure.savefig(png, dpi=100)


def _draw(axes: Axes, panel: Mapping[str, Any], prometheus: str, span: Span) -> None:
    axes.set_title(panel["title"], fontsize=9.5, loc="left", pad=3)
    colours = cycle(_COLOURS)
    for target in panel["targets"]:
        for labels, times, values in ask(prometheus, _filled(target["expr"]), span):
            legend = re.sub(r"{{(\w+)}}", lambda found, told=labels: told.get(found[1], ""), target["legendFormat"])
            axes.plot(times - span.begin, values, label=legend.strip(), linewidth=1.1, color=next(colours))
    axes.set_xlim(0, span.end - span.begin)
    _dress(axes, panel["fieldConfig"]["defaults"]["unit"])
    _tell(axes)


def _tell(axes: Axes) -> None:
    """The legend, and room for it above the lines."""
    if not axes.lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=8, color="grey")
        axes.set_yticks([])
        return
    num_columns = 1 if max(len(str(line.get_label())) for line in axes.lines) > _COLUMN_LETTERS else 2
    num_rows = -(-len(axes.lines) // num_columns)
    highest = max(float(np.nanmax(line.get_ydata())) for line in axes.lines)
    axes.set_ylim(0, (highest or 1.0) * (1.15 + 0.17 * num_rows))
    axes.legend(
        fontsize=8, frameon=False, ncols=num_columns, loc="upper left", handlelength=1, columnspacing=1, borderpad=0
    )


def _dress(axes: Axes, unit: str) -> None:
    axes.tick_params(labelsize=8, length=2, pad=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=unit in ("none", "short")))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_unit(value, unit)))
    axes.xaxis.set_major_formatter("{x:.0f} s")


def in_unit(value: float, unit: str) -> str:
    """A value as Grafana would write it, nearly."""
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "s":
            return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
        case "bytes":
            power = min(int(np.log2(max(value, 1)) // 10), len(_SIZES) - 1)
            return f"{value / 1024**power:.3g} {_SIZES[power]}"
        case "cps":
            return f"{value:.3g}/s"
    return f"{value:.4g}"


def _filled(query: str) -> str:
    """The query with the board's variables as they stand when nothing is chosen."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


def ask(prometheus: str, query: str, span: Span) -> Sequence[tuple[Mapping[str, str], Any, Any]]:
    """Each series that answers: its labels, its times and values as arrays."""
    asked = urlencode({"query": query, "start": span.begin, "end": span.end, "step": _STEP_SECONDS})
    with urlopen(f"{prometheus}/api/v1/query_range?{asked}") as answer:
        series = json.load(answer)["data"]["result"]
    told = [(each["metric"], *np.array(each["values"], float).T) for each in series]
    # A quotient of two rates is none where nothing happened.
    return [each for each in told if np.isfinite(each[2]).any()]
