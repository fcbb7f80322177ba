"""Whether the benchmarks' ratios are within the bounds of bounds.json: what keeps performance from rotting unseen.

    python benchmarks/check.py [--json FILE] [SCRIPT ...]

Runs the quick form of each script that the bounds name, or of those that are given, one after another. A bound is for a
ratio of two figures of one run, never for a time, so that it holds on any machine; there is room in it for a busy one.
A script that misses one is run once more, and the better value counts, since what else runs can only make it worse.
Exits with 1 where a bound is missed. The whole takes about three minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockplane.client.alignment import aligned

FOLDER = Path(__file__).parent
NUM_RUNS = 2
TIMEOUT_SECONDS = 240.0

Place = Sequence[str | Mapping[str, Any]]
"""Where in a script's JSON a number stands: keys, and of lists the fields of the one element that is meant."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A ratio and how far it may go; one of `at_least` and `at_most` is given.

    Attributes:
        script: of benchmarks/. says: what the ratio is, in words.
        value: where the ratio stands; or, with `over`, the number that is divided by the one that stands there.
    """

    script: str
    says: str
    value: Place
    over: Place | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"{self.says!r} needs one of at_least and at_most.")

    def ratio(self, document: Any) -> float:
        """The ratio as a script's JSON has it."""
        value = number_at(document, self.value)
        return value if self.over is None else value / number_at(document, self.over)

    def is_met(self, ratio: float) -> bool:
        # A NaN meets nothing.
        return ratio >= self.at_least if self.at_least is not None else ratio <= (self.at_most or 0.0)

    def better(self, one: float, other: float) -> float:
        return max(one, other) if self.at_least is not None else min(one, other)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bound and the ratio that counts against it."""

    bound: Bound
    ratio: float

    @property
    def is_met(self) -> bool:
        return self.bound.is_met(self.ratio)


def number_at(document: Any, place: Place) -> float:
    """The number at a place of parsed JSON.

    Raises:
        LookupError: there is not one such element, or no number: the script or the bounds have changed.
    """
    for step in place:
        if isinstance(step, str):
            document = document[step]
            continue
        found = [element for element in document if step.items() <= element.items()]
        if len(found) != 1:
            raise LookupError(f"{len(found)} elements have {dict(step)}; {list(place)} is to name one.")
        document = found[0]
    if isinstance(document, bool) or not isinstance(document, (int, float)):
        raise LookupError(f"{document!r} at {list(place)} is no number.")
    return float(document)


def read_bounds(file: Path = FOLDER / "bounds.json") -> list[Bound]:
    return [Bound(**fields) for fields in json.loads(file.read_text())]


def verdicts_of(bounds: Sequence[Bound], documents: Sequence[Any]) -> list[Verdict]:
    """Each bound's verdict over the runs of its script: the best ratio counts."""
    verdicts = []
    for bound in bounds:
        best, *more = (bound.ratio(document) for document in documents)
        for ratio in more:
            best = bound.better(best, ratio)
        verdicts.append(Verdict(bound, best))
    return verdicts


def judge(bounds: Sequence[Bound]) -> Iterator[Verdict]:
    """Run what the bounds are for, script after script."""
    for script in dict.fromkeys(bound.script for bound in bounds):
        own = [bound for bound in bounds if bound.script == script]
        documents: list[Any] = []
        while len(documents) < NUM_RUNS:
            print(f"{script} ...", file=sys.stderr, flush=True)
            documents.append(measured(script))
            verdicts = verdicts_of(own, documents)
            if all(verdict.is_met for verdict in verdicts):
                break
        yield from verdicts


def measured(script: str) -> Any:
    """What a script's quick form tells."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(FOLDER / f"{script}.py"), "--quick", "--json", str(file)]
        ran = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_SECONDS
        )
        if ran.returncode:
            raise SystemExit(f"{ran.stdout}\n{script} ended with {ran.returncode}.")
        return json.loads(file.read_text())


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for each bound, under a head."""
    rows = [["ratio", "script", "value", "bound", ""]]
    for verdict in verdicts:
        bound = verdict.bound
        limit = f"at least {bound.at_least:g}" if bound.at_least is not None else f"at most {bound.at_most:g}"
        rows.append([bound.says, bound.script, f"{verdict.ratio:.3f}", limit, "" if verdict.is_met else "MISSED"])
    return aligned(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bounds = read_bounds()
    names = sorted({bound.script for bound in bounds})
    parser.add_argument("scripts", metavar="SCRIPT", nargs="*", help=f"of {', '.join(names)}; none = all")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the ratios here too")
    flags = parser.parse_args()
    if unknown := set(flags.scripts) - set(names):
        parser.error(f"no bound is for {', '.join(sorted(unknown))}.")
    verdicts = list(judge([bound for bound in bounds if bound.script in (flags.scripts or names)]))
    print("\n".join(table(verdicts)))
    if flags.json:
        told = [asdict(verdict.bound) | {"ratio": verdict.ratio, "is_met": verdict.is_met} for verdict in verdicts]
        flags.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(not all(verdict.is_met for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
