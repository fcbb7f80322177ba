"""The picture of a run: how long tokens took, and how fast they came. Needs matplotlib; knows no server."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from blockplane.client.load import Outcome
from blockplane.client.measures import (
    PERCENTILES,
    first_token_seconds,
    inter_token_seconds,
    tokens_per_second,
)
from blockplane.protos.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR, _MARK = "#3b6ea5", "#c44e52"
_NUM_BINS = 40
_LEAST_MILLISECONDS = 0.01
"""Where the axis begins at the least: it is logarithmic, since few waits are much longer than the others."""


def require_matplotlib() -> None:
    """Raises ConfigurationError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "--png needs matplotlib, which is not installed; pip install 'blockplane[bench]'."
        ) from None


def save_plot(path: str, title: str, outcomes: Sequence[Outcome]) -> None:
    """Write a PNG file.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    figure = plot(title, outcomes)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigurationError(f"--png names {path}, which cannot be written: {error.strerror}.") from None


def plot(title: str, outcomes: Sequence[Outcome]) -> "Figure":
    from matplotlib.figure import Figure

    good = [outcome for outcome in outcomes if outcome.failure is None]
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    first, between, throughput = figure.subplots(1, 3)
    _histogram(first, "time to first token", first_token_seconds(good), "requests")
    _histogram(between, "between tokens", inter_token_seconds(good), "tokens")
    _throughput(throughput, outcomes)
    return figure


def _histogram(axes: "Axes", title: str, seconds: Sequence[float], counted: str) -> None:
    _dress(axes, title, "ms", counted)
    if not seconds:
        return
    milliseconds = np.maximum(1000 * np.array(seconds), _LEAST_MILLISECONDS)
    axes.set_xscale("log")
    bins = np.geomspace(0.9 * milliseconds.min(), 1.1 * milliseconds.max(), _NUM_BINS + 1)
    axes.hist(milliseconds, bins=bins.tolist(), color=_COLOUR)
    axes.xaxis.set_major_formatter("{x:g}")
    told = []
    for percent, value in zip(PERCENTILES, np.percentile(milliseconds, PERCENTILES), strict=True):
        axes.axvline(value, color=_MARK, linewidth=1)
        told.append(f"p{percent} {value:,.0f}" if value >= 100 else f"p{percent} {value:.3g}")
    axes.set_xlabel(f"ms: {', '.join(told)}")


def _throughput(axes: "Axes", outcomes: Sequence[Outcome]) -> None:
    _dress(axes, "throughput", "seconds", "output tokens/s")
    seconds = max((outcome.ended for outcome in outcomes), default=0.0)
    # Bins of a second or so; more of them where the run was short.
    bin_seconds = max(seconds / 60, min(1.0, seconds / 20))
    if not any(outcome.arrivals for outcome in outcomes):
        return
    starts, rates = tokens_per_second(outcomes, bin_seconds)
    axes.stairs(rates, [*starts, starts[-1] + bin_seconds], fill=True, color=_COLOUR)


def _dress(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
