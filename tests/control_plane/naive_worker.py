"""A worker of plain Python that checks every plan and every read of KV: the walk's referee. Knows no scheduler.

Its cache holds, in each slot, a digest of the token there, of all before it, and of the group that wrote it; a
computation reads all that its layers would see and compares.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from blockplane.protos.kv_cache import first_visible
from blockplane.protos.plan import Configure, StepPlan, StepResult

Digest = tuple[object, ...]


@dataclass
class Row:
    """What a worker knows of a request. `world` tells texts apart that must share nothing, equal tokens or not."""

    token_ids: list[int]
    num_computed: int
    world: object
    tables: list[list[int]]
    has_sampled: bool = False


@dataclass
class NaiveWorker:
    """Executes plans in order, all at once.

    `next_token` continues a text, `num_accepted` draws how many of a row's granted tokens are, `fails` whether its
    logits are not finite; `world_of` says what, beside tokens, a row's KV depends on.
    """

    configure: Configure
    next_token: Callable[[list[int]], int]
    num_accepted: Callable[[int], int]
    fails: Callable[[], bool]
    world_of: Callable[[int], object]
    rows: dict[int, Row] = field(default_factory=dict)
    slots: dict[int, Digest] = field(default_factory=dict)
    decode_rows: list[int] = field(default_factory=list)
    decode_num_tokens: list[int] = field(default_factory=list)
    step: int = 0

    def execute(self, plan: StepPlan, *, all_answered: bool) -> StepResult:
        self._apply(plan, all_answered=all_answered)
        assert len(self.decode_rows) <= self.configure.max_num_seqs
        num_bucket_tokens = self.configure.num_bucket_tokens(plan.prefill_num_tokens).sum()
        assert num_bucket_tokens <= self.configure.max_num_batched_tokens
        assert self.decode_rows or plan.prefill_rows.size, "a plan computes something"
        working = [*self.decode_rows, *plan.prefill_rows.tolist()]
        assert len(set(working)) == len(working), "a row works once in a step"
        # What rows read must have been there before the step: nobody reads what another computes in the same one.
        for row in working:
            self._read(self.rows[row], range(self.rows[row].num_computed, self.rows[row].num_computed + 1))
        decoded = [
            self._decode(self.rows[row], num) for row, num in zip(self.decode_rows, self.decode_num_tokens, strict=True)
        ]
        prefilled = [
            self._prefill(self.rows[row], num)
            for row, num in zip(plan.prefill_rows.tolist(), plan.prefill_num_tokens.tolist(), strict=True)
        ]
        return StepResult(
            plan.step,
            np.array([token for tokens in (*decoded, *prefilled) for token in tokens], np.int32),
            np.array([len(tokens) for tokens in decoded], np.int32) if self.configure.num_draft_tokens else None,
        )

    def lose_rows(self, last_step: int) -> None:
        """Begin anew behind that step, with the KV that is there."""
        self.rows, self.decode_rows, self.decode_num_tokens, self.step = {}, [], [], last_step

    def _apply(self, plan: StepPlan, *, all_answered: bool) -> None:
        self.step += 1
        assert plan.step == self.step
        for row in plan.released_rows.tolist():
            del self.rows[row]
        num_groups = len(self.configure.kv_cache_groups)
        for admission in plan.admissions:
            assert admission.row not in self.rows
            assert 0 <= admission.row < self.configure.max_num_seqs
            self.rows[admission.row] = Row(
                admission.token_ids.tolist(),
                admission.num_computed_tokens,
                self.world_of(admission.row),
                [[] for _ in range(num_groups)],
            )
        assert len(plan.block_ids) == len(plan.block_rows) * num_groups
        for row, ids in zip(plan.block_rows.tolist(), plan.block_ids.reshape(-1, num_groups).tolist(), strict=True):
            for table, block_id in zip(self.rows[row].tables, ids, strict=True):
                assert 0 <= block_id < self.configure.num_blocks
                table.append(block_id)
            assert len(table) <= self.configure.max_blocks_per_row
        if plan.decode_rows is not None:
            self.decode_rows = plan.decode_rows.tolist()
            self.decode_num_tokens = [1] * len(self.decode_rows)
        if plan.decode_num_tokens is not None:
            self.decode_num_tokens = plan.decode_num_tokens.tolist()
        if all_answered:
            decoding = {row for row, state in self.rows.items() if state.has_sampled}
            assert decoding <= {*self.decode_rows, *plan.prefill_rows.tolist()}, (
                "every decoding row is served in every step"
            )

    def _prefill(self, row: Row, num_tokens: int) -> list[int]:
        start, stop = row.num_computed, row.num_computed + num_tokens
        assert num_tokens > 0
        assert stop <= len(row.token_ids)
        if stop < len(row.token_ids):
            assert num_tokens % self.configure.segment_multiple == 0, "segments inside a prompt fill blocks"
            assert self.configure.kv_segment_size, "without segments a prompt is computed at once"
        self._write(row, row.token_ids, range(start, stop))
        self._read(row, range(start, stop))
        row.num_computed = stop
        return self._sample(row, 1) if stop == len(row.token_ids) else []

    def _decode(self, row: Row, num_granted: int) -> list[int]:
        assert 1 <= num_granted <= 1 + self.configure.num_draft_tokens
        assert len(row.token_ids) - row.num_computed == 1, "a row decodes its newest token"
        start = row.num_computed
        sampled = self._sample(row, self.num_accepted(num_granted))
        # Drafts that are not accepted are written all the same, and overwritten later.
        drafted = row.token_ids + [-1] * num_granted
        self._write(row, drafted, range(start, start + num_granted))
        self._read(row, range(start, start + len(sampled)))
        row.num_computed += len(sampled)
        return sampled

    def _sample(self, row: Row, count: int) -> list[int]:
        row.has_sampled = True
        if self.fails():
            row.token_ids.append(0)
            return [-1]
        start = len(row.token_ids)
        for _ in range(count):
            row.token_ids.append(self.next_token(row.token_ids))
        return row.token_ids[start:]

    def _write(self, row: Row, token_ids: list[int], positions: range) -> None:
        for position in positions:
            for group in range(len(row.tables)):
                self.slots[self._slot(row, group, position)] = self._digest(row, token_ids, group, position)

    def _read(self, row: Row, queries: range) -> None:
        """All that these queries see is where the tables say; a lone query's own token need not be there yet."""
        for index, group in enumerate(self.configure.kv_cache_groups):
            first = int(first_visible(queries.start, group.sliding_window, group.attention_chunk_size))
            for position in range(first, queries.start if len(queries) == 1 else queries.stop):
                expected = self._digest(row, row.token_ids, index, position)
                assert self.slots.get(self._slot(row, index, position)) == expected

    def _slot(self, row: Row, group: int, position: int) -> int:
        block_id = row.tables[group][position // self.configure.block_size]
        assert block_id > 0, "the null block is neither read nor written"
        return block_id * self.configure.block_size + position % self.configure.block_size

    def _digest(self, row: Row, token_ids: list[int], group: int, position: int) -> Digest:
        return group, row.world, hash(tuple(token_ids[: position + 1]))
