"""Families of metrics, read back by Prometheus's own reader of what it scrapes."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from blockplane.protos.histogram import Histogram
from blockplane.protos.metric_families import MetricFamilies


class Told(Collector):
    def __init__(self, families: MetricFamilies) -> None:
        self._families = families

    def collect(self) -> MetricFamilies:
        return self._families


def samples_of(families: MetricFamilies) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values, as a scrape has it."""
    registry = CollectorRegistry()
    registry.register(Told(families))
    read = text_string_to_metric_families(generate_latest(registry).decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in read for sample in family.samples}


def test_a_histogram_counts_below_each_bound_and_what_equals_a_bound_lies_below_it() -> None:
    histogram, families = Histogram((0.5, 2)), MetricFamilies()
    for value in (0.5, 0.6, 2.0, 3.0):
        histogram.observe(value)
    families.histogram("seconds", "Help.", histogram)
    assert samples_of(families) == {
        ("blockplane:seconds_bucket", "0.5"): 1,
        ("blockplane:seconds_bucket", "2.0"): 3,
        ("blockplane:seconds_bucket", "+Inf"): 4,
        ("blockplane:seconds_count",): 4,
        ("blockplane:seconds_sum",): 6.1,
    }


def test_a_counters_name_ends_in_total_and_samples_of_one_name_are_one_family() -> None:
    families = MetricFamilies()
    for number in ("0", "1"):
        families.counter("steps", "Help.", int(number) + 3, {"model_name": "m", "engine": number})
    families.gauge("running", "Help.", 2)
    families.info("build", "Help.", {"version": "9"})
    assert samples_of(families) == {
        ("blockplane:steps_total", "0", "m"): 3,
        ("blockplane:steps_total", "1", "m"): 4,
        ("blockplane:running",): 2,
        ("blockplane:build_info", "9"): 1,
    }
    assert len(list(families)) == 3
