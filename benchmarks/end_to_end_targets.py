"""What is enough: each goal as a ratio to a peer's figure of the same repetition, and whether it is met; pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from end_to_end_figures import Figures, Start

from blockplane.client.alignment import aligned

BLOCKPLANE, QUANTIZED, VLLM, LLAMA = "blockplane", "blockplane-quantized", "vllm", "llama"
CALLED = {BLOCKPLANE: "Blockplane", QUANTIZED: "quantized", VLLM: "vLLM", LLAMA: "llama.cpp"}
STARTED = ""
"""In place of a workload: what is of a start, not of a run."""
MEASURES = {
    "output_tokens_per_second": ("output tokens/s", 1.0),
    "first_p50": ("first token, p50 s", 1.0),
    "between_p50": ("between tokens, p50 ms", 1e3),
    "decoding_p99": ("decoding beside the 8k prompt, p99 ms", 1e3),
    "long_first": ("the 8k prompt's first token, s", 1.0),
    "outside_share": ("CPU outside the forward, %", 1e2),
    "peak_bytes": ("peak memory, GB", 1e-9),
    "seconds_to_ready": ("start to ready, s", 1.0),
}
"""What a figure is called, and the factor to its unit."""


@dataclass(frozen=True, slots=True)
class Target:
    """A goal.

    Attributes:
        workload, measure: an attribute of that workload's `Figures`; of `Start` where the workload is STARTED.
        peer: whose figure ours is divided by; None = ours counts as it is.
        is_least: whether the bound is the least that is enough, not the most.
    """

    workload: str
    measure: str
    system: str
    peer: str | None
    bound: float
    is_least: bool = False


TARGETS = (
    Target("W1", "output_tokens_per_second", BLOCKPLANE, VLLM, 1.2, is_least=True),
    Target("W1S", "output_tokens_per_second", BLOCKPLANE, VLLM, 1.2, is_least=True),
    Target("W2", "first_p50", BLOCKPLANE, VLLM, 0.8),
    Target("W3", "between_p50", BLOCKPLANE, VLLM, 0.65),
    Target("W3", "between_p50", QUANTIZED, LLAMA, 1.0),
    Target("W4", "decoding_p99", BLOCKPLANE, VLLM, 0.5),
    Target("W4", "long_first", BLOCKPLANE, VLLM, 1.2),
    Target("W16", "outside_share", BLOCKPLANE, None, 0.08),
    Target(STARTED, "peak_bytes", BLOCKPLANE, VLLM, 1.0),
    Target(STARTED, "seconds_to_ready", BLOCKPLANE, VLLM, 0.25),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and the median over repetitions of what counts against it, with the figures that it is made of."""

    target: Target
    value: float
    own: float
    peers: float | None

    @property
    def is_met(self) -> bool:
        bound = self.target.bound
        return self.value >= bound if self.target.is_least else self.value <= bound

    @property
    def miss(self) -> float:
        """By what share of the bound it is missed; 0 = it is met."""
        return 0.0 if self.is_met else abs(self.value / self.target.bound - 1)


def verdicts(figures: Sequence[Figures], starts: Sequence[Start]) -> list[Verdict]:
    """One for each target whose systems were measured, in the targets' order."""
    measured = _measured(figures, starts)
    return list(_verdicts(measured))


def _measured(figures: Sequence[Figures], starts: Sequence[Start]) -> dict[tuple[str, str], dict[int, Figures | Start]]:
    """By workload and system, then by repetition."""
    measured: dict[tuple[str, str], dict[int, Figures | Start]] = {}
    for each in (*figures, *starts):
        workload = each.workload if isinstance(each, Figures) else STARTED
        measured.setdefault((workload, each.system), {})[each.repetition] = each
    return measured


def _verdicts(measured: Mapping[tuple[str, str], Mapping[int, Figures | Start]]) -> Iterator[Verdict]:
    for target in TARGETS:
        own = measured.get((target.workload, target.system), {})
        others = own if target.peer is None else measured.get((target.workload, target.peer), {})
        pairs = [
            (getattr(own[repetition], target.measure), getattr(others[repetition], target.measure))
            for repetition in own.keys() & others.keys()
        ]
        pairs = [pair for pair in pairs if None not in pair]
        if not pairs:
            continue
        own_median, peers_median = (statistics.median(column) for column in zip(*pairs, strict=True))
        if target.peer is None:
            yield Verdict(target, own_median, own_median, None)
        else:
            yield Verdict(target, statistics.median(mine / its for mine, its in pairs), own_median, peers_median)


def verdict_table(judged: Sequence[Verdict]) -> list[str]:
    """A line for each, under a head; empty if there is none."""
    rows = [["target", "ours", "its", "of", "ratio", "bound", ""], *map(_row, judged)]
    return aligned(rows) if judged else []


def _row(verdict: Verdict) -> list[str]:
    target = verdict.target
    name, factor = MEASURES[target.measure]
    return [
        f"{target.workload} {name}".lstrip() + (", quantized" if target.system == QUANTIZED else ""),
        f"{factor * verdict.own:.4g}",
        "" if verdict.peers is None else f"{factor * verdict.peers:.4g}",
        "" if target.peer is None else CALLED[target.peer],
        f"{verdict.value:.3f}",
        f"{'>=' if target.is_least else '<='} {target.bound:g}",
        "met" if verdict.is_met else f"MISSED by {verdict.miss:.0%}",
    ]


def as_json(verdict: Verdict) -> dict[str, object]:
    told = {"value": verdict.value, "own": verdict.own, "peers": verdict.peers}
    return {**asdict(verdict.target), **told, "is_met": verdict.is_met, "miss": verdict.miss}
