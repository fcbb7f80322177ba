"""Rows depend on the log of plans and results alone.

Applied to an empty worker, after every step of random walks, it gives what a model of plain Python has.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import walk as walks
from naive_worker import NaiveWorker
from walk import Walk, random_configure, random_operation

from blockplane.data_plane.rows import Rows
from blockplane.protos import wire
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.v1 import engine_pb2 as pb

SEEN: Counter[str] = Counter()


class LoggedWorker(NaiveWorker):
    """Has its log applied to rows of the data plane, as it would cross the wire, and compares them with its own."""

    def execute(self, plan: StepPlan, *, all_answered: bool) -> StepResult:
        result = super().execute(plan, all_answered=all_answered)
        if not hasattr(self, "replayed"):
            self.replayed = Rows(self.configure)
        plan = wire.plan_from_proto(pb.StepPlan.FromString(wire.plan_to_proto(plan).SerializeToString()))
        answer = wire.result_from_proto(pb.StepResult.FromString(wire.result_to_proto(result).SerializeToString()))
        self.replayed.apply(plan)
        self.replayed.fold(plan, answer)
        self._compare()
        SEEN.update(steps=1, admissions=len(plan.admissions), releases=len(plan.released_rows))
        SEEN.update(prefills=len(plan.prefill_rows), kept=plan.decode_rows is None and len(self.decode_rows) > 0)
        SEEN.update(drafts=int((self.replayed.decode_num_tokens > 1).sum()), failures=int((answer.token_ids < 0).sum()))
        return result

    def lose_rows(self, last_step: int) -> None:
        super().lose_rows(last_step)
        if hasattr(self, "replayed"):
            self.replayed.reset(replace(self.configure, last_step=last_step))
            SEEN.update(attaches=1)

    def _compare(self) -> None:
        replayed, limit = self.replayed, self.configure.max_model_len
        assert replayed.decode_rows.tolist() == self.decode_rows
        assert replayed.decode_num_tokens.tolist() == self.decode_num_tokens
        assert np.flatnonzero(replayed.num_tokens).tolist() == sorted(self.rows)
        for row, state in self.rows.items():
            num_known = min(len(state.token_ids), limit)
            assert replayed.token_ids[row, : replayed.num_tokens[row]].tolist() == state.token_ids[:num_known]
            assert replayed.num_computed_tokens[row] == min(state.num_computed, limit - 1)
            num_blocks = len(state.tables[0])
            tables = replayed.block_table.block_ids[:, row]
            assert tables[:, :num_blocks].tolist() == state.tables
            assert not tables[:, num_blocks:].any()


def run(seed: int, num_operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "NaiveWorker", LoggedWorker)
    rng = random.Random(seed)
    steps = Walk(random_configure(rng), rng)
    for _ in range(num_operations):
        getattr(steps, random_operation(rng))()
    steps.settle()


@pytest.mark.parametrize("seed", range(2000, 2012))
def test_rows_are_what_the_log_says_after_every_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(seed, 150, monkeypatch)


def test_these_walks_reach_all_that_changes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    for seed in range(2000, 2006):
        run(seed, 100, monkeypatch)
    names = "admissions", "releases", "prefills", "kept", "drafts", "failures", "attaches"
    assert all(SEEN[name] > 0 for name in names), SEEN
    assert SEEN["steps"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3040))
def test_it_holds_for_long_logs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(seed, 1000, monkeypatch)
