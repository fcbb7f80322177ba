"""The engine's state: live requests, their owners, the groups that serve them. Pure of gRPC; the server drives it."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from blockplane.control_plane.engine.deadlines import Deadlines
from blockplane.control_plane.engine.deliveries import Deliveries
from blockplane.control_plane.engine.drains import Drains
from blockplane.control_plane.engine.group import LEAVING, WorkerGroup
from blockplane.control_plane.engine.groups import Groups
from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.journal import Journal
from blockplane.control_plane.engine.journaling import Journaling
from blockplane.control_plane.engine.kv_events import KVWatcher
from blockplane.control_plane.engine.metrics import engine_metrics
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.control_plane.engine.placement import Placement
from blockplane.control_plane.engine.rank import Rank
from blockplane.control_plane.engine.rank_meeting import RankMeetings
from blockplane.control_plane.engine.reloads import Reloads
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.resumptions import Resumptions
from blockplane.control_plane.engine.samples import check_submission, samples_of, seeded
from blockplane.control_plane.engine.step import NO_OUTPUTS, Finished, StepOutputs
from blockplane.control_plane.engine.step_log import StepLog
from blockplane.protos.config import Config
from blockplane.protos.delivery import FrontendBatch, ServingState, Submission
from blockplane.protos.errors import (
    AbortedError,
    BlockplaneError,
    DeadlineError,
    DuplicateError,
    UnavailableError,
)
from blockplane.protos.metric_families import MetricFamilies
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.statistics import EngineStatistics

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.05


class Engine:
    """Accepts requests from frontends, has worker groups compute them, hands tokens back. All in one event loop.

    Attributes:
        meetings: where workers come in, and their ranks wait for each other.
        drains, reloads: what operators have done to worker groups.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds as the event loop does."""
        self._config = config
        self._clock = clock
        self._deliveries = Deliveries()
        self._requests: dict[str, list[Request]] = {}
        """Live requests by id; several where one prompt has several samples. All are placed."""
        self._streams: dict[tuple[int, int], Request] = {}
        """The same by owner and stream."""
        self._deadlines = Deadlines(clock, self._overdue)
        self._groups = Groups(config, clock)
        self._placement = Placement(
            self._groups,
            config.max_queue_seconds,
            self._fail,
            config.max_imbalance_percent,
            clock=clock,
            transfer_seconds=config.transfer_seconds,
        )
        self.meetings = RankMeetings(config, clock, self.detach_worker)
        self.drains = Drains(self._groups, self._placement, self._announce)
        self.reloads = Reloads(self._groups, self._placement, self._announce, config.drain_seconds)
        self._announced: ModelInfo | None = None
        self._is_draining = False
        self._journaling: Journaling | None = None
        if config.journal:
            self._open_journal()
        self._resumptions = Resumptions(
            self._journaling, self._deliveries, self._streams, self._placement.unpark, self._fail
        )

    # -- frontends -----------------------------------------------------------------------------------------------------

    def attach_frontend(self) -> int:
        """Returns the frontend's number, which its outbox and batches go by."""
        owner = self._deliveries.attach()
        self._deliveries[owner].put_serving(ServingState(self._announced))
        self._deliveries[owner].flush()
        return owner

    def outbox(self, owner: int) -> Outbox:
        return self._deliveries[owner]

    def detach_frontend(self, owner: int) -> None:
        """Forget a frontend; nobody is left to read its streams, so they end, unless the journal has them."""
        if self._journaling is not None:
            self._resumptions.leave(owner)
        else:
            for request in [request for request in self._streams.values() if request.owner == owner]:
                self._forget(request)
        self._deliveries.detach(owner)

    def take_batch(self, owner: int, batch: FrontendBatch) -> None:
        """Accept, refuse, park and abort as a frontend says."""
        for submission in batch.submissions:
            try:
                self._accept(owner, submission)
            except BlockplaneError as error:
                first = submission.stream_id
                self._deliveries.refuse(owner, range(first, first + submission.num_samples), error)
        for asked in batch.resumptions:
            self._resumptions.ask(owner, asked)
        for request in self._own(owner, batch.parked_stream_ids):
            self._placement.park(request)
        for request in self._own(owner, batch.unparked_stream_ids):
            self._placement.unpark(request)
        self._abort(owner, batch)
        self._deliveries[owner].flush()

    def _abort(self, owner: int, batch: FrontendBatch) -> None:
        for request in self._own(owner, batch.aborted_stream_ids):
            self._fail(request, AbortedError("its frontend asked for the stream's end."))
        self._resumptions.cancel(owner, batch.aborted_stream_ids)
        for request_id, caller in batch.aborts:
            for request in [each for each in self._requests.get(request_id, ()) if each.caller == caller]:
                self._fail(request, AbortedError(f"request {request_id} was aborted by its id."))

    def _own(self, owner: int, stream_ids: tuple[int, ...]) -> list[Request]:
        """A frontend's live requests among those of these streams."""
        found = (self._streams.get((owner, stream_id)) for stream_id in dict.fromkeys(stream_ids))
        return [request for request in found if request is not None]

    def _accept(self, owner: int, submission: Submission) -> None:
        if self._is_draining:
            raise UnavailableError("the engine is about to stop; retry once the service's health is SERVING.")
        if self._journaling is not None and self._journaling.failure is not None:
            raise self._journaling.failure
        if self._announced is None:
            raise UnavailableError("no worker is ready; retry once the service's health is SERVING.")
        if submission.request_id in self._requests:
            raise DuplicateError(f"request id {submission.request_id!r} is live; choose another or wait for its end.")
        check_submission(submission, self._announced.vocab_size)
        now = self._clock()
        submission = seeded(submission)
        requests = samples_of(submission, owner)
        self._placement.add(requests, now)
        self._requests[submission.request_id] = requests
        for request in requests:
            self._streams[owner, request.stream_id] = request
            if submission.timeout_seconds is not None:
                self._deadlines.set(request, now + submission.timeout_seconds)
        self._deadlines.arm()
        if self._journaling is not None:
            self._journaling.accept(submission, requests, owner, self._announced.name)

    # -- worker groups -------------------------------------------------------------------------------------------------

    def attach_worker(self, hello: Hello, ranks: tuple[Rank, ...] = (), name: str = "") -> WorkerGroup:
        """Answer a worker's hello with a group of its own; `ranks` and `name` as `Groups.attach` has them.

        Raises:
            ConfigurationError: the settings do not fit the worker, or others that are attached have another model.
        """
        if (before := self._groups.of_boot(hello.boot_id)) is not None:
            # Its stream broke, and only one side has noticed yet.
            self.detach_worker(before)
        group = self._groups.attach(hello, ranks, name, may_differ=self.reloads.expects(hello))
        self.drains.attached(group)
        return group

    def worker_ready(self, group: WorkerGroup) -> None:
        """Have it serve from now on; requests that are held go on first."""
        group.is_ready = True
        self._placement.welcome(group)
        self._announce()

    def worker_leaves(self, group: WorkerGroup) -> None:
        """It gets no new requests, and those that it has move as soon as others can take them."""
        group.emptied_for.add(LEAVING)
        self._placement.empty(group)
        self._announce()

    def detach_worker(self, group: WorkerGroup) -> None:
        """The worker is gone: its requests keep all they have emitted and go on elsewhere, or wait, up to a limit."""
        if not group.is_lost:
            self._placement.lose(group)
            self.drains.detached(group)
            self._announce()

    def next_plan(self, group: WorkerGroup) -> StepPlan | None:
        return group.next_plan() if self._placement.may_plan(group) else None

    def take_result(self, group: WorkerGroup, result: StepResult) -> None:
        """Fold a step's answer in and put what clients are to get into the outboxes, unflushed."""
        outputs = group.take_result(result)
        if outputs is None:
            self._groups.num_dropped_results += 1
            return
        self._settle(outputs, group.steps)
        group.steps.settled(result, group.answered_at)
        self._placement.answered(group, outputs)

    def blocks_fetched(self, group: WorkerGroup, rank: int, transfer_id: int, failure: str) -> None:
        """A rank of a group has read blocks of another one, or has not, for the reason that `failure` gives."""
        self._placement.transfers.fetched(group, rank, transfer_id, failure)

    def may_go(self, group: WorkerGroup) -> bool:
        """Whether a group that leaves has nothing left to do."""
        return group.is_leaving and group.is_empty

    async def drain(self) -> None:
        """Accept nothing more and wait for what lives to end, up to `drain_seconds`."""
        self._is_draining = True
        self._announce()
        give_up_at = self._clock() + self._config.drain_seconds
        while self._requests and self._clock() < give_up_at:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    # -- what becomes of requests --------------------------------------------------------------------------------------

    def _settle(self, outputs: StepOutputs, steps: StepLog | None = None) -> None:
        """Requests got tokens, or ended: the one way by which either becomes known. `steps`: whence a step's come."""
        for end in outputs.finished:
            self._forget(end.request)
        if self._journaling is None:
            self._deliveries.put(outputs)
        else:
            # Nothing reaches a client that would not outlive this process: it is delivered once it is in the file.
            self._journaling.settle(outputs, steps)

    def flush(self, steps: StepLog | None = None) -> None:
        """Let the frontends see what was put. `steps`: of which this was all."""
        self._deliveries.flush()
        if steps is not None and self._journaling is None:
            steps.delivered()

    def _fail(self, request: Request, error: BlockplaneError) -> None:
        self._settle(NO_OUTPUTS._replace(finished=(Finished(request, error),)))
        self.flush()

    def _forget(self, request: Request) -> None:
        self._placement.remove(request)
        if (reader := self._deliveries.reader(request)) is not None:
            del self._streams[reader]
        family = self._requests[request.request_id]
        family.remove(request)
        if not family:
            del self._requests[request.request_id]

    def _overdue(self, request: Request) -> None:
        self._fail(request, DeadlineError("the request's deadline passed before its end; allow more time."))

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _open_journal(self) -> None:
        """Take up what an earlier engine left behind, as if its workers were lost; nobody reads it yet."""
        journal = Journal(self._config.journal, self._config.journal_seconds)
        journaling = self._journaling = Journaling(journal, self._committed, self._journal_failed)
        self._deliveries.slots = journaling.slots
        now = self._clock()
        for restored in journaling.load():
            live = restored.live_requests(self._config.priority_seconds, now)
            self._requests[restored.submission.request_id] = [request for _, request in live]
            for sample_index, request in live:
                journaling.restore(request, restored.number, sample_index)
                if restored.seconds_left is not None:
                    self._deadlines.set(request, now + restored.seconds_left)
            self._placement.restore([request for _, request in live], restored.model_name)
        self._deadlines.arm()

    def _committed(self, outputs: StepOutputs, steps: StepLog | None) -> None:
        self._deliveries.put(outputs)
        self.flush()
        if steps is not None:
            steps.committed()

    def _journal_failed(self) -> None:
        """End what lives, without a word of what is not in the file: another engine may go on with it from there."""
        assert self._journaling is not None
        assert self._journaling.failure is not None
        for request in self._journaling.slots.requests():
            if not request.ended:
                self._forget(request)
            self._deliveries.put_ending(request, self._journaling.failure)
        self._announce()
        self.flush()

    def close(self) -> None:
        """Commit what was settled. Nothing may be asked of the engine afterwards."""
        if self._journaling is not None:
            self._journaling.close()

    # -- the rest ------------------------------------------------------------------------------------------------------

    def watch(self) -> KVWatcher:
        """Tell somebody what is cached, and from now on what changes."""
        return self._groups.watch()

    def unwatch(self, watcher: KVWatcher) -> None:
        self._groups.unwatch(watcher)

    def reset_prefix_cache(self) -> None:
        """Let no block be found that was cached before. Raises UnavailableError while no worker is attached."""
        self._groups.reset_prefix_caches()
        self._placement.transfers.distrust()

    def groups(self) -> list[WorkerGroup]:
        """Those that are attached, in the order of their numbers."""
        return sorted(self._groups, key=lambda group: group.number)

    def step_logs(self) -> dict[int, StepLog]:
        """By group."""
        return self._groups.step_logs()

    def statistics(self) -> EngineStatistics:
        placement, transfers = self._placement, self._placement.transfers
        return replace(
            self._groups.statistics(),
            num_held=placement.num_held,
            num_suspects=placement.num_suspects,
            num_transfers=transfers.num_transfers,
            num_failed_transfers=transfers.num_failed_transfers,
            num_transferred_blocks=transfers.num_transferred_blocks,
        )

    def metrics(self) -> MetricFamilies:
        """What Prometheus is told."""
        return engine_metrics(
            self._groups, self.statistics(), self._deliveries, self._journaling, self._placement.transfers
        )

    def _announce(self) -> None:
        """Tell the frontends if what is served has changed."""
        has_failed = self._journaling is not None and self._journaling.failure is not None
        model = None if self._is_draining or has_failed else self._groups.model
        if model == self._announced:
            return
        self._announced = model
        self._deliveries.put_serving(ServingState(model))
        self.flush()
