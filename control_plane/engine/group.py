"""One attached worker group: its scheduler, steps in flight, and signs of life. Knows no other group, no gRPC."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from blockplane.control_plane.engine.group_counts import GroupCounts
from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.kv_events import KVEventFeed
from blockplane.control_plane.engine.live_keys import LiveKeys
from blockplane.control_plane.engine.rank import Rank
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.control_plane.engine.step_clock import StepClock
from blockplane.control_plane.engine.step_log import StepLog
from blockplane.protos.errors import ProtocolError, UnavailableError, UnsupportedError
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.statistics import Statistics
from blockplane.protos.transfer import Fetch

LEAVING, DRAINING, RELOADING = "leaving", "draining", "reloading"
"""Its worker wants to go; an operator wants it empty; its weights are to be read anew."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """What outlives an attach as long as the worker's process may come back with its KV.

    Attributes:
        number: the group's, among those that are known.
        hello: what the worker said of itself when it attached.
        configures: what each rank built, as it was planned; what differs from attach to attach is not in them.
        counts: what is counted where it is not its worker's alone.
        epochs: those of the attaches whose KV the scheduler knows: nothing was computed since the first of them.
    """

    number: int
    hello: Hello
    configures: tuple[Configure, ...]
    scheduler: Scheduler
    feed: KVEventFeed
    counts: GroupCounts
    steps: StepLog
    epochs: frozenset[int] = frozenset()

    def statistics(self) -> Statistics:
        return replace(self.scheduler.statistics(), **self.steps.totals())

    def is_kept_by(self, hello: Hello) -> bool:
        """Whether a worker of the same process still has what the scheduler believes of it."""
        has_same_weights = hello.weight_epoch == self.hello.weight_epoch and hello.has_weights_of(self.hello)
        is_built_alike = hello.layers == self.hello.layers and hello.rules == self.hello.rules
        return hello.last_epoch in self.epochs and has_same_weights and is_built_alike


class WorkerGroup:
    """From a worker's attach to its loss. The only one that asks its scheduler for plans and hands it results.

    Of several ranks, rank 0 is the worker that is spoken of here; the others compute along.

    Attributes:
        name: what its ranks call it; empty = it has one, which has no name.
        ranks: in their order.
        configure: what the worker is to build.
        work: set whenever there may be something to plan or to say; the worker's driver waits for it and clears it.
        is_ready: it has built what it was told, every rank of it.
        emptied_for: why it gets no new requests and those that it has are to go: LEAVING, DRAINING, RELOADING.
        may_finish: what has begun there may end there; False = it goes on elsewhere or waits, with whatever weights.
        is_lost: nobody drives it any more.
        answered_at: when its last answer came.
        live_keys, last_turn: of its requests, and when it last got one that shared nothing.
        num_transfers: of requests whose blocks are read here, or are to stand here; written by `Transfers`.
        reload_failure: why its worker kept its weights when it was last told to read them anew; empty = it did not.
    """

    def __init__(
        self,
        hello: Hello,
        ranks: tuple[Rank, ...],
        state: GroupState,
        step_clock: StepClock,
        *,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        """`ranks` know what they are to build. `clock` counts seconds as the event loop does."""
        self.hello, self.ranks, self.name = hello, ranks, name
        configure = ranks[0].configure
        assert configure is not None
        self.configure = configure
        self._configures = state.configures
        self.number, self.scheduler, self.feed = state.number, state.scheduler, state.feed
        self.steps, self._counts = state.steps, state.counts
        self.steps.begin_attach()
        self.work = ranks[0].work
        self.is_ready = self.is_lost = False
        self.emptied_for: set[str] = set()
        self.live_keys, self.last_turn = LiveKeys(), 0
        self.num_transfers = 0
        self.may_finish = True
        self.reload_failure = ""
        self._reload_from: str | None = None
        """What the worker is to be told."""
        self._is_loading = False
        self._epochs = state.epochs | {configure.epoch}
        self._step_clock, self._clock = step_clock, clock
        self._attached_at = clock()
        self.answered_at = self._oldest_since = 0.0
        """When the oldest unanswered step became that."""

    @property
    def peer(self) -> str:
        """Whence the worker's stream comes, as gRPC names peers."""
        return self.ranks[0].peer

    @property
    def model(self) -> ModelInfo:
        """The model as it is served here."""
        return replace(self.hello.model, max_model_len=self.configure.max_model_len)

    @property
    def may_serve(self) -> bool:
        """Whether requests may come to it."""
        return self.is_ready and not self.emptied_for

    @property
    def is_leaving(self) -> bool:
        return LEAVING in self.emptied_for

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left for its worker to do."""
        return not self.has_in_flight and not self.scheduler.num_unfinished and not self.num_transfers

    @property
    def condition(self) -> str:
        """One word for operators."""
        if not self.is_ready and not self.is_leaving:
            return "building"
        return next((reason for reason in (LEAVING, RELOADING, DRAINING) if reason in self.emptied_for), "ready")

    @property
    def attached_seconds(self) -> float:
        return self._clock() - self._attached_at

    def can_serve(self, request: Request) -> bool:
        """Whether its worker knows all that a request asks for."""
        return request.params.structured is None or self.hello.enforces_structure

    def goes_on_with(self, request: Request) -> bool:
        """Whether it has the weights that the request's output was computed with, if it has any."""
        known = {request.weights, self.hello.model_fingerprint} - {b""}
        return not request.has_begun or len(known) < 2

    def check_can_serve(self, request: Request) -> None:
        """Raise UnsupportedError unless its worker knows all that a request asks for."""
        if not self.can_serve(request):
            raise UnsupportedError(
                "no worker that is attached knows structured output; upgrade the workers, and set their"
                " structured_output to on."
            )

    @property
    def has_in_flight(self) -> bool:
        return self.scheduler.num_answered < self.scheduler.last_step

    @property
    def state(self) -> GroupState:
        return GroupState(
            self.number,
            self.hello,
            self._configures,
            self.scheduler,
            self.feed,
            self._counts,
            self.steps,
            self._epochs,
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def resume(self, request: Request) -> None:
        """Serve a request from another group.

        Raises:
            CapacityError, InvalidRequestError: as the scheduler says.
            UnsupportedError: its worker cannot.
        """
        self.check_can_serve(request)
        self.scheduler.resume(request)
        request.group = self.number
        self.work.set()

    def next_plan(self) -> StepPlan | None:
        """The next step; None = there is nothing to compute, or nothing before an answer comes."""
        now, is_first = self._clock(), not self.has_in_flight
        has_idled = is_first and self.scheduler.rows.num_running > 0
        plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        if is_first:
            self._oldest_since = now
        if len(self._epochs) > 1:
            self._epochs = frozenset({self.configure.epoch})
        self.feed.planned(plan.step)
        self.steps.scheduled(plan, now, has_idled)
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
        self._counts.num_output_tokens += len(outputs.token_ids)
        self._step_clock.took(now - self._oldest_since, num_tokens)
        self._oldest_since = self.answered_at = now
        self.feed.answered(result.step)
        return outputs

    def begin_fetch(self, fetch: Fetch) -> None:
        """Have each rank's worker told to read its part of some blocks."""
        for rank in self.ranks:
            rank.fetches.append(fetch)
            rank.work.set()

    # -- other weights -------------------------------------------------------------------------------------------------

    def begin_reload(self, model: str) -> None:
        """Have its worker told to read its weights from `model`, empty = where it did before. The group is empty."""
        self._reload_from, self._is_loading, self.reload_failure = model, True, ""
        # Should the worker be lost before it answers, nobody knows which weights made what is cached.
        self._epochs = frozenset()
        self.work.set()

    def take_reload(self) -> str | None:
        """What its worker is to be told now, once; None = nothing."""
        model, self._reload_from = self._reload_from, None
        return model

    def end_reload(self, model_fingerprint: bytes, failure: str) -> None:
        """The worker has other weights, and nothing that was cached is found again; or it has kept those it had.

        Raises:
            ProtocolError: it was not told to.
        """
        if not self._is_loading:
            raise ProtocolError(
                "the worker has read weights anew that nobody asked it for; run the same version on both."
            )
        self._is_loading, self.reload_failure = False, failure
        self._epochs = frozenset({self.configure.epoch})
        if failure:
            return
        self.hello = replace(self.hello, model_fingerprint=model_fingerprint, weight_epoch=self.hello.weight_epoch + 1)
        self.scheduler.renew_weights(model_fingerprint)
        self.feed.release()

    # -- signs of life -------------------------------------------------------------------------------------------------

    def check_alive(self) -> float:
        """Returns the seconds after which it is to be asked again.

        Raises:
            UnavailableError: the worker has been silent for too long, or takes too long for a step.
        """
        seconds, overslept = self.ranks[0].signs.check(f"worker {self.number}")
        self._oldest_since += overslept
        if self.has_in_flight:
            self._check_step(self._clock())
        return seconds

    def _check_step(self, now: float) -> None:
        limit = self._step_clock.limit(self.scheduler.num_tokens_of_oldest)
        if now - self._oldest_since >= limit:
            self._step_clock.lost()
            step = self.scheduler.num_answered + 1
            raise UnavailableError(f"worker {self.number} did not answer step {step} within {limit:.1f} s.")
