"""What the worker remembers: one row per admitted request. Knows no tensors and decides nothing.

Rows change by plans and by the worker's own samples, nothing else. Every plan is checked: a bad one is an error, never
a write outside what the row owns.
"""

from copy import copy

import numpy as np

from blockplane.data_plane.block_table import BlockTable
from blockplane.kernels.slots import ALONE, NULL_BLOCK_ID, ContextParallel
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import first_visible
from blockplane.protos.plan import NO_ROWS, Admission, Configure, Int32Array, IntArray, StepPlan, StepResult


class Rows:
    """State of rows 0 .. max_num_seqs - 1, columnar.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len], all known tokens of each row.
        num_tokens: int32 [max_num_seqs], how many of them; 0 = the row is free.
        num_computed_tokens: int32 [max_num_seqs], tokens whose KV is in the cache.
        decode_rows: int64, the last plan's decode set, in its order.
        decode_num_tokens: int32, per decode row, how many tokens it may compute: its newest and drafts.
    """

    def __init__(
        self,
        configure: Configure,
        kernel_block_size: int | None = None,
        context_parallel: ContextParallel = ALONE,
    ) -> None:
        """
        Args:
            kernel_block_size: tokens in a block as the attention kernel has them; None = as this rank keeps them.
            context_parallel: which positions these are.
        """
        max_num_seqs = configure.max_num_seqs
        self.configure = configure
        self.token_ids = np.zeros((max_num_seqs, configure.max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_table = BlockTable(
            len(configure.kv_cache_groups),
            max_num_seqs,
            configure.max_blocks_per_row,
            configure.rank_block_size,
            kernel_block_size,
            context_parallel,
        )
        self.decode_rows: IntArray = NO_ROWS
        self.decode_num_tokens: Int32Array = NO_ROWS
        self._step = configure.last_step

    def reset(self, configure: Configure) -> None:
        """Free every row, whatever state a bad plan left it in, and number steps on from `configure.last_step`.

        `configure` is the one that these rows were made for, but for what names the attach.
        """
        self.configure, self._step = configure, configure.last_step
        self.num_tokens[:] = 0
        self.block_table.clear()
        self.decode_rows = self.decode_num_tokens = NO_ROWS

    def apply(self, plan: StepPlan) -> None:
        """Take over what a plan changes: releases, admissions, new blocks, the decode set.

        Raises:
            ProtocolError: the plan contradicts the rows. Nothing outside them was written, but they are of no more use
                until they are reset.
        """
        _require(plan.step == self._step + 1, f"step {plan.step} does not follow step {self._step}")
        self._step = plan.step
        if plan.released_rows.size:
            self._release(plan.released_rows)
        for admission in plan.admissions:
            self._admit(admission)
        if plan.block_rows.size or plan.block_ids.size:
            self._append_blocks(plan.block_rows, plan.block_ids)
        self._set_decodes(plan)
        self._check_work(plan)

    def at_another_pace(self, configure: Configure) -> "Rows":
        """The same rows for a second model: all that they hold is one, but how far they are computed is its own.

        Plans are applied to the first.
        """
        rows = copy(self)
        rows.configure, rows.num_computed_tokens = configure, self.num_computed_tokens.copy()
        return rows

    def propose(self, rows: IntArray, draft_token_ids: Int32Array, num_drafts: Int32Array) -> None:
        """Place drafts behind the known tokens, where the next step finds its inputs; they stay unknown until appended.

        Args:
            rows: [num_rows]. draft_token_ids: int32 [num_rows, num_draft_tokens], each row's first `num_drafts`.
            num_drafts: int32 [num_rows]; within what the row is granted, so that they have a place.
        """
        proposed = np.arange(draft_token_ids.shape[1]) < num_drafts[:, None]
        places = self.num_tokens[rows][:, None] + np.arange(draft_token_ids.shape[1])
        token_rows = np.repeat(rows, num_drafts)
        self.token_ids[token_rows, places[proposed]] = draft_token_ids[proposed]

    def advance(self, rows: IntArray, num_scheduled_tokens: Int32Array | np.int32) -> None:
        """Count computed tokens: [num_rows] twice, or as many of each; each row once. Padding is not counted.

        Of a row with drafts those count that were accepted, and the token before them.
        """
        self.num_computed_tokens[rows] += num_scheduled_tokens

    def append(self, sampled_rows: IntArray, sampled_ids: Int32Array, num_sampled: Int32Array | None = None) -> None:
        """Append each sampled row's new tokens, so that its next decode finds one that is not computed.

        A row that has ended may be decoded once more, by a plan that was sent before the engine knew. One that failed,
        whose token is negative, then goes on from token 0; one that max_model_len ended, whose last tokens have no
        place in the row, computes the token before them again.

        Args:
            sampled_rows: [num_rows], each once.
            sampled_ids: int32, the rows' new tokens end to end.
            num_sampled: int32 [num_rows], how many each got, as many as it advanced by; None = 1 each.
        """
        if not sampled_rows.size:
            return
        places: IntArray
        known = self.num_tokens[sampled_rows]
        if num_sampled is None:
            token_rows, places, num_tokens = sampled_rows, known, known + np.int32(1)
        else:
            token_rows = np.repeat(sampled_rows, num_sampled)
            num_tokens = (known + num_sampled).astype(np.int32)
            before = np.cumsum(num_sampled) - num_sampled
            places = np.repeat(known - before, num_sampled) + np.arange(len(sampled_ids))
        max_model_len = self.configure.max_model_len
        if places.max() >= max_model_len:
            self.num_computed_tokens[sampled_rows] -= np.maximum(num_tokens - max_model_len, 0)
            num_tokens = np.minimum(num_tokens, max_model_len)
            has_place = places < max_model_len
            token_rows, places, sampled_ids = token_rows[has_place], places[has_place], sampled_ids[has_place]
        self.token_ids[token_rows, places] = np.maximum(sampled_ids, 0)
        self.num_tokens[sampled_rows] = num_tokens

    def finished_prefills(self, plan: StepPlan) -> Int32Array:
        """Those of the plan's prefill rows whose last known token it computes, so that it samples one for each.

        Asked between `apply` and `advance`.
        """
        rows = plan.prefill_rows
        finished: Int32Array = rows[self.num_computed_tokens[rows] + plan.prefill_num_tokens == self.num_tokens[rows]]
        return finished

    def fold(self, plan: StepPlan, result: StepResult) -> None:
        """Take over what the plan produced, once it was applied: a log of plans and results makes the rows."""
        finished = self.finished_prefills(plan) if plan.prefill_rows.size else NO_ROWS
        num_decoded = len(result.token_ids) - len(finished)
        self.advance(self.decode_rows, np.int32(1) if result.num_tokens is None else result.num_tokens)
        self.append(self.decode_rows, result.token_ids[:num_decoded], result.num_tokens)
        if plan.prefill_rows.size:
            self.advance(plan.prefill_rows, plan.prefill_num_tokens)
            self.append(finished, result.token_ids[num_decoded:])

    def _release(self, rows: Int32Array) -> None:
        is_sound = self._are_occupied(rows) and np.bincount(rows).max() <= 1
        _require(is_sound, "it releases a row that is not occupied")
        for row in rows.tolist():
            self.num_tokens[row] = 0
            self.block_table.clear_row(row)

    def _admit(self, admission: Admission) -> None:
        row, num_tokens = admission.row, len(admission.token_ids)
        _require(0 <= row < len(self.num_tokens) and not self.num_tokens[row], f"row {row} is not there or not free")
        _require(0 < num_tokens <= self.configure.max_model_len, f"it admits a request of {num_tokens} tokens")
        _require(0 < admission.num_prompt_tokens <= num_tokens, "it admits a request without a prompt")
        _require(0 <= admission.num_computed_tokens < num_tokens, "it admits a request that has nothing to compute")
        self.token_ids[row, :num_tokens] = admission.token_ids
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = admission.num_computed_tokens

    def _append_blocks(self, rows: IntArray, block_ids: Int32Array) -> None:
        num_groups = len(self.configure.kv_cache_groups)
        _require(len(block_ids) == len(rows) * num_groups, "its block columns do not belong together")
        lowest = block_ids.min()
        exists = lowest >= NULL_BLOCK_ID and block_ids.max() < self.configure.num_blocks
        _require(bool(exists), "it hands out a block that does not exist")
        rows = rows.astype(np.int64)
        _require(self._are_occupied(rows), "it gives a block to a row that is not occupied")
        by_group = block_ids.reshape(-1, num_groups).T
        if lowest == NULL_BLOCK_ID:
            self._check_null_blocks(rows, by_group)
        try:
            self.block_table.append(rows, by_group)
        except IndexError:
            _require(False, "it gives a row more blocks than max_model_len needs")

    def _check_null_blocks(self, rows: IntArray, by_group: Int32Array) -> None:
        """The null block stands only where the row's next token, and so none after it, sees or writes anything."""
        logical_blocks = self.block_table.next_logical_blocks(rows)
        for group, block_ids in zip(self.configure.kv_cache_groups, by_group, strict=True):
            is_null = block_ids == NULL_BLOCK_ID
            ends = (logical_blocks[is_null] + 1) * self.configure.block_size
            positions = self.num_computed_tokens[rows[is_null]]
            first = first_visible(positions, group.sliding_window, group.attention_chunk_size)
            _require(bool((ends <= first).all()), "it hands out the null block for tokens that are still seen")

    def _set_decodes(self, plan: StepPlan) -> None:
        if plan.decode_rows is not None:
            # Indexed by at every step, for which numpy wants its own type.
            self.decode_rows = plan.decode_rows.astype(np.int64)
            self.decode_num_tokens = np.ones_like(plan.decode_rows)
        if plan.decode_num_tokens is not None:
            _require(len(plan.decode_num_tokens) == len(self.decode_rows), "its decode columns differ in length")
            threshold = self.configure.decode_token_threshold
            granted = (plan.decode_num_tokens > 0) & (plan.decode_num_tokens <= threshold)
            _require(bool(granted.all()), f"it grants a decode row another number of tokens than 1 to {threshold}")
            self.decode_num_tokens = plan.decode_num_tokens

    def _check_work(self, plan: StepPlan) -> None:
        """The step computes known tokens of occupied rows, each once, into blocks that they have, within buckets."""
        is_changed = plan.decode_rows is not None or plan.released_rows.size > 0
        if is_changed or plan.prefill_rows.size:
            rows = np.concatenate((self.decode_rows, plan.prefill_rows))
            is_sound = self._are_occupied(rows) and np.bincount(rows, minlength=1).max() <= 1
            _require(is_sound, "it computes a row that is not occupied, or one twice")
        if self.decode_rows.size:
            computed = self.num_computed_tokens[self.decode_rows]
            if is_changed:
                # A row that was at its newest token is so again after each of its steps.
                at_newest = self.num_tokens[self.decode_rows] == computed + 1
                _require(bool(at_newest.all()), "it decodes a row that has another number than 1 of tokens to compute")
            self._check_room(self.decode_rows, computed + self.decode_num_tokens)
        if plan.prefill_rows.size or plan.prefill_num_tokens.size:
            self._check_prefill(plan.prefill_rows, plan.prefill_num_tokens)

    def _check_prefill(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        _require(len(rows) == len(num_tokens), "its prefill columns differ in length")
        _require(bool((num_tokens > 0).all()), "it has an empty prefill segment")
        prior = self.num_computed_tokens[rows]
        is_read = self.configure.kv_segment_size > 0 or not prior.any()
        _require(is_read, "kv_segment_size is 0, and it prefills a row some of whose tokens are computed already")
        computed = prior + num_tokens
        _require(bool((computed <= self.num_tokens[rows]).all()), "it computes tokens that are not known yet")
        self._check_room(rows, computed)
        num_bucket_tokens = int(self.configure.num_bucket_tokens(num_tokens).sum())
        _require(
            num_bucket_tokens <= self.configure.max_num_batched_tokens,
            f"its prefill takes {num_bucket_tokens} tokens, more than the last bucket holds",
        )

    def _check_room(self, rows: IntArray, num_tokens: Int32Array) -> None:
        has_room = num_tokens <= self.block_table.num_blocks[rows] * self.configure.block_size
        _require(bool(has_room.all()), "it computes tokens that have no block")
        if self.configure.num_draft_tokens:
            _require(int(num_tokens.max()) <= self.configure.max_model_len, "it drafts beyond max_model_len")

    def _are_occupied(self, rows: IntArray) -> bool:
        """Whether these are rows that requests hold."""
        if not rows.size:
            return True
        try:
            return bool(self.num_tokens[rows].all() and rows.min() >= 0)
        except IndexError:
            return False


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ProtocolError(f"the engine sent a bad plan: {fault}; run the same version of Blockplane on both.")
