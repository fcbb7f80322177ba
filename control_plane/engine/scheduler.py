"""One worker group's scheduler, as long as its KV lives: requests come and go, plans go out, answers come in.

Two plans may be unanswered at a time. Blocks and lengths are reckoned with what is *granted*, which is what will be
computed once they land; ends, freed windows and what the cache knows of generated tokens with what is *confirmed*.
A step costs what changes in it: rows carry marks, and are looked at one by one only when they reach them. Knows no
clients, streams or clocks.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from blockplane.control_plane.engine.answers import Answers
from blockplane.control_plane.engine.kv_blocks import KVBlocks
from blockplane.control_plane.engine.planner import Planner
from blockplane.control_plane.engine.prefix_cache import CacheWatcher
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.running import Running
from blockplane.control_plane.engine.steady import SteadyDecode
from blockplane.control_plane.engine.step import NO_ROW_SET, InFlight, StepOutputs
from blockplane.control_plane.engine.stops import Stops
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.errors import CapacityError, InvalidRequestError
from blockplane.protos.plan import NO_ROWS, Configure, StepPlan, StepResult
from blockplane.protos.statistics import Statistics

MAX_IN_FLIGHT = 2


class Scheduler:
    """Decides for one worker group. With its `Planner` and `Answers` the only writer of requests and rows."""

    def __init__(
        self,
        configure: Configure,
        waiting: WaitingQueue,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        prefix_caching: bool = True,
        watcher: CacheWatcher | None = None,
        secret: bytes | None = None,
        weights: bytes = b"",
    ) -> None:
        """`watcher`, `secret` and `weights` are what `KVBlocks` says of them."""
        self.configure = configure
        self.waiting = waiting
        self.blocks = KVBlocks(
            configure, prefix_caching=prefix_caching, watcher=watcher, secret=secret, weights=weights
        )
        self._stops = Stops(vocab_size, eos_token_ids)
        self._running = Running(configure, self.blocks, self._stops)
        self.rows = self._running.rows
        self._planner = Planner(self._running, waiting)
        self._answers = Answers(self.rows, self.blocks, waiting, self._stops, self.end)
        self._steady: SteadyDecode | None = None
        """The steps since the last in which anything but decoding happened; None = there are none."""
        self._in_flight: deque[InFlight] = deque()
        self._last = InFlight(0, NO_ROW_SET, NO_ROW_SET, None, (), 0)
        self._parked: set[Request] = set()

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], now: float = 0.0) -> None:
        """Queue new requests, all or none.

        Raises:
            CapacityError: the queue is full, or the cache could not hold one of them even alone.
            InvalidRequestError: a prompt leaves no room for a token within max_model_len.
        """
        self.waiting.check_room(len(requests), sum(request.num_tokens for request in requests))
        for request in requests:
            self.check_fit(request)
        for request in requests:
            request.rank = self.waiting.rank(request.priority, now)
            self._planner.enqueue(request)

    def resume(self, request: Request) -> None:
        """Queue a request that was accepted before, however long the queue is, at its old rank.

        Raises CapacityError and InvalidRequestError as `add` does.
        """
        self.check_fit(request)
        request.last_step, request.behind = 0, None
        if request.is_parked:
            self._parked.add(request)
        else:
            self._planner.enqueue(request)

    def give_away(self, num_requests: int, *, begun_too: bool = True) -> list[Request]:
        """Take the first so many out that wait, so that others serve them; those that an answer may be for stay.

        `begun_too`: also those that have output.
        """
        answered = (request for request in self.waiting if request.last_step <= self.num_answered)
        free = [request for request in answered if begun_too or not request.has_begun][:num_requests]
        for request in free:
            self.waiting.remove(request)
        return free

    def park(self, request: Request) -> None:
        """Let a request neither run nor wait until `unpark`: it keeps its tokens and its rank, no row and no blocks.

        What it computed stays to be found as long as nobody needs the room, and steps in flight still answer for it.
        """
        if request.is_parked or request.ended:
            return
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._leave_steady()
            self._running.vacate(request.row)
            request.last_step = self._last.step
        request.is_parked = True
        self._parked.add(request)

    def unpark(self, request: Request) -> None:
        """Let a parked request wait at its rank, however long the queue is."""
        if request in self._parked:
            self._parked.remove(request)
            request.is_parked = False
            self._planner.enqueue(request)

    def hand_over(self, is_wanted: bool) -> None:
        """Whether rows are to stand once their prompts are computed, until `keep` or `give_over`; of those to come."""
        self._running.hands_over = is_wanted

    def standing(self) -> list[Request]:
        """The requests whose rows stand, with the first token behind their prompts."""
        return self._running.standing()

    def keep(self, request: Request) -> None:
        """Let a request that stands decode here."""
        assert request.row is not None
        self._leave_steady()
        self._running.decode(request.row)

    def give_over(self, request: Request) -> None:
        """Take a request that stands out, so that another group serves it; its blocks are free for the next plan."""
        assert request.row is not None
        self._leave_steady()
        self._running.vacate(request.row)

    def end(self, request: Request) -> None:
        """Take a request out, wherever it is; its blocks and row are free for the next plan."""
        request.ended = True
        if request.is_parked:
            self._parked.remove(request)
        elif request.row is None:
            self.waiting.remove(request)
        else:
            self._leave_steady()
            self._running.vacate(request.row)

    def unfinished(self) -> list[Request]:
        """Take all live requests out, as the group's loss leaves them: without rows or blocks, in order of service."""
        self._leave_steady()
        running = [self._running.vacate(row) for row in self.rows.occupied().tolist()]
        parked, self._parked = self._parked, set()
        return sorted((*running, *self.waiting.take_all(), *parked), key=lambda request: request.rank)

    def lose(self) -> tuple[list[Request], list[Request]]:
        """The worker is gone, and with it every row and the answers to what is in flight; blocks keep their content.

        What unanswered steps fill is not found any more. Step numbers go on.

        Returns:
            the live requests as `unfinished` does, and those of them that unanswered steps are for and that go on.
        """
        named = {request for plan in self._in_flight for request in plan.requests() if not request.ended}
        for plan in self._in_flight:
            for segment in plan.prefills:
                self.blocks.distrust_keys(segment.request, *self._running.filled_by(segment))
        unfinished = self.unfinished()
        self._in_flight.clear()
        self._running.take_released()
        self._last = InFlight(self._last.step, NO_ROW_SET, NO_ROW_SET, None, (), self._running.num_released)
        return unfinished, [request for request in unfinished if request in named and not request.is_parked]

    def renew_weights(self, weights: bytes = b"") -> None:
        """The model's weights are others from now on: nothing that was cached before is found again.

        `weights`: their fingerprint; empty = nobody knows it.
        """
        self.blocks.renew_weights(weights)
        for request in self.waiting:
            self.blocks.enter(request)

    @property
    def last_step(self) -> int:
        """The number of the last step that was planned."""
        return self._last.step

    @property
    def num_answered(self) -> int:
        """The number of the last step that was answered: steps are answered in order."""
        return self._last.step - len(self._in_flight)

    @property
    def num_tokens_of_oldest(self) -> int:
        """Tokens that the oldest unanswered step computes, at most; 0 = all are answered."""
        return self._in_flight[0].num_tokens() if self._in_flight else 0

    @property
    def num_unfinished(self) -> int:
        """Live requests."""
        return self.rows.num_running + len(self.waiting) + len(self._parked)

    @property
    def num_to_compute(self) -> int:
        """Tokens that are left to compute for all that run or wait, cached ones left out, as far as one can know."""
        self.catch_up()
        return self.rows.num_to_compute() + self.waiting.num_to_compute

    def statistics(self) -> Statistics:
        pool = self.blocks.pool
        return Statistics(
            num_running=self.rows.num_running,
            num_waiting=len(self.waiting),
            num_parked=len(self._parked),
            num_waiting_tokens=self.waiting.num_tokens,
            kv_cache_usage=1 - pool.num_free / pool.num_usable,
            num_common_prefix_blocks=tuple(self.blocks.num_common_prefix_blocks(self.rows.occupied())),
            num_admitted=self._planner.num_admitted,
            num_prompt_tokens=self._planner.num_prompt_tokens,
            num_cached_tokens=self._planner.num_cached_tokens,
            num_preemptions=self._planner.num_preemptions,
            num_draft_tokens=self._answers.num_draft_tokens,
            num_accepted_tokens=self._answers.num_accepted_tokens,
            num_discarded_tokens=self._answers.num_discarded_tokens,
        )

    def check_fit(self, request: Request) -> None:
        """Raise CapacityError or InvalidRequestError for what this group could not compute even alone."""
        max_model_len = self.configure.max_model_len
        if request.num_tokens >= max_model_len:
            raise InvalidRequestError(
                f"a prompt of {request.num_tokens} tokens leaves no room in max_model_len {max_model_len}; shorten it.",
                "prompt",
            )
        if request.num_tokens > self.blocks.capacity:
            raise CapacityError(
                f"a request of {request.num_tokens} tokens needs {self.blocks.num_needed(request.num_tokens)} KV blocks"
                f" of {self.configure.block_size} tokens and the cache has {self.blocks.pool.num_usable}; shorten the"
                " prompt."
            )

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plan the next step; None = there is nothing to compute, or nothing before an answer comes."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            return None
        return self._repeat() or self._schedule(now)

    def _repeat(self) -> StepPlan | None:
        """The last plan again, where every row that decodes does so once more and nothing else is to be done."""
        steady = self._steady
        if (
            steady is None
            or self._running.has_released()
            or (self.waiting and self.rows.num_free)
            or not steady.grant()
        ):
            return None
        decodes, step = steady.decodes, self._last.step + 1
        self._last = InFlight(step, decodes, decodes, None, (), self._running.num_released)
        self._in_flight.append(self._last)
        # Written out, for it is built in nearly every step.
        return StepPlan(step, NO_ROWS, (), NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, None, None)

    def _schedule(self, now: float) -> StepPlan | None:
        self._leave_steady()
        last = self._last
        draft = self._planner.draft(last.step, last.step - len(self._in_flight), now)
        if draft.is_empty:
            return None
        plan = draft.plan(self._running.take_released(), last)
        for segment in draft.prefills:
            self._running.complete(segment)
        prefills = tuple(draft.prefills)
        sampled, num_released = draft.sampled(), self._running.num_released
        self._last = InFlight(plan.step, draft.decodes, sampled, draft.num_granted, prefills, num_released)
        self._in_flight.append(self._last)
        if draft.num_granted is None and not prefills:
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
        if self.configure.num_draft_tokens:
            # Rows that were granted all that they may get go on if they did not get it.
            self._running.change_decodes()
        return outputs

    def _repeats(self, plan: InFlight, result: StepResult, steady: SteadyDecode) -> bool:
        """Whether an answer brings one token to each row of the decode set and nothing else; then they have it."""
        return (
            plan.sampled is steady.decodes
            and result.step == plan.step
            and result.num_tokens is None
            and result.logprobs is None
            and result.prompt_logprobs is None
            and len(result.token_ids) == len(steady.decodes.requests)
            and self._all_have_rows(plan)
            and not np.count_nonzero(self._stops.are_to_see(result.token_ids))
            and steady.answer(result.token_ids)
        )

    def _all_have_rows(self, plan: InFlight) -> bool:
        return plan.num_released == self._running.num_released

    def catch_up(self) -> None:
        """Write into the rows what is kept aside; whoever reads them by themselves asks for it first."""
        if self._steady is not None:
            self._steady.fold()

    def _leave_steady(self) -> None:
        self.catch_up()
        self._steady = None
