"""What the worker remembers: one row per admitted request. Knows no tensors and decides nothing.

Rows change by plans and by the worker's own samples, nothing else. Every plan is checked: a bad one is an error, never
a write outside what the row owns.
"""

import numpy as np

from blockplane.data_plane.block_table import BlockTable
from blockplane.kernels.slots import NULL_BLOCK_ID
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import first_visible
from blockplane.protos.plan import NO_ROWS, Admission, Configure, Int32Array, StepPlan


class Rows:
    """State of rows 0 .. max_num_seqs - 1, columnar.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len], all known tokens of each row.
        num_tokens: int32 [max_num_seqs], how many of them; 0 = the row is free.
        num_computed_tokens: int32 [max_num_seqs], tokens whose KV is in the cache.
        temperature: float32 [max_num_seqs]. seed: uint64 [max_num_seqs].
        decode_rows: int32, the last plan's decode set, in its order.
    """

    def __init__(self, configure: Configure) -> None:
        max_num_seqs = configure.max_num_seqs
        self.configure = configure
        self.token_ids = np.zeros((max_num_seqs, configure.max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.block_table = BlockTable(len(configure.kv_cache_groups), max_num_seqs, configure.max_blocks_per_row)
        self.decode_rows: Int32Array = NO_ROWS
        self._step = 0

    def apply(self, plan: StepPlan) -> None:
        """Take over what a plan changes: releases, admissions, new blocks, the decode set.

        Raises:
            ProtocolError: the plan contradicts the rows. Nothing outside them was written, but they are of no more use:
                the stream ends, and the next attach starts with new ones.
        """
        _require(plan.step == self._step + 1, f"step {plan.step} does not follow step {self._step}")
        self._step = plan.step
        self._release(plan.released_rows)
        for admission in plan.admissions:
            self._admit(admission)
        self._append_blocks(plan.block_rows, plan.block_ids)
        if plan.decode_rows is not None:
            self.decode_rows = plan.decode_rows
        if plan.decode_num_tokens is not None:
            _require(len(plan.decode_num_tokens) == len(self.decode_rows), "its decode columns differ in length")
            _require(bool((plan.decode_num_tokens == 1).all()), "it wants drafts, but this worker proposes no drafts")
        self._check_work(plan)

    def advance(self, rows: Int32Array, num_scheduled_tokens: Int32Array) -> None:
        """Count computed tokens: int32 [num_rows] twice, each row once; actual tokens, padding is not counted."""
        self.num_computed_tokens[rows] += num_scheduled_tokens

    def append(self, sampled_rows: Int32Array, sampled_ids: Int32Array) -> None:
        """Append each sampled row's new token, so that its next decode finds one.

        A row that has ended may be decoded once more, by a plan that was sent before the engine knew. One that failed,
        whose token is negative, then goes on from token 0; one that max_model_len ended, whose last token has no place
        in the row, computes the token before it again.
        """
        ended = self.num_tokens[sampled_rows] == self.configure.max_model_len
        self.num_computed_tokens[sampled_rows[ended]] -= 1
        sampled_rows, sampled_ids = sampled_rows[~ended], sampled_ids[~ended]
        self.token_ids[sampled_rows, self.num_tokens[sampled_rows]] = np.maximum(sampled_ids, 0)
        self.num_tokens[sampled_rows] += 1

    def _release(self, rows: Int32Array) -> None:
        _require(self._are_occupied(rows), "it releases a row that is not occupied")
        for row in rows.tolist():
            self.num_tokens[row] = 0
            self.block_table.clear_row(row)

    def _admit(self, admission: Admission) -> None:
        row, num_tokens = admission.row, len(admission.token_ids)
        _require(0 <= row < len(self.num_tokens) and not self.num_tokens[row], f"row {row} is not there or not free")
        _require(0 < num_tokens <= self.configure.max_model_len, f"it admits a request of {num_tokens} tokens")
        _require(0 <= admission.num_computed_tokens < num_tokens, "it admits a request that has nothing to compute")
        self.token_ids[row, :num_tokens] = admission.token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = admission.num_computed_tokens
        self.temperature[row] = admission.temperature
        self.seed[row] = admission.seed

    def _append_blocks(self, rows: Int32Array, block_ids: Int32Array) -> None:
        num_groups = len(self.configure.kv_cache_groups)
        _require(len(block_ids) == len(rows) * num_groups, "its block columns do not belong together")
        exists = (block_ids >= NULL_BLOCK_ID) & (block_ids < self.configure.num_blocks)
        _require(bool(exists.all()), "it hands out a block that does not exist")
        taken, counts = np.unique(rows, return_counts=True)
        _require(self._are_occupied(taken), "it gives a block to a row that is not occupied")
        room = self.block_table.block_ids.shape[-1] - self.block_table.num_blocks[taken]
        _require(bool((counts <= room).all()), "it gives a row more blocks than max_model_len needs")
        by_group = block_ids.reshape(-1, num_groups).T
        for row in taken.tolist():
            new_blocks = by_group[:, rows == row]
            self._check_null_blocks(row, new_blocks)
            self.block_table.append_row(row, new_blocks)

    def _check_null_blocks(self, row: int, new_blocks: Int32Array) -> None:
        """The null block stands only where the row's next token, and so none after it, sees or writes anything."""
        num_blocks, position = int(self.block_table.num_blocks[row]), int(self.num_computed_tokens[row])
        for group, block_ids in zip(self.configure.kv_cache_groups, new_blocks, strict=True):
            null_blocks = np.flatnonzero(block_ids == NULL_BLOCK_ID)
            if null_blocks.size:
                end = (num_blocks + int(null_blocks[-1]) + 1) * self.configure.block_size
                first = first_visible(position, group.sliding_window, group.attention_chunk_size)
                _require(end <= first, "it hands out the null block for tokens that are still seen")

    def _check_work(self, plan: StepPlan) -> None:
        """The step computes known tokens of occupied rows, each once, into blocks that they have, within buckets."""
        rows = np.concatenate((self.decode_rows, plan.prefill_rows))
        _require(len(plan.prefill_rows) == len(plan.prefill_num_tokens), "its prefill columns differ in length")
        _require(self._are_occupied(rows), "it computes a row that is not occupied, or one twice")
        num_scheduled = np.concatenate((np.ones_like(self.decode_rows), plan.prefill_num_tokens))
        computed = self.num_computed_tokens[rows] + num_scheduled
        _require(bool((num_scheduled > 0).all()), "it has an empty prefill segment")
        _require(bool((computed <= self.num_tokens[rows]).all()), "it computes tokens that are not known yet")
        at_newest = (computed == self.num_tokens[rows])[: len(self.decode_rows)]
        _require(bool(at_newest.all()), "it decodes a row that has more than its newest token to compute")
        room = self.block_table.num_blocks[rows] * self.configure.block_size
        _require(bool((computed <= room).all()), "it computes tokens that have no block")
        num_prefill_tokens = int(plan.prefill_num_tokens.sum())
        _require(
            num_prefill_tokens <= self.configure.max_num_batched_tokens,
            f"it prefills {num_prefill_tokens} tokens, more than the last bucket holds",
        )

    def _are_occupied(self, rows: Int32Array) -> bool:
        """Whether these are rows that requests hold, each named once."""
        if not rows.size:
            return True
        in_range = bool(rows.min() >= 0 and rows.max() < len(self.num_tokens))
        return in_range and bool(self.num_tokens[rows].all()) and len(np.unique(rows)) == len(rows)


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ProtocolError(f"the engine sent a bad plan: {fault}; run the same version of Blockplane on both.")
