"""How much of what a worker computes is padding, over recorded requests. Knows neither models nor time.

The scheduler plans the requests, all there from the start, as for a worker that answers at once; each plan is padded to
the profile's buckets as the worker pads it. Waste is the padded part of all computed tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.buckets import choose_bucket
from blockplane.protos.config import load_config
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams

WORKLOADS = Path(__file__).parent / "workloads"
MIXED = "W1", "W2", "W4"
VOCAB_SIZE = 262_144


@dataclass(frozen=True, slots=True)
class PaddingFigure:
    """Tokens that requests needed and that graphs computed, by kind of graph."""

    kind: str
    num_steps: int
    num_actual: int
    num_computed: int

    @property
    def waste(self) -> float:
        """The part of the computed tokens that is padding."""
        return 1 - self.num_actual / self.num_computed


def recorded(names: Sequence[str] = MIXED) -> list[Request]:
    """The workloads' requests, one after another from each."""
    lines = [(WORKLOADS / f"{name}.jsonl").read_text().splitlines() for name in names]
    queues = [[json.loads(line) for line in own] for own in lines]
    in_turn = [queue[index] for index in range(max(map(len, queues))) for queue in queues if index < len(queue)]
    return [_request(number, record["prompt_token_ids"], record["max_tokens"]) for number, record in enumerate(in_turn)]


def measure_padding(requests: Sequence[Request], profile: str = "production") -> tuple[PaddingFigure, PaddingFigure]:
    """Of prefill and of decode."""
    config = load_config({"profile": profile}, {})
    configure = Configure(
        block_size=config.block_size,
        num_blocks=8192,
        max_model_len=16_384,
        num_batched_tokens_buckets=config.num_batched_tokens_buckets,
        num_seqs_buckets=config.num_seqs_buckets,
        kv_segment_size=config.kv_segment_size,
    )
    totals = np.zeros((2, 3), np.int64)
    for num_prefilled, num_decoded in _steps(configure, requests):
        counts = (num_prefilled, configure.num_batched_tokens_buckets), (num_decoded, configure.num_seqs_buckets)
        for total, (num_actual, buckets) in zip(totals, counts, strict=True):
            if num_actual:
                total += 1, num_actual, choose_bucket(num_actual, buckets) or 0
    prefill, decode = totals.tolist()
    return PaddingFigure("prefill", *prefill), PaddingFigure("decode", *decode)


def _steps(configure: Configure, requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """Tokens prefilled and rows decoded by each step, until all requests have their tokens."""
    waiting = WaitingQueue(len(requests), 1 << 40, priority_seconds=10.0)
    scheduler = Scheduler(configure, waiting, vocab_size=VOCAB_SIZE)
    scheduler.add(requests)
    num_decoded = 0
    while (plan := scheduler.schedule()) is not None:
        num_decoded = num_decoded if plan.decode_rows is None else len(plan.decode_rows)
        yield int(plan.prefill_num_tokens.sum()), num_decoded
        scheduler.update(_answer(scheduler, plan))


def _answer(scheduler: Scheduler, plan: StepPlan) -> StepResult:
    """The same id for each row that the plan samples."""
    return StepResult(plan.step, np.ones(len(scheduler._in_flight[0].sampled.requests), np.int32))


def _request(number: int, token_ids: Sequence[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens, ignore_eos=True)
    return Request(f"request-{number}", np.array(token_ids, np.int32), len(token_ids), params, 0, stream_id=number)
