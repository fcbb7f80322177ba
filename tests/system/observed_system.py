"""A system whose processes tell Prometheus of themselves, and what its board and its rules ask for; no test."""

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import System, free_port
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD, RULES = DEPLOY / "grafana" / "blockplane.json", DEPLOY / "prometheus" / "rules.yml"

_NAME = re.compile(r"\b(?:blockplane:|process_)\w+")


class ObservedSystem:
    """Attributes: ports: of the metrics, by kind of process."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.ports: dict[str, int] = {}

    def start(self, kind: str) -> None:
        """Another of its kind has the port of the one before."""
        port = self.ports.setdefault(kind, free_port())
        self.system.start(kind, "--metrics-address", f"127.0.0.1:{port}")

    def scrape(self, kind: str) -> dict[str, float]:
        """Every sample by its name and labels, as Prometheus writes them, without the model's name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[kind]}/metrics", timeout=30) as response:
            text = response.read().decode()
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
                shown = ",".join(f"{name}={labels[name]}" for name in sorted(labels))
                samples[f"{sample.name.removeprefix('blockplane:')}{{{shown}}}"] = sample.value
        return samples

    def scrape_all(self) -> dict[str, float]:
        """Of all kinds; what each of them has of its own process is that of any."""
        return {name: value for kind in self.ports for name, value in self.scrape(kind).items()}


@contextmanager
def observed_system(folder: Path, *flags: str) -> Iterator[ObservedSystem]:
    """Engine with a journal, frontend and one synthetic worker, serving."""
    system = System("--journal", f"{folder}/journal", *flags)
    try:
        observed = ObservedSystem(system)
        for kind in ("engine", "frontend", "worker"):
            observed.start(kind)
        system.wait_until_serving()
        yield observed
    finally:
        system.close()


def board_queries() -> dict[str, list[str]]:
    """By panel, its expressions."""
    panels = json.loads(BOARD.read_text())["panels"]
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels if panel["type"] != "row"
    }


def names_in(expressions: str) -> set[str]:
    """The metrics that PromQL names there."""
    return set(_NAME.findall(expressions))
