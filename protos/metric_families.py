"""Metrics as Prometheus reads them: a family for each name, under Blockplane's own prefix. Knows no process.

Names and labels are those of vLLM (docs/usage/metrics.md, version 0.32) wherever it has the same metric, so that its
dashboards need another prefix and nothing else. `prometheus_client` ends a counter's name in `_total`.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from blockplane.protos.histogram import Histogram

PREFIX = "blockplane:"

Labels: TypeAlias = Mapping[str, str]
NO_LABELS: Labels = MappingProxyType({})


class MetricFamilies:
    """Families as they grow, sample by sample. All samples of one name have the same labels."""

    def __init__(self) -> None:
        self._counters: dict[str, CounterMetricFamily] = {}
        self._gauges: dict[str, GaugeMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}
        self._infos: dict[str, InfoMetricFamily] = {}

    def __iter__(self) -> Iterator[Metric]:
        return chain(self._counters.values(), self._gauges.values(), self._histograms.values(), self._infos.values())

    def counter(self, name: str, help_text: str, value: float, labels: Labels = NO_LABELS) -> None:
        if (family := self._counters.get(name)) is None:
            family = self._counters[name] = CounterMetricFamily(PREFIX + name, help_text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)

    def gauge(self, name: str, help_text: str, value: float, labels: Labels = NO_LABELS) -> None:
        if (family := self._gauges.get(name)) is None:
            family = self._gauges[name] = GaugeMetricFamily(PREFIX + name, help_text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)

    def histogram(self, name: str, help_text: str, observed: Histogram, labels: Labels = NO_LABELS) -> None:
        if (family := self._histograms.get(name)) is None:
            family = self._histograms[name] = HistogramMetricFamily(PREFIX + name, help_text, labels=tuple(labels))
        # The sum is read last: it may hold an observation more than the counts, and never lacks one.
        bounds = (*(str(float(bound)) for bound in observed.bounds), "+Inf")
        counts = list(zip(bounds, accumulate(observed.counts), strict=True))
        family.add_metric(tuple(labels.values()), counts, observed.sum)

    def info(self, name: str, help_text: str, facts: Labels) -> None:
        """A sample of 1 with what is to be told in its labels; the name gets `_info`."""
        if (family := self._infos.get(name)) is None:
            family = self._infos[name] = InfoMetricFamily(PREFIX + name, help_text, labels=())
        family.add_metric((), dict(facts))
