"""What one step computes: who decodes, which prompts go on, who is admitted, who gives way. Knows no worker.

There are no phases: a request is scheduled until its computed tokens catch up with its tokens, generated ones included,
so that one that lost its blocks resumes like any other. Every row that decodes does so in every step; prefill has its
own budget beside it.
"""

import logging
from bisect import bisect_left

import numpy as np

from blockplane.control_plane.engine.kv_blocks import Prefix
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.running import Running
from blockplane.control_plane.engine.step import Draft, Segment
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.plan import Admission, IntArray
from blockplane.protos.trace_context import trace_mark

logger = logging.getLogger(__name__)


class Planner:
    """The deciding half of a scheduler, on the scheduler's own rows, blocks and queue.

    Attributes:
        num_admitted, num_prompt_tokens, num_cached_tokens: counted once for each request, when it first gets a row.
        num_preemptions: how often a request lost its row to others.
    """

    def __init__(self, running: Running, waiting: WaitingQueue) -> None:
        self._running, self._waiting = running, waiting
        self._rows, self._blocks, self._configure = running.rows, running.blocks, running.configure
        self._ahead = running.configure.decode_token_threshold
        self.num_admitted = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_preemptions = 0

    def draft(self, last_step: int, num_answered: int, now: float) -> Draft:
        """Decide on the step after `last_step`; the first `num_answered` steps have their answers."""
        draft = Draft(self._configure.max_num_batched_tokens, last_step, num_answered)
        self._schedule_decodes(draft)
        if not draft.must_wait:
            self._schedule_prefills(draft)
            if draft.may_admit and self._waiting:
                self._admit(draft, now)
        return draft

    def enqueue(self, request: Request) -> None:
        """Let a request without a row wait at its rank."""
        self._blocks.enter(request)
        self._waiting.put(request)

    # -- decode --------------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, draft: Draft) -> None:
        """Grant every decoding row its next token, and drafts behind it."""
        rows, decodes = self._rows, self._running.decode_set()
        if not decodes.requests:
            return
        reaches_mark = rows.num_granted[decodes.rows] + self._ahead > rows.grant_mark[decodes.rows]
        if np.count_nonzero(reaches_mark):
            self._pass_marks(decodes.rows[reaches_mark], draft)
            decodes = self._running.decode_set()
        if self._ahead > 1:
            room = rows.grant_mark[decodes.rows] - rows.num_granted[decodes.rows]
            draft.num_granted = np.minimum(self._ahead, room).astype(np.int32)
        draft.decodes = decodes
        if not draft.must_wait:
            rows.num_granted[decodes.rows] += 1 if draft.num_granted is None else draft.num_granted

    def _pass_marks(self, at_mark: IntArray, draft: Draft) -> None:
        """Find blocks for rows whose next tokens need them; who has been granted all that it may get decodes no more.

        The newest row of the lowest priority gives way where blocks run out.
        """
        rows = self._rows
        may_go_on = rows.num_granted[at_mark] < rows.final_len[at_mark] - 1
        if not may_go_on.all():
            self._running.change_decodes()
            at_mark = at_mark[may_go_on]
        # Drafts take no blocks that a prompt may need.
        if self._grow(at_mark, self._num_missing(at_mark, 1 if self._running.prefilling else self._ahead), draft):
            return
        # Blocks are short: the last in rank gives way to those before it.
        for row in sorted(at_mark.tolist(), key=lambda row: rows.request(row).rank):
            at = np.array([row])
            while rows.requests[row] is not None and not self._grow(at, self._num_missing(at, 1), draft):
                if rows.num_running == 1 and (draft.num_answered < draft.last_step or self._blocks.num_lent):
                    draft.must_wait = True
                    return
                self._preempt(draft)

    def _num_missing(self, at: IntArray, num_tokens: int) -> IntArray:
        """Logical blocks that each of these rows lacks for so many more tokens, as far as it may get them."""
        target = np.minimum(self._rows.num_granted[at] + num_tokens, self._rows.final_len[at] - 1)
        missing: IntArray = -(-target // self._configure.block_size) - self._blocks.num_blocks[at]
        return np.maximum(missing, 0)

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _schedule_prefills(self, draft: Draft) -> None:
        """Continue rows inside their prompts within the budget.

        If one finds no block, the others decode, and so end; nobody is admitted meanwhile, lest newer requests take
        what comes free.
        """
        for row in tuple(self._running.prefilling):
            if not self._prefill(row, draft):
                draft.may_admit = False
                return

    def _prefill(self, row: int, draft: Draft) -> bool:
        """Plan a row's next segment; False = there is no room now, and nothing has changed."""
        rows, block_size = self._rows, self._configure.block_size
        start, num_known = int(rows.num_granted[row]), int(rows.num_tokens[row])
        stop = start + self._segment(num_known - start, draft.budget)
        num_held = int(self._blocks.num_blocks[row])
        if stop == start:
            return False
        if not self._grow(np.array([row]), np.array([-(-stop // block_size) - num_held]), draft):
            if rows.num_running > 1:
                return False
            # Alone it takes what there is: earlier blocks leave its windows meanwhile, or come with an answer.
            num_free = self._blocks.pool.num_free // len(self._configure.kv_cache_groups)
            room = (num_held + num_free) * block_size - start
            stop = start + self._segment(num_known - start, draft.budget, room)
            if stop == start or not self._grow(np.array([row]), np.array([-(-stop // block_size) - num_held]), draft):
                return False
        rows.num_granted[row] = stop
        draft.budget -= self._configure.num_bucket_tokens(stop - start)
        request = rows.request(row)
        draft.prefills.append(Segment(request, row, start, stop, samples=stop == num_known))
        draft.filling.update(dict.fromkeys(request.keys[start // block_size + 1 : stop // block_size + 1], request))
        return True

    def _segment(self, num_remaining: int, budget: int, room: int | None = None) -> int:
        """Tokens of a request's next segment; 0 = the budget has no room.

        A multiple unless it reaches the request's end, so that the tokens before a segment always fill whole blocks
        (seed 001, "Block Alignment"). Without segments a prompt is computed at once or not at all.

        Args:
            budget: tokens of the bucket that are left, a multiple of what every segment's padding ends at: what fits
                in it does so with its padding. room: tokens that blocks hold; None = enough.
        """
        most = budget if room is None else min(budget, room)
        if num_remaining <= most:
            return num_remaining
        return most - most % self._configure.segment_multiple if self._configure.kv_segment_size else 0

    # -- admission and preemption --------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, now: float) -> None:
        """Admit waiting requests in order while rows, blocks and the prefill budget last.

        A request is admitted when its known tokens fit and one block is left for each running row, whose next tokens
        may need it; what it needs beyond this step is taken when it comes to it. One whose next blocks another is
        computing waits behind it, to share them, and lets those that follow pass.
        """
        for request in self._waiting.first(self._configure.max_num_seqs):
            # A request is not admitted again while a plan that names it is unanswered.
            if not self._rows.num_free or not draft.budget or request.last_step > draft.num_answered:
                return
            if self._waits_behind(request):
                continue
            prefix = self._blocks.find_prefix(request)
            if self._falls_behind(request, prefix, draft):
                continue
            num_running = self._rows.num_running
            has_rivals = num_running or self._blocks.num_lent
            if has_rivals and not self._blocks.has_room(request.num_tokens, prefix, num_running):
                return
            num_cached_tokens = prefix.num_blocks * self._configure.block_size
            num_tokens = self._segment(request.num_tokens - num_cached_tokens, draft.budget)
            if not num_tokens or (has_rivals and not self._blocks.fits(num_cached_tokens + num_tokens, prefix)):
                return
            self._waiting.serve(request, now)
            if not self._prefill(self._take_row(request, prefix, draft), draft):
                raise AssertionError("the segment fits, or all blocks are free")

    def _waits_behind(self, request: Request) -> bool:
        """Whether another still computes blocks that this request will share."""
        if request.behind is None:
            return False
        leader, num_blocks = request.behind
        # Whoever moved to another group computes nothing here.
        row = leader.row if leader.group == request.group else None
        if row is not None and self._rows.num_granted[row] < num_blocks * self._configure.block_size:
            return True
        request.behind = None
        return False

    def _falls_behind(self, request: Request, prefix: Prefix, draft: Draft) -> bool:
        """Let a request wait behind whoever fills, in this very plan, the block that follows its prefix."""
        most = self._blocks.num_shareable(request)
        if prefix.num_blocks >= most or (leader := draft.filling.get(request.keys[prefix.num_blocks + 1])) is None:
            return False
        keys, most = leader.keys, min(most, len(leader.keys) - 1)
        # Keys chain: from the first difference on all differ.
        num_common = bisect_left(range(1, most + 1), True, key=lambda index: keys[index] != request.keys[index])
        request.behind = leader, num_common
        return True

    def _take_row(self, request: Request, prefix: Prefix, draft: Draft) -> int:
        row = self._running.admit(request, prefix)
        num_cached_tokens = prefix.num_blocks * self._configure.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
            self.num_admitted += 1
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += num_cached_tokens
        draft.add_blocks(np.full(prefix.num_blocks, row), prefix.block_ids)
        draft.admissions.append(
            Admission(
                row=row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_cached_tokens,
                params=request.params,
                seed=request.seed,
            )
        )
        return row

    def _grow(self, at: IntArray, num_new: IntArray, draft: Draft) -> bool:
        """Hold more blocks for rows; False = no room now, and nothing has changed."""
        grown = self._running.grow(at, num_new)
        if grown is not None:
            draft.add_blocks(*grown)
        return grown is not None

    def _preempt(self, draft: Draft) -> None:
        """Take the last in rank its blocks away; it waits at its rank and is computed anew, its output included."""
        request = max((request for request in self._rows.requests if request is not None), key=lambda r: r.rank)
        assert request.row is not None
        logger.info("request %s gives up its blocks and waits%s", request.request_id, trace_mark(request.traceparent))
        draft.may_admit = False
        self.num_preemptions += 1
        self._running.vacate(request.row)
        request.last_step = draft.last_step
        self.enqueue(request)
