"""What each step computes: admission, decode rows, prefill segments, preemption. Knows no clients, streams or clocks.

There are no phases: a request is scheduled until its computed tokens catch up with its tokens, generated ones included,
so that one that lost its blocks resumes like any other. Every row that decodes does so in every step; prefill has its
own budget beside it.

Two plans may be unanswered at a time. Blocks and lengths are reckoned with what is *granted*, which is what will be
computed once they land; ends, freed windows and what the cache knows of generated tokens with what is *confirmed*.
A step costs what changes in it: rows carry marks, and are looked at one by one only when they reach them.
"""

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np

from blockplane.control_plane.engine.answers import Answers
from blockplane.control_plane.engine.kv_blocks import KVBlocks, Prefix
from blockplane.control_plane.engine.prefix_cache import CacheWatcher
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.rows import Rows
from blockplane.control_plane.engine.steady import SteadyDecode
from blockplane.control_plane.engine.step import NO_ROW_SET, Draft, InFlight, RowSet, Segment, StepOutputs
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.errors import CapacityError, InvalidRequestError
from blockplane.protos.plan import NO_ROWS, Admission, Configure, IntArray, StepPlan, StepResult
from blockplane.protos.statistics import Statistics

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2


class Scheduler:
    """Decides for one worker group, from its attach to its loss. The only writer of requests and rows."""

    def __init__(
        self,
        configure: Configure,
        waiting: WaitingQueue,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        prefix_caching: bool = True,
        watcher: CacheWatcher | None = None,
    ) -> None:
        self.configure = configure
        self.blocks = KVBlocks(configure, prefix_caching=prefix_caching, watcher=watcher)
        self.rows = Rows(configure.max_num_seqs, configure.max_model_len)
        self.waiting = waiting
        self._answers = Answers(self.rows, self.blocks, waiting, vocab_size, tuple(eos_token_ids), self.end)
        self._ahead = 1 + configure.num_draft_tokens
        self._capacity = self.blocks.capacity
        self._prefilling: list[int] = []
        """Rows inside their prompts, in the order of admission: one, and those that its segment left room for."""
        self._decodes: RowSet | None = NO_ROW_SET
        """The rows that decode; None = they have changed."""
        self._steady: SteadyDecode | None = None
        """The steps since the last in which anything but decoding happened; None = there are none."""
        self._released_rows: list[int] = []
        self._num_released = 0
        self._in_flight: deque[InFlight] = deque()
        self._last = InFlight(0, NO_ROW_SET, NO_ROW_SET, None, (), 0)
        # Counted once for each request, when it first gets a row.
        self._num_admitted = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._num_preemptions = 0

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], now: float = 0.0) -> None:
        """Queue new requests, all or none.

        Raises:
            CapacityError: the queue is full, or the cache could not hold one of them even alone.
            InvalidRequestError: a prompt leaves no room for a token within max_model_len.
        """
        self.waiting.check_room(len(requests), sum(request.num_tokens for request in requests))
        for request in requests:
            self._check_fit(request)
        for request in requests:
            request.rank = self.waiting.rank(request.priority, now)
            self._enqueue(request)

    def resume(self, request: Request) -> None:
        """Queue a request that was accepted before, however long the queue is, at its old rank.

        Raises CapacityError and InvalidRequestError as `add` does.
        """
        self._check_fit(request)
        request.last_step, request.behind = 0, None
        self._enqueue(request)

    def end(self, request: Request) -> None:
        """Take a request out, wherever it is; its blocks and row are free for the next plan."""
        request.ended = True
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._leave_steady()
            self._vacate(request.row)

    def unfinished(self) -> list[Request]:
        """All live requests, without rows or blocks, as the group's loss leaves them: in the order of service."""
        self._leave_steady()
        running = [self.rows.request(row) for row in self.rows.occupied()]
        for request in running:
            assert request.row is not None
            self._vacate(request.row)
        return sorted((*running, *self.waiting), key=lambda request: request.rank)

    def renew_weights(self) -> None:
        """The model's weights are others from now on: nothing that was cached before is found again."""
        self.blocks.renew_weights()
        for request in self.waiting:
            self.blocks.enter(request)

    def statistics(self) -> Statistics:
        pool = self.blocks.pool
        return Statistics(
            num_running=self.rows.num_running,
            num_waiting=len(self.waiting),
            num_waiting_tokens=self.waiting.num_tokens,
            kv_cache_usage=1 - pool.num_free / pool.num_usable,
            num_common_prefix_blocks=tuple(self.blocks.num_common_prefix_blocks(self.rows.occupied())),
            num_admitted=self._num_admitted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=self._num_preemptions,
        )

    def _check_fit(self, request: Request) -> None:
        max_model_len = self.configure.max_model_len
        if request.num_tokens >= max_model_len:
            raise InvalidRequestError(
                f"a prompt of {request.num_tokens} tokens leaves no room in max_model_len {max_model_len}; shorten it."
            )
        if request.num_tokens > self._capacity:
            raise CapacityError(
                f"a request of {request.num_tokens} tokens needs {self.blocks.num_needed(request.num_tokens)} KV blocks"
                f" of {self.configure.block_size} tokens and the cache has {self.blocks.pool.num_usable}; shorten the"
                " prompt."
            )

    def _enqueue(self, request: Request) -> None:
        self.blocks.enter(request)
        self.waiting.put(request)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plan the next step; None = there is nothing to compute, or nothing before an answer comes."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            return None
        return self._repeat() or self._schedule(now)

    def _repeat(self) -> StepPlan | None:
        """The last plan again, where every row that decodes does so once more and nothing else is to be done."""
        steady = self._steady
        if steady is None or self._released_rows or (self.waiting and self.rows.num_free) or not steady.grant():
            return None
        decodes, step = steady.decodes, self._last.step + 1
        self._last = InFlight(step, decodes, decodes, None, (), self._num_released)
        self._in_flight.append(self._last)
        # Written out, for it is built in nearly every step.
        return StepPlan(step, NO_ROWS, (), NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, None, None)

    def _schedule(self, now: float) -> StepPlan | None:
        self._leave_steady()
        draft = Draft(self.configure.max_num_batched_tokens)
        self._schedule_decodes(draft)
        if not draft.must_wait:
            self._schedule_prefills(draft)
            if draft.may_admit and len(self.waiting):
                self._admit(draft, now)
        if draft.is_empty:
            return None
        released_rows, self._released_rows = self._released_rows, []
        plan = draft.plan(self._last.step + 1, released_rows, self._last)
        for segment in draft.prefills:
            self._close(segment)
        self._last = InFlight(
            plan.step, draft.decodes, draft.sampled(), draft.num_granted, tuple(draft.prefills), self._num_released
        )
        self._in_flight.append(self._last)
        if self._ahead == 1 and not draft.prefills:
            self._steady = SteadyDecode(self.rows, draft.decodes)
        return plan

    def update(self, result: StepResult) -> StepOutputs:
        """Fold the answer to the oldest unanswered plan in: new tokens, ends, freed windows.

        Raises:
            ProtocolError: it is no answer to that plan; nothing has changed.
        """
        plan, steady = self._in_flight[0] if self._in_flight else None, self._steady
        if plan is not None and steady is not None and self._repeats(plan, result, steady):
            self._in_flight.popleft()
            return StepOutputs(steady.owners, steady.stream_ids, result.token_ids, one_each=True)
        self._leave_steady()
        outputs = self._answers.take(plan, result, all_have_rows=plan is not None and self._all_have_rows(plan))
        self._in_flight.popleft()
        if self._ahead > 1:
            # Rows that were granted all that they may get go on if they did not get it.
            self._decodes = None
        return outputs

    def _repeats(self, plan: InFlight, result: StepResult, steady: SteadyDecode) -> bool:
        """Whether an answer brings one token to each row of the decode set and nothing else; then they have it."""
        return (
            plan.sampled is steady.decodes
            and result.step == plan.step
            and result.num_tokens is None
            and len(result.token_ids) == len(steady.decodes.requests)
            and self._all_have_rows(plan)
            and not np.count_nonzero(self._answers.may_stop(result.token_ids))
            and steady.answer(result.token_ids)
        )

    def _all_have_rows(self, plan: InFlight) -> bool:
        return plan.num_released == self._num_released

    def catch_up(self) -> None:
        """Write into the rows what is kept aside; whoever reads them by themselves asks for it first."""
        if self._steady is not None:
            self._steady.fold()

    def _leave_steady(self) -> None:
        self.catch_up()
        self._steady = None

    # -- decode --------------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, draft: Draft) -> None:
        """Grant every decoding row its next token, and drafts behind it."""
        rows, decodes = self.rows, self._decode_set()
        if not decodes.requests:
            return
        reaches_mark = rows.num_granted[decodes.rows] + self._ahead > rows.grant_mark[decodes.rows]
        if np.count_nonzero(reaches_mark):
            self._pass_marks(decodes.rows[reaches_mark], draft)
            decodes = self._decode_set()
        if self._ahead > 1:
            room = rows.grant_mark[decodes.rows] - rows.num_granted[decodes.rows]
            draft.num_granted = np.minimum(self._ahead, room).astype(np.int32)
        draft.decodes = decodes
        if not draft.must_wait:
            rows.num_granted[decodes.rows] += 1 if draft.num_granted is None else draft.num_granted

    def _decode_set(self) -> RowSet:
        if self._decodes is None:
            may_go_on = self.rows.num_granted < self.rows.final_len - 1
            rows = np.flatnonzero(self.rows.decodes & may_go_on)
            self._decodes = RowSet(rows, tuple(self.rows.request(row) for row in rows.tolist()))
        return self._decodes

    def _pass_marks(self, at_mark: IntArray, draft: Draft) -> None:
        """Find blocks for rows whose next tokens need them; who has been granted all that it may get decodes no more.

        The newest row of the lowest priority gives way where blocks run out.
        """
        rows = self.rows
        may_go_on = rows.num_granted[at_mark] < rows.final_len[at_mark] - 1
        if not may_go_on.all():
            self._decodes = None
            at_mark = at_mark[may_go_on]
        # Drafts take no blocks that a prompt may need.
        if self._grow(at_mark, self._num_missing(at_mark, 1 if self._prefilling else self._ahead), draft):
            return
        # Blocks are short: the last in rank gives way to those before it.
        for row in sorted(at_mark.tolist(), key=lambda row: rows.request(row).rank):
            at = np.array([row])
            while rows.requests[row] is not None and not self._grow(at, self._num_missing(at, 1), draft):
                if rows.num_running == 1 and self._in_flight:
                    draft.must_wait = True
                    return
                self._preempt(draft)

    def _num_missing(self, at: IntArray, num_tokens: int) -> IntArray:
        """Logical blocks that each of these rows lacks for so many more tokens, as far as it may get them."""
        target = np.minimum(self.rows.num_granted[at] + num_tokens, self.rows.final_len[at] - 1)
        missing: IntArray = -(-target // self.configure.block_size) - self.blocks.num_blocks[at]
        return np.maximum(missing, 0)

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _schedule_prefills(self, draft: Draft) -> None:
        """Continue rows inside their prompts within the budget.

        If one finds no block, the others decode, and so end; nobody is admitted meanwhile, lest newer requests take
        what comes free.
        """
        for row in tuple(self._prefilling):
            if not self._prefill(row, draft):
                draft.may_admit = False
                return

    def _prefill(self, row: int, draft: Draft) -> bool:
        """Plan a row's next segment; False = there is no room now, and nothing has changed."""
        rows, block_size = self.rows, self.configure.block_size
        start, num_known = int(rows.num_granted[row]), int(rows.num_tokens[row])
        stop = start + self._segment(num_known - start, draft.budget)
        num_held = int(self.blocks.num_blocks[row])
        if stop == start:
            return False
        if not self._grow(np.array([row]), np.array([-(-stop // block_size) - num_held]), draft):
            if rows.num_running > 1:
                return False
            # Alone it takes what there is: earlier blocks leave its windows meanwhile, or come with an answer.
            num_free = self.blocks.pool.num_free // len(self.configure.kv_cache_groups)
            stop = start + self._segment(num_known - start, (num_held + num_free) * block_size - start)
            if stop == start or not self._grow(np.array([row]), np.array([-(-stop // block_size) - num_held]), draft):
                return False
        rows.num_granted[row] = stop
        draft.budget -= stop - start
        request = rows.request(row)
        draft.prefills.append(Segment(request, row, start, stop, samples=stop == num_known))
        draft.filling.update(dict.fromkeys(request.keys[start // block_size + 1 : stop // block_size + 1], request))
        return True

    def _segment(self, num_remaining: int, budget: int) -> int:
        """Tokens of a request's next segment; 0 = the budget has no room.

        A multiple unless it reaches the request's end, so that the tokens before a segment always fill whole blocks
        (seed 001, "Block Alignment"). Without segments a prompt is computed at once or not at all.
        """
        if num_remaining <= budget:
            return num_remaining
        return budget - budget % self.configure.segment_multiple if self.configure.kv_segment_size else 0

    def _close(self, segment: Segment) -> None:
        """The plan is made: the next one may find the blocks that this one fills, and decode what it completes."""
        rows, block_size, row = self.rows, self.configure.block_size, segment.row
        first, past = segment.start // block_size, segment.stop // block_size
        tokens = rows.token_ids[row, first * block_size : past * block_size].tobytes()
        self.blocks.publish(segment.request, row, first, past, tokens)
        rows.num_published[row] = past
        if segment.samples:
            self._prefilling.remove(row)
            rows.confirm_mark[row] = min((past + 1) * block_size + 1, rows.final_len[row])
            rows.decodes[row] = True
            self._decodes = None

    # -- admission and preemption --------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, now: float) -> None:
        """Admit waiting requests in order while rows, blocks and the prefill budget last.

        A request is admitted when its known tokens fit and one block is left for each running row, whose next tokens
        may need it; what it needs beyond this step is taken when it comes to it. One whose next blocks another is
        computing waits behind it, to share them, and lets those that follow pass.
        """
        for request in self.waiting.first(self.configure.max_num_seqs):
            # A request is not admitted again while a plan that names it is unanswered.
            if not self.rows.num_free or not draft.budget or request.last_step > self._num_answered:
                return
            if self._waits_behind(request):
                continue
            prefix = self.blocks.find_prefix(request)
            if self._falls_behind(request, prefix, draft):
                continue
            num_running = self.rows.num_running
            if num_running and not self.blocks.has_room(request.num_tokens, prefix, num_running):
                return
            num_cached_tokens = prefix.num_blocks * self.configure.block_size
            num_tokens = self._segment(request.num_tokens - num_cached_tokens, draft.budget)
            if not num_tokens or (num_running and not self.blocks.fits(num_cached_tokens + num_tokens, prefix)):
                return
            self.waiting.serve(request, now)
            if not self._prefill(self._take_row(request, prefix, draft), draft):
                raise AssertionError("the segment fits, or all blocks are free")

    @property
    def _num_answered(self) -> int:
        return self._last.step - len(self._in_flight)

    def _waits_behind(self, request: Request) -> bool:
        """Whether another still computes blocks that this request will share."""
        if request.behind is None:
            return False
        leader, num_blocks = request.behind
        if leader.row is not None and self.rows.num_granted[leader.row] < num_blocks * self.configure.block_size:
            return True
        request.behind = None
        return False

    def _falls_behind(self, request: Request, prefix: Prefix, draft: Draft) -> bool:
        """Let a request wait behind whoever fills, in this very plan, the block that follows its prefix."""
        most = min(len(request.keys) - 1, (request.num_tokens - 1) // self.configure.block_size)
        if prefix.num_blocks >= most or (leader := draft.filling.get(request.keys[prefix.num_blocks + 1])) is None:
            return False
        keys, most = leader.keys, min(most, len(leader.keys) - 1)
        # Keys chain: from the first difference on all differ.
        num_common = bisect_left(range(1, most + 1), True, key=lambda index: keys[index] != request.keys[index])
        request.behind = leader, num_common
        return True

    def _take_row(self, request: Request, prefix: Prefix, draft: Draft) -> int:
        """Give a request a row of its own, behind blocks that others filled."""
        num_cached_tokens = prefix.num_blocks * self.configure.block_size
        final_len = min(
            self.configure.max_model_len, request.num_prompt_tokens + request.params.max_tokens, self._capacity + 1
        )
        row = self.rows.take(request, num_cached_tokens, final_len)
        self.blocks.take(row, prefix)
        self._answers.expect_stops(request)
        self._prefilling.append(row)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
            self._num_admitted += 1
            self._num_prompt_tokens += request.num_prompt_tokens
            self._num_cached_tokens += num_cached_tokens
        draft.block_rows.append(np.full(prefix.num_blocks, row))
        draft.block_ids.append(prefix.block_ids)
        draft.admissions.append(
            Admission(
                row=row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_cached_tokens,
                temperature=request.params.temperature,
                seed=request.seed,
            )
        )
        return row

    def _grow(self, rows: IntArray, num_new: IntArray, draft: Draft) -> bool:
        """Hold more blocks for rows; False = no room now, and nothing has changed."""
        grown = self.blocks.grow(rows, num_new)
        if grown is None:
            return False
        if grown[0].size:
            draft.block_rows.append(grown[0])
            draft.block_ids.append(grown[1])
        room = self.blocks.num_blocks[rows] * self.configure.block_size
        self.rows.grant_mark[rows] = np.minimum(room, self.rows.final_len[rows] - 1)
        return True

    def _preempt(self, draft: Draft) -> None:
        """Take the last in rank its blocks away; it waits at its rank and is computed anew, its output included."""
        request = max((request for request in self.rows.requests if request is not None), key=lambda r: r.rank)
        assert request.row is not None
        logger.info("request %s gives up its blocks and waits", request.request_id)
        draft.may_admit = False
        self._num_preemptions += 1
        self._vacate(request.row)
        request.last_step = self._last.step
        self._enqueue(request)

    def _vacate(self, row: int) -> None:
        self.blocks.vacate(row)
        if self.rows.decodes[row]:
            self._decodes = None
        if row in self._prefilling:
            self._prefilling.remove(row)
        self._answers.forget_stops(self.rows.release(row))
        self._released_rows.append(row)
        self._num_released += 1
