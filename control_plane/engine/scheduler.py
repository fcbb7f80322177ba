"""What each step computes: admission, decode rows, prefill segments, preemption. Knows no clients, streams or clocks.

There are no phases: a request is scheduled until its computed tokens catch up with its tokens, generated ones included,
so that one that lost its blocks resumes like any other. Every running row that needs one token decodes in every step;
prefill has its own budget beside it.
"""

import logging
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from blockplane.control_plane.engine.kv_blocks import KVBlocks
from blockplane.control_plane.engine.request import Request
from blockplane.protos.errors import (
    BlockplaneError,
    CapacityError,
    InvalidRequestError,
    ModelOutputError,
    ProtocolError,
)
from blockplane.protos.finish import FinishReason, finish_reason
from blockplane.protos.plan import Admission, Configure, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step's answer means for one request: its next token, its end, or both; `token_id` None = it failed."""

    request: Request
    token_id: int | None
    outcome: FinishReason | BlockplaneError | None


@dataclass(frozen=True, slots=True)
class _Work:
    """One request's share of a plan. The plan keeps its own snapshot, so an answer never goes to a row's next owner."""

    request: Request
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class _Draft:
    """A plan in the making. `budget`: prefill tokens that are left. `new_blocks`: (row, block id) in order."""

    budget: int
    decodes: list[_Work] = field(default_factory=list)
    prefills: list[_Work] = field(default_factory=list)
    admissions: list[Request] = field(default_factory=list)
    new_blocks: list[tuple[int, int]] = field(default_factory=list)
    may_admit: bool = True


