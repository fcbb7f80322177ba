"""A decode step's parts and their floors, from what was measured of them; pure, and the table of them in Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from budget_clocks import Clocks, Least, Machine, Weights

from blockplane.client.engine_values import GroupSteps

FLOORS: Mapping[str, str] = {
    "schedule": "a sum over the rows",
    "encode": "an empty message, written",
    "wire": "a bare gRPC stream's ping of as many bytes",
    "apply": "a copy of the rows",
    "inputs": "a gathering of as many numbers for each array",
    "forward": "weights and KV read once, or the operations",
    "sample": "the logits read once",
    "result": "an empty message, written",
    "deliver": "two copies of the tokens, an empty message written",
    "detokenize": "a table's entry for each token",
    "client write": "a gRPC server that does nothing else",
}
"""By part, in the order of a step, what its floor is."""
ON_WORKERS_PATH = "apply", "inputs", "forward", "sample", "result"


@dataclass(frozen=True, slots=True)
class Walls:
    """Wall microseconds between the step log's stations, medians of those steps that decode so many rows and no more.

    `step`: from one answer to the next. `wire`: both ways.
    """

    num_steps: int
    step: float
    schedule: float
    wire: float
    inputs: float
    forward: float
    sample: float
    result: float
    settle: float


@dataclass(frozen=True, slots=True)
class Used:
    """CPU microseconds a step, by process; the share of it that is not the forward; cores that others kept busy."""

    engine: float
    frontend: float
    worker: float
    outside_share: float
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class Bare:
    """The floors that other processes gave: microseconds of a ping, and of the messages of one step."""

    ping: float
    writes: float


def walls_of(steps: GroupSteps, num_rows: int, since: int) -> Walls:
    """`since`: nanoseconds since the epoch of Unix. Raises ValueError if no two steps in a row are of that kind."""
    is_meant = (steps.began >= since) & (steps.num_decode_tokens == num_rows) & (steps.num_prefill_tokens == 0)
    follows = is_meant[1:] & is_meant[:-1]
    if not follows.any():
        raise ValueError(f"no step decoded {num_rows} rows and nothing else; measure for longer.")

    def median(begin: str, end: str) -> float:
        return float(np.median((getattr(steps, end) - getattr(steps, begin))[is_meant])) / 1000

    return Walls(
        num_steps=int(is_meant.sum()),
        step=float(np.median(np.diff(steps.answered)[follows])) / 1000,
        schedule=median("scheduled", "planned"),
        wire=median("planned", "received") + median("sent", "answered"),
        inputs=median("began", "prepared"),
        forward=median("prepared", "computed"),
        sample=median("computed", "sampled"),
        result=median("sampled", "sent"),
        settle=median("answered", "settled"),
    )


def parts_of(walls: Walls, used: Used, clocks: Clocks) -> dict[str, float]:
    """Microseconds of each part, in the order of FLOORS."""
    parts = {
        "schedule": walls.schedule - clocks.encode,
        "encode": clocks.encode,
        "wire": walls.wire,
        "apply": clocks.apply,
        "inputs": walls.inputs - clocks.apply,
        "forward": walls.forward,
        "sample": walls.sample,
        "result": walls.result,
        "deliver": walls.settle + clocks.write_delivery + clocks.read_delivery,
        "detokenize": clocks.detokenize,
        "client write": used.frontend - clocks.read_delivery - clocks.detokenize,
    }
    # A clock of this process and a median of another may cross.
    return {name: max(part, 0.0) for name, part in parts.items()}


def floors_of(
    num_rows: int, context: int, least: Least, bare: Bare, weights: Weights, machine: Machine
) -> dict[str, float]:
    """Microseconds of each part's floor, in the order of FLOORS. `context`: tokens of a row."""
    return {
        "schedule": least.one_sum,
        "encode": least.empty_message,
        "wire": bare.ping,
        "apply": least.one_copy,
        "inputs": least.gathered_inputs,
        "forward": weights.forward_microseconds(num_rows, context, machine),
        "sample": weights.sampling_microseconds(num_rows, machine),
        "result": least.empty_message,
        "deliver": 2 * least.one_copy + least.empty_message,
        "detokenize": least.looked_up_texts,
        "client write": bare.writes,
    }


@dataclass(frozen=True, slots=True)
class Budget:
    """One number of streams: its parts and floors by name, microseconds."""

    num_streams: int
    context: int
    walls: Walls
    used: Used
    parts: Mapping[str, float]
    floors: Mapping[str, float]

    @property
    def waiting(self) -> float:
        """Of a step, what is none of the parts on the worker's path: it waits for a plan, or for a core."""
        return max(self.walls.step - sum(self.parts[name] for name in ON_WORKERS_PATH), 0.0)


def table(budgets: Sequence[Budget]) -> list[str]:
    """Markdown: a row for each part, with its floor behind it for each number of streams; then what they come to."""
    counts = [f"{each.num_streams} stream{'s' if each.num_streams > 1 else ''}" for each in budgets]
    head = ["microseconds a step", *(cell for count in counts for cell in (count, "floor")), "the floor is"]
    lines = [head, ["---", *["--:"] * 2 * len(budgets), "---"]]
    for name, floor_is in FLOORS.items():
        cells = [shown(of[name]) for each in budgets for of in (each.parts, each.floors)]
        lines.append([name, *cells, floor_is])
    sums = {
        "the worker waits": [shown(each.waiting) for each in budgets],
        "**a step**": [f"**{shown(each.walls.step)}**" for each in budgets],
        "CPU: engine": [shown(each.used.engine) for each in budgets],
        "CPU: frontend": [shown(each.used.frontend) for each in budgets],
        "CPU: worker": [shown(each.used.worker) for each in budgets],
        "CPU outside the forward": [f"{each.used.outside_share:.1%}" for each in budgets],
        "cores that others kept busy": [f"{each.used.others:.2f}" for each in budgets],
    }
    lines += [[name, *(cell for value in values for cell in (value, "")), ""] for name, values in sums.items()]
    return [f"| {' | '.join(line)} |" for line in lines]


def shown(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 10 else f"{microseconds:.1f}"
