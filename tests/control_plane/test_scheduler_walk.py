"""A random walk over the scheduler with the worker's own rows as referee: whatever happens, what must hold holds."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.data_plane.rows import Rows
from blockplane.protos.errors import CapacityError, InvalidRequestError
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams

BLOCK_SIZE = 4
EOS = 0


def next_token(token_ids: list[int]) -> int:
    """A model that sees all its tokens: wrong tokens in a row give wrong tokens out. Every 32nd text ends."""
    return sum((index + 1) * token for index, token in enumerate(token_ids)) * 2654435761 % 2**32 >> 27


class SchedulerWalk(RuleBasedStateMachine):
    """Requests come, steps run, requests are aborted, the group is lost: in any order, in a cache that is too small."""

    @initialize(usable_blocks=st.integers(1, 10), max_num_seqs=st.integers(1, 4), budget=st.sampled_from([4, 6, 16]))
    def start(self, usable_blocks: int, max_num_seqs: int, budget: int) -> None:
        self.configure = Configure(BLOCK_SIZE, usable_blocks + 1, 48, (budget,), (max_num_seqs,))
        self.live: dict[str, Request] = {}
        self.ended: Counter[str] = Counter()
        self.accepted: list[str] = []
        self.prompts: dict[str, list[int]] = {}
        self.attach([])

    def attach(self, held: list[Request]) -> None:
        self.slots: dict[int, int] = {}
        """What a worker's cache holds: per slot, a digest of its token and of all before it."""
        self.scheduler = Scheduler(self.configure, eos_token_ids=(EOS,), max_waiting_requests=100)
        self.rows = Rows(self.configure)
        for request in held:
            self.scheduler.resume(request)

    @rule(length=st.integers(1, 44), max_tokens=st.integers(1, 12), start=st.integers(0, 2), split=st.integers(0, 44))
    def submit(self, length: int, max_tokens: int, start: int, split: int) -> None:
        """A prompt that shares its first `split` tokens with others of the same start."""
        name = str(len(self.accepted))
        prompt = [(start * 11 + index + (length if index >= split else 0)) % 32 for index in range(length)]
        request = Request(name, list(prompt), length, SamplingParams(max_tokens), seed=0)
        try:
            self.scheduler.add(request)
        except (CapacityError, InvalidRequestError):
            assert length > (self.configure.num_blocks - 1) * BLOCK_SIZE or length >= self.configure.max_model_len
            return
        self.accepted.append(name)
        self.live[name] = request
        self.prompts[name] = prompt

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.end(self.live.pop(name))
        self.ended[name] += 1

    @rule()
    def lose_the_group(self) -> None:
        self.attach(self.scheduler.unfinished())

    @rule(num_steps=st.integers(1, 6), data=st.data())
    def run(self, num_steps: int, data: st.DataObject) -> None:
        for _ in range(num_steps):
            self.step(data)

    def step(self, data: st.DataObject) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert not self.live, "never stuck: while anything lives, every step computes something"
            return
        self.rows.apply(plan)
        sampled = self.compute(plan)
        if self.live and data.draw(st.integers(0, 9)) == 0:
            self.abort(data)
        for progress in self.scheduler.update(StepResult(plan.step, np.array(sampled, np.int32))):
            if progress.outcome is not None:
                self.ended[progress.request.request_id] += 1
                del self.live[progress.request.request_id]

    def compute(self, plan: StepPlan) -> list[int]:
        """What a worker does, on the worker's own rows; the plan must keep to the budgets."""
        rows = self.rows
        decode = np.ones(len(rows.decode_rows), np.int32)
        assert len(decode) <= self.configure.max_num_seqs
        assert plan.prefill_num_tokens.sum() <= self.configure.max_num_batched_tokens
        working = np.concatenate((rows.decode_rows, plan.prefill_rows))
        assert working.size, "a plan computes something"
        decoding = {request.row for request in self.scheduler.running if request.num_remaining_tokens == 1}
        assert decoding <= {int(row) for row in working}, "every decoding row is served in every step"
        num_scheduled = np.concatenate((decode, plan.prefill_num_tokens))
        before = rows.num_computed_tokens.copy()
        for row in working:
            self.read_kv(row, range(before[row]))
        for row, count in zip(working, num_scheduled, strict=True):
            self.write_kv(row, range(before[row], before[row] + count))
        rows.advance(working, num_scheduled)
        for row in working:
            self.read_kv(row, range(rows.num_computed_tokens[row]))
        done = working[rows.num_computed_tokens[working] == rows.num_tokens[working]]
        unfinished = np.setdiff1d(working, done)
        assert (rows.num_computed_tokens[unfinished] % BLOCK_SIZE == 0).all(), "segments inside a prompt fill blocks"
        sampled = [next_token(rows.token_ids[row, : rows.num_tokens[row]].tolist()) for row in done]
        rows.append(done, np.array(sampled, np.int32))
        return sampled

    def digest(self, row: int, position: int) -> int:
        return hash(tuple(self.rows.token_ids[row, : position + 1].tolist()))

    def slot(self, row: int, position: int) -> int:
        return int(self.rows.block_table.block_ids[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE

    def write_kv(self, row: int, positions: range) -> None:
        for position in positions:
            self.slots[self.slot(row, position)] = self.digest(row, position)

    def read_kv(self, row: int, positions: range) -> None:
        """Every token is found where the row's table says, computed behind just these tokens by an earlier plan."""
        for position in positions:
            assert self.slots[self.slot(row, position)] == self.digest(row, position)

    @invariant()
    def blocks_are_conserved_and_shared_only_behind_equal_tokens(self) -> None:
        holders: dict[int, set[tuple[int, ...]]] = {}
        for request in self.scheduler.running:
            assert len(set(request.block_ids)) == len(request.block_ids)
            for index, block_id in enumerate(request.block_ids):
                end = (index + 1) * BLOCK_SIZE
                tokens = tuple(request.token_ids[:end])
                # A block that is not full is its request's alone.
                content = tokens if len(tokens) == end else (*tokens, -1 - int(request.request_id))
                holders.setdefault(block_id, set()).add(content)
        assert 0 not in holders
        assert all(len(contents) == 1 for contents in holders.values())
        assert len(holders) + self.scheduler.blocks.pool.num_free == self.configure.num_blocks - 1

    @invariant()
    def no_more_than_one_row_stands_inside_its_prompt(self) -> None:
        assert sum(request.num_remaining_tokens > 1 for request in self.scheduler.running) <= 1

    @invariant()
    def requests_hold_no_more_blocks_than_their_tokens_need(self) -> None:
        for request in self.scheduler.running:
            assert len(request.block_ids) <= -(-request.num_tokens // BLOCK_SIZE)

    @invariant()
    def texts_are_those_of_an_undisturbed_run(self) -> None:
        for name, request in self.live.items():
            expected = list(self.prompts[name])
            while len(expected) < request.num_tokens:
                expected.append(next_token(expected))
            assert request.token_ids == expected

    @invariant()
    def every_accepted_request_lives_or_has_ended_once(self) -> None:
        for name in self.accepted:
            assert self.ended[name] == (0 if name in self.live else 1)

    def teardown(self) -> None:
        """Left alone, everything that lives comes to its end and the cache is whole again."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.rows.apply(plan)
            sampled = np.array(self.compute(plan), np.int32)
            for progress in self.scheduler.update(StepResult(plan.step, sampled)):
                if progress.outcome is not None:
                    del self.live[progress.request.request_id]
        assert not self.live
        assert self.scheduler.blocks.pool.num_free == self.configure.num_blocks - 1


TestSchedulerWalk = SchedulerWalk.TestCase
TestSchedulerWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
