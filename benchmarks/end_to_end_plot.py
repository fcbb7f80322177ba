"""The picture of a comparison: a panel for each target, a bar for each system, a line where enough begins.

Needs matplotlib; measures nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from end_to_end_targets import CALLED, MEASURES, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _PEERS, _MARK = "#3b6ea5", "#b8b8b8", "#c44e52"
_NUM_COLUMNS = 5


def save_plot(path: Path, judged: Sequence[Verdict]) -> None:
    """Write a PNG file; a panel for each verdict, of which there must be one."""
    plot(judged).savefig(path, format="png", dpi=150)


def plot(judged: Sequence[Verdict]) -> "Figure":
    from matplotlib.figure import Figure

    num_rows = -(-len(judged) // _NUM_COLUMNS)
    figure = Figure(figsize=(13, 2.9 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flat
    for axes, verdict in zip(panels, judged, strict=False):
        _draw(axes, verdict)
    for axes in list(figure.axes)[len(judged) :]:
        axes.set_visible(False)
    return figure


def _draw(axes: "Axes", verdict: Verdict) -> None:
    target = verdict.target
    label, factor = MEASURES[target.measure]
    heights, enough = {CALLED[target.system]: factor * verdict.own}, factor * target.bound
    told = f"{'≥' if target.is_least else '≤'} {enough:g}"
    if target.peer is not None and verdict.peers is not None:
        heights[CALLED[target.peer]] = factor * verdict.peers
        enough = factor * verdict.peers * target.bound
        told = f"{verdict.value:.2f} of {CALLED[target.peer]}'s ({'≥' if target.is_least else '≤'} {target.bound:g})"
    bars = axes.bar(list(heights), list(heights.values()), color=[_OURS, _PEERS][: len(heights)], width=0.6)
    axes.bar_label(bars, [f"{height:,.0f}" if height >= 100 else f"{height:.3g}" for height in heights.values()])
    axes.axhline(enough, color=_MARK, linewidth=1, linestyle="--")
    axes.set_title(f"{target.workload} {label}\n{told}".lstrip(), fontsize=9)
    axes.set_xlim(-0.6, 1.6)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