class Scheduler:
    """Decides for one worker group, from its attach to its loss. The only writer of requests and rows."""

    def __init__(
        self,
        configure: Configure,
        eos_token_ids: tuple[int, ...],
        max_waiting_requests: int,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.configure = configure
        self.blocks = KVBlocks(configure.num_blocks, configure.block_size, prefix_caching=prefix_caching)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Requests that have a row, oldest admission first."""
        self._eos_token_ids = eos_token_ids
        self._max_waiting_requests = max_waiting_requests
        self._free_rows = list(range(configure.max_num_seqs))[::-1]
        self._released_rows: list[int] = []
        self._last_decode_rows: list[int] = []
        self._in_flight: list[_Work] | None = None
        self._step = 0

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            CapacityError: the queue is full, or the cache could not hold the request even alone.
            InvalidRequestError: the prompt leaves no room for a token within max_model_len.
        """
        if len(self.waiting) >= self._max_waiting_requests:
            raise CapacityError(f"{len(self.waiting)} requests wait already, which is the limit; retry later.")
        self.resume(request)

    def resume(self, request: Request) -> None:
        """Queue a request that was accepted before, however long the queue is; raises as `add` does."""
        max_model_len, num_blocks = self.configure.max_model_len, self.blocks.num_needed(request.num_tokens)
        if request.num_tokens >= max_model_len:
            raise InvalidRequestError(
                f"a prompt of {request.num_tokens} tokens leaves no room in max_model_len {max_model_len}; shorten it."
            )
        if num_blocks > self.blocks.pool.num_usable:
            raise CapacityError(
                f"a request of {request.num_tokens} tokens needs {num_blocks} KV blocks of {self.configure.block_size}"
                f" tokens and the cache has {self.blocks.pool.num_usable}; shorten the prompt."
            )
        self.blocks.enter(request)
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        """Take a request out, wherever it is; its blocks and row are free for the next plan."""
        request.ended = True
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._vacate(request)

    def unfinished(self) -> list[Request]:
        """All live requests without rows or blocks, as the group's loss leaves them: the longest served first."""
        for request in self.running:
            self._vacate(request)
        return [*self.running, *self.waiting]

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None = there is nothing to compute. The last plan must be answered."""
        assert self._in_flight is None, "one plan at a time"
        draft = _Draft(budget=self.configure.max_num_batched_tokens)
        self._schedule_decodes(draft)
        self._schedule_prefills(draft)
        if draft.may_admit:
            self._admit(draft)
        self.blocks.publish_filled()
        if not draft.decodes and not draft.prefills:
            return None
        self._in_flight = [*draft.decodes, *draft.prefills]
        return self._plan(draft)

    def update(self, result: StepResult) -> list[Progress]:
        """Fold a step's answer in: computed tokens, new tokens, ends.

        Raises:
            ProtocolError: the answer is not that of the plan in flight; nothing has changed.
        """
        works = self._in_flight
        if works is None or result.step != self._step:
            raise ProtocolError(f"got the result of step {result.step} while step {self._step} was the last planned.")
        num_sampled = sum(work.samples for work in works)
        if len(result.token_ids) != num_sampled:
            raise ProtocolError(f"step {result.step} sampled {num_sampled} rows; got {len(result.token_ids)} tokens.")
        self._in_flight = None
        token_ids = iter(result.token_ids.tolist())
        progress = []
        for work in works:
            token_id = next(token_ids) if work.samples else None
            if work.request.ended:
                continue
            work.request.num_computed_tokens += work.num_tokens
            if token_id is not None:
                progress.append(self._take_token(work.request, token_id))
        return progress

    def _take_token(self, request: Request, token_id: int) -> Progress:
        if token_id < 0:
            self.blocks.distrust(request)
            self.end(request)
            message = "the model's output for this request was not finite; the prompt or the weights are at fault."
            return Progress(request, None, ModelOutputError(message))
        request.token_ids.append(token_id)
        reason = finish_reason(
            token_id,
            request.num_output_tokens,
            request.num_tokens,
            request.params,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.configure.max_model_len,
            cache_capacity=self.blocks.capacity,
        )
        if reason is not None:
            self.end(request)
        return Progress(request, token_id, reason)

    # -- the parts of a plan -------------------------------------------------------------------------------------------

    def _schedule_decodes(self, draft: _Draft) -> None:
        """Give every decoding row room for its token, oldest first; the newest row gives way where blocks run out."""
        for request in [request for request in self.running if request.num_remaining_tokens == 1]:
            while request.row is not None and not self._grow(request, 1, draft):
                self._preempt(self.running[-1], draft)
            if request.row is not None:
                draft.decodes.append(_Work(request, 1, samples=True))

    def _schedule_prefills(self, draft: _Draft) -> None:
        """Continue the prefill of a running row within the budget.

        Segments are such that no more than one row stands inside its prompt. If that one finds no block, the others
        decode, and so end; nobody is admitted meanwhile, lest newer requests take what comes free.
        """
        for request in [request for request in self.running if request.num_remaining_tokens > 1]:
            num_tokens = self._segment(request, draft.budget)
            if not self._grow(request, num_tokens, draft):
                draft.may_admit = False
                return
            self._prefill(request, num_tokens, draft)

    def _admit(self, draft: _Draft) -> None:
        """Admit waiting requests in order while rows, blocks and the prefill budget last.

        A request is admitted when its known tokens fit and one block is left for each running row, whose next tokens
        may need it; what it needs beyond this step is taken when it comes to it. One whose next block this very plan
        fills for another waits for the next plan, which shares it, and lets those behind it pass.
        """
        for request in list(islice(self.waiting, self.configure.max_num_seqs)):
            if not self._free_rows or not draft.budget:
                return
            prefix = self.blocks.find_prefix(request)
            if self.blocks.is_being_filled(request, prefix):
                continue
            if self.running and not self.blocks.has_room(request, prefix, reserve=len(self.running)):
                return
            num_tokens = self._segment(request, draft.budget, len(prefix) * self.configure.block_size)
            if not num_tokens:
                return
            self.waiting.remove(request)
            self._take_row(request, prefix, draft)
            grown = self._grow(request, num_tokens, draft)
            assert grown, "there was room for the whole request"
            self._prefill(request, num_tokens, draft)

    def _take_row(self, request: Request, prefix: list[int], draft: _Draft) -> None:
        """Admit a request to a row of its own, behind blocks that others filled."""
        request.row = self._free_rows.pop()
        self.running.append(request)
        self.blocks.share(request, prefix)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        draft.new_blocks += [(request.row, block_id) for block_id in prefix]
        draft.admissions.append(request)

    def _prefill(self, request: Request, num_tokens: int, draft: _Draft) -> None:
        draft.prefills.append(_Work(request, num_tokens, samples=num_tokens == request.num_remaining_tokens))
        draft.budget -= num_tokens

    def _plan(self, draft: _Draft) -> StepPlan:
        self._step += 1
        decode_rows = [_row(work.request) for work in draft.decodes]
        changed = decode_rows != self._last_decode_rows
        self._last_decode_rows = decode_rows
        released_rows, self._released_rows = self._released_rows, []
        block_columns = np.array(draft.new_blocks, np.int32).reshape(-1, 2)
        return StepPlan(
            step=self._step,
            released_rows=np.array(released_rows, np.int32),
            admissions=tuple(_admission(request) for request in draft.admissions),
            block_rows=block_columns[:, 0],
            block_ids=block_columns[:, 1],
            prefill_rows=np.array([_row(work.request) for work in draft.prefills], np.int32),
            prefill_num_tokens=np.array([work.num_tokens for work in draft.prefills], np.int32),
            decode_rows=np.array(decode_rows, np.int32) if changed else None,
        )

    # -- blocks and rows -----------------------------------------------------------------------------------------------

    def _segment(self, request: Request, budget: int, num_cached_tokens: int = 0) -> int:
        """Tokens of the request's next segment, behind those that are computed or cached; 0 = the budget has no room.

        A multiple of block_size unless it reaches the request's end, so that the tokens before a segment always fill
        whole blocks (seed 001, "Block Alignment").
        """
        remaining = request.num_remaining_tokens - num_cached_tokens
        return remaining if remaining <= budget else budget - budget % self.configure.block_size

    def _grow(self, request: Request, num_tokens: int, draft: _Draft) -> bool:
        """Hold blocks for `num_tokens` more computed tokens; False = no room now, and nothing has changed."""
        block_ids = self.blocks.grow(request, num_tokens)
        if block_ids is None:
            return False
        self.blocks.fill(request, num_tokens)
        draft.new_blocks += [(_row(request), block_id) for block_id in block_ids]
        return True

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Take a row's blocks away; it waits at the head of the queue and is computed anew, its output included."""
        logger.info("request %s gives up its %d blocks and waits", request.request_id, len(request.block_ids))
        draft.may_admit = False
        self.running.remove(request)
        self._vacate(request)
        self.waiting.appendleft(request)

    def _vacate(self, request: Request) -> None:
        row = _row(request)
        self.blocks.vacate(request)
        self._released_rows.append(row)
        self._free_rows.append(row)
        request.row = None


def _row(request: Request) -> int:
    assert request.row is not None, "only requests with a row are in a plan"
    return request.row


def _admission(request: Request) -> Admission:
    return Admission(
        row=_row(request),
        token_ids=np.array(request.token_ids, np.int32),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        temperature=request.params.temperature,
        seed=request.seed,
    )
