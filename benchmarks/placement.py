"""Where requests that begin alike are placed: cached tokens, balance and waiting, beside other ways to place them.

    python benchmarks/placement.py [--quick] [--check] [--json FILE]

Real engine, placement and schedulers, in virtual time (benchmarks/placement_load.py): 16 system prompts of 1,024 tokens
are asked for at random, with 64 tokens of their own and 32 of output, at three quarters of what four groups can do.
`even`: each as often as the others; `skewed`: the n-th in proportion to 1/n. `ample`: every group could keep all of the
prompts; `scarce`: one group's blocks hold half of them beside what its rows need.

`single` is one group with the rows and the blocks of all four, so that nothing is computed twice; `prefix` is the
engine as it is; `load` and `turns` are the same engine that looks at the load alone, and at nothing. *Cached* is the
share of prompt tokens that were found cached, and what is told beside it its ratio to that of `single`. *Imbalance* is
what the busiest group computed, cached tokens left out, over the mean of all groups: of the whole run, and the worst of
windows of `WINDOW_SECONDS` while requests come, the first left out. Nothing here depends on the machine.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
from placement_load import MAX_NUM_SEQS, Outcome, Workload, serve

from blockplane.control_plane.engine import homes
from blockplane.control_plane.engine.choice import Candidate, in_order_of_choice

NUM_GROUPS, WINDOW_SECONDS = 4, 2.0
SPREADS = {"even": 0.0, "skewed": 1.0}
CACHES = {"ample": 4000, "scarce": 800}
"""Blocks of a group: 16 prompts have 1,024, and 64 rows at most 384 of their own."""
MIN_CACHED_RATIO, MAX_IMBALANCE = 0.95, 1.2

Choice = Callable[..., list[int]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One run; `misses` names what is not as it should be, which only `prefix` is asked."""

    spread: str
    cache: str
    policy: str
    cached: float
    cached_ratio: float
    imbalance: float
    window_imbalance: float
    first_token_median: float
    first_token_p99: float
    tokens_per_second: float

    @property
    def misses(self) -> list[str]:
        if self.policy != "prefix":
            return []
        bounds = {
            "cached_ratio": self.cached_ratio >= MIN_CACHED_RATIO,
            "imbalance": self.imbalance <= MAX_IMBALANCE,
            "window_imbalance": self.window_imbalance <= MAX_IMBALANCE,
        }
        return [name for name, is_met in bounds.items() if not is_met]


def by_load(candidates: Sequence[Candidate], num_tokens: int, max_imbalance_percent: int) -> list[int]:
    """As if no group shared anything."""
    blind = [candidate._replace(num_shared=0) for candidate in candidates]
    return in_order_of_choice(blind, num_tokens, max_imbalance_percent)


def by_turns() -> Choice:
    """One group after the other."""
    turns = count()

    def choose(candidates: Sequence[Candidate], *_: int) -> list[int]:
        first, number = next(turns), len(candidates)
        return [(first + index) % number for index in range(number)]

    return choose


@contextmanager
def placing(choice: Choice) -> Iterator[None]:
    with mock.patch.object(homes, "in_order_of_choice", choice):
        yield


def measure(num_requests: int, caches: Sequence[str] = tuple(CACHES)) -> list[Figure]:
    figures = []
    for spread, zipf in SPREADS.items():
        for cache in caches:
            workload, num_blocks = Workload(num_requests, zipf=zipf), CACHES[cache]
            single = serve(workload, 1, NUM_GROUPS * num_blocks, NUM_GROUPS * MAX_NUM_SEQS)
            figures.append(figure(spread, cache, "single", single, single))
            for policy, choice in {"prefix": in_order_of_choice, "load": by_load, "turns": by_turns()}.items():
                with placing(choice):
                    outcome = serve(workload, NUM_GROUPS, num_blocks)
                figures.append(figure(spread, cache, policy, outcome, single))
    return figures


def figure(spread: str, cache: str, policy: str, outcome: Outcome, single: Outcome) -> Figure:
    return Figure(
        spread,
        cache,
        policy,
        outcome.cached_rate,
        outcome.cached_rate / single.cached_rate,
        outcome.imbalance,
        max(outcome.window_imbalances(WINDOW_SECONDS)),
        float(np.median(outcome.first_tokens)),
        float(np.quantile(outcome.first_tokens, 0.99)),
        outcome.num_tokens / outcome.seconds,
    )


def print_table(figures: Sequence[Figure]) -> None:
    head = f"{'prompts':8} {'cache':7} {'placed by':9} {'cached':>7} {'ratio':>6} {'imbalance':>9} {'window':>7}"
    print(f"{head} {'first token, ms':>16} {'p99':>7} {'tokens/s':>9}")
    for each in figures:
        columns = f"{each.spread:8} {each.cache:7} {each.policy:9} {each.cached:7.3f} {each.cached_ratio:6.3f}"
        columns += f" {each.imbalance:9.3f} {each.window_imbalance:7.3f} {1e3 * each.first_token_median:16.0f}"
        columns += f" {1e3 * each.first_token_p99:7.0f} {each.tokens_per_second:9.0f}"
        print(columns + "".join(f"  MISSED {name}" for name in each.misses))
    print(f"`prefix` is to have a ratio of {MIN_CACHED_RATIO} and imbalances of {MAX_IMBALANCE} at most.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the scarce cache alone, and fewer requests: under 40 s")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    flags = parser.parse_args()
    figures = measure(1200, ("scarce",)) if flags.quick else measure(4000)
    print_table(figures)
    if flags.json:
        told = [asdict(each) | {"misses": each.misses} for each in figures]
        flags.json.write_text(json.dumps({"figures": told}, indent=1) + "\n")
    return int(flags.check and any(each.misses for each in figures))


if __name__ == "__main__":
    sys.exit(main())
