"""One attached worker: its scheduler, its steps in flight, and its signs of life. Knows no other group and no gRPC."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.kv_events import KVEventFeed
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.control_plane.engine.step_clock import StepClock
from blockplane.protos.errors import UnavailableError
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import Configure, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class GroupState:
    """What outlives an attach as long as the worker's process may come back with its KV.

    Attributes:
        number: the group's, among those that are known.
        hello: what the worker said of itself when it attached.
        epochs: those of the attaches whose KV the scheduler knows: nothing was computed since the first of them.
    """

    number: int
    hello: Hello
    scheduler: Scheduler
    feed: KVEventFeed
    epochs: frozenset[int] = frozenset()

    def is_kept_by(self, hello: Hello) -> bool:
        """Whether a worker of the same process still has what the scheduler believes of it."""
        return hello.last_epoch in self.epochs and hello.layers == self.hello.layers and hello.rules == self.hello.rules


class WorkerGroup:
    """From a worker's attach to its loss. The only one that asks its scheduler for plans and hands it results.

    Attributes:
        configure: what the worker is to build.
        work: set whenever there may be something to plan or to say; the worker's driver waits for it and clears it.
        is_ready: it has built what it was told.
        is_leaving: it gets no new requests; its worker wants to go.
        is_lost: nobody drives it any more.
    """

    def __init__(
        self,
        hello: Hello,
        configure: Configure,
        state: GroupState,
        step_clock: StepClock,
        *,
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`timeout_seconds`: how long the worker may be silent. `clock` counts seconds as the event loop does."""
        self.hello, self.configure = hello, configure
        self.number, self.scheduler, self.feed = state.number, state.scheduler, state.feed
        self.work = asyncio.Event()
        self.is_ready = self.is_leaving = self.is_lost = False
        self._epochs = state.epochs | {configure.epoch}
        self._step_clock, self._timeout_seconds, self._clock = step_clock, timeout_seconds, clock
        self._heard_at = self._check_due = clock()
        self._oldest_since = 0.0
        """When the oldest unanswered step became that."""

    @property
    def model(self) -> ModelInfo:
        """The model as it is served here."""
        return replace(self.hello.model, max_model_len=self.configure.max_model_len)

    @property
    def may_serve(self) -> bool:
        """Whether requests may come to it."""
        return self.is_ready and not self.is_leaving

    @property
    def has_in_flight(self) -> bool:
        return self.scheduler.num_answered < self.scheduler.last_step

    @property
    def state(self) -> GroupState:
        return GroupState(self.number, self.hello, self.scheduler, self.feed, self._epochs)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def resume(self, request: Request) -> None:
        """Serve a request from another group. Raises CapacityError and InvalidRequestError as the scheduler does."""
        self.scheduler.resume(request)
        request.group = self.number
        self.work.set()

    def next_plan(self) -> StepPlan | None:
        """The next step; None = there is nothing to compute, or nothing before an answer comes."""
        now, is_first = self._clock(), not self.has_in_flight
        plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        if is_first:
            self._oldest_since = now
        if len(self._epochs) > 1:
            self._epochs = frozenset({self.configure.epoch})
        self.feed.planned(plan.step)
        return plan

    def take_result(self, result: StepResult) -> StepOutputs | None:
        """Fold an answer in; None = it is of another attach or was there before, and nothing has changed.

        Raises:
            ProtocolError: it is no answer to the oldest unanswered plan.
        """
        is_of_another = self.hello.has_epochs and result.epoch != self.configure.epoch
        if is_of_another or result.step <= self.scheduler.num_answered:
            return None
        num_tokens, now = self.scheduler.num_tokens_of_oldest, self._clock()
        outputs = self.scheduler.update(result)
        self._step_clock.took(now - self._oldest_since, num_tokens)
        self._oldest_since = now
        self.feed.answered(result.step)
        return outputs

    # -- signs of life -------------------------------------------------------------------------------------------------

    def heard(self) -> None:
        """The worker has sent something."""
        self._heard_at = self._clock()

    def check_alive(self) -> float:
        """Returns the seconds after which it is to be asked again.

        Raises:
            UnavailableError: the worker has been silent for too long, or takes too long for a step.
        """
        now = self._clock()
        if (overslept := now - self._check_due) > self._timeout_seconds / 2:
            # Who has slept knows nothing of what others did meanwhile.
            self._heard_at, self._oldest_since = now, self._oldest_since + overslept
        silence = now - self._heard_at
        if self.hello.has_epochs and silence >= self._timeout_seconds:
            raise UnavailableError(f"worker {self.number} gave no sign of life for {silence:.1f} s.")
        if self.has_in_flight:
            self._check_step(now)
        seconds = min(self._timeout_seconds / 4, max(0.0, self._timeout_seconds - silence))
        self._check_due = now + seconds
        return seconds

    def _check_step(self, now: float) -> None:
        limit = self._step_clock.limit(self.scheduler.num_tokens_of_oldest)
        if now - self._oldest_since >= limit:
            self._step_clock.lost()
            step = self.scheduler.num_answered + 1
            raise UnavailableError(f"worker {self.number} did not answer step {step} within {limit:.1f} s.")
