"""The engine's state: live requests, their owners, the worker group's scheduler. Pure of gRPC; the server drives it."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from blockplane.control_plane.engine.deadlines import Deadlines
from blockplane.control_plane.engine.kv_events import KVEventFeed, KVWatcher
from blockplane.control_plane.engine.kv_planning import RankKV, plan_kv_cache
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.buckets import BucketRules
from blockplane.protos.config import Config
from blockplane.protos.delivery import Ending, FrontendBatch, PromptLogprobs, ServingState, Submission
from blockplane.protos.errors import (
    AbortedError,
    BlockplaneError,
    DeadlineError,
    DuplicateError,
    InvalidRequestError,
    UnavailableError,
)
from blockplane.protos.finish import FinishReason
from blockplane.protos.model import LayerKVSpec, ModelInfo
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import MAX_SAMPLES, check_sampling_params, check_token_ids
from blockplane.protos.statistics import Statistics

logger = logging.getLogger(__name__)


class Engine:
    """Accepts requests from frontends, plans a worker group's steps, hands tokens back. All in one event loop."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds as the event loop does."""
        self._config = config
        self._clock = clock
        self._outboxes: dict[int, Outbox] = {}
        """By owner: every frontend gets a number of its own when it attaches."""
        self._num_owners = 0
        self._requests: dict[str, list[Request]] = {}
        """Live requests by id; several where one prompt has several samples. All are in the scheduler, or held."""
        self._streams: dict[tuple[int, int], Request] = {}
        """The same by owner and stream."""
        self._held: list[Request] = []
        """Those that the last worker left behind, until the next one comes."""
        self._held_model_name = ""
        self._stop_holding: asyncio.TimerHandle | None = None
        """Armed when the first of them was left; a worker that comes and fails does not put it off."""
        self._deadlines = Deadlines()
        self._next_deadline: asyncio.TimerHandle | None = None
        self._model: ModelInfo | None = None
        self._scheduler: Scheduler | None = None
        self._feed: KVEventFeed | None = None
        self._watchers: set[KVWatcher] = set()
        self.work = asyncio.Event()
        """Set whenever there may be something to plan; the worker's driver waits for it and clears it."""

    # -- frontends -----------------------------------------------------------------------------------------------------

    def attach_frontend(self) -> int:
        """Returns the frontend's number, which its outbox and batches go by."""
        owner, self._num_owners = self._num_owners, self._num_owners + 1
        outbox = self._outboxes[owner] = Outbox()
        outbox.put_serving(ServingState(self._model))
        outbox.flush()
        return owner

    def outbox(self, owner: int) -> Outbox:
        return self._outboxes[owner]

    def detach_frontend(self, owner: int) -> None:
        """Forget a frontend; nobody is left to read its streams, so they end."""
        for request in [request for request in self._streams.values() if request.owner == owner]:
            self._end(request)
        del self._outboxes[owner]

    def take_batch(self, owner: int, batch: FrontendBatch) -> None:
        """Accept, refuse and abort as a frontend says."""
        for submission in batch.submissions:
            try:
                self._accept(owner, submission)
            except BlockplaneError as error:
                for index in range(submission.num_samples):
                    self._outboxes[owner].put_ending(Ending(submission.stream_id + index, error))
        for stream_id in batch.aborted_stream_ids:
            if (request := self._streams.get((owner, stream_id))) is not None:
                self._fail(request, AbortedError("its frontend asked for the stream's end."))
        for request_id in batch.aborted_request_ids:
            for request in tuple(self._requests.get(request_id, ())):
                self._fail(request, AbortedError(f"request {request_id} was aborted by its id."))
        self._outboxes[owner].flush()
        self.work.set()

    def _accept(self, owner: int, submission: Submission) -> None:
        if self._scheduler is None or self._model is None:
            raise UnavailableError("no worker is ready; retry once the service's health is SERVING.")
        if submission.request_id in self._requests:
            raise DuplicateError(f"request id {submission.request_id!r} is live; choose another or wait for its end.")
        if not 1 <= submission.num_samples <= MAX_SAMPLES:
            raise InvalidRequestError(f"{submission.num_samples} samples are asked for; ask for 1 to {MAX_SAMPLES}.")
        if not submission.prompt_token_ids.size:
            raise InvalidRequestError("the prompt holds no token; send at least one.")
        check_token_ids("prompt", submission.prompt_token_ids, self._model.vocab_size)
        check_sampling_params(submission.params, self._model.vocab_size)
        now = self._clock()
        requests = _samples(owner, submission)
        self._scheduler.add(requests, now)
        self._requests[submission.request_id] = requests
        for request in requests:
            self._streams[owner, request.stream_id] = request
            if submission.timeout_seconds is not None:
                self._deadlines.set(request, now + submission.timeout_seconds)
        self._arm_deadline()

    # -- the worker group ----------------------------------------------------------------------------------------------

    def configure_worker(
        self, model: ModelInfo, layers: Sequence[LayerKVSpec], available_memory: int, rules: BucketRules
    ) -> Configure:
        """Answer a worker's hello with what it is to build.

        Raises:
            UnavailableError: another worker is attached; this one may try again, a standby for the first.
            ConfigurationError: the settings do not fit the worker.
        """
        if self._scheduler is not None:
            raise UnavailableError("a worker is attached already, and this engine drives one at a time; try again.")
        config = self._config
        ranks = [RankKV(tuple(layers), available_memory)]
        (configure,) = plan_kv_cache(config, ranks, rules, model.max_model_len)
        self._feed = KVEventFeed(configure.block_size, self._watchers)
        self._scheduler = Scheduler(
            configure,
            WaitingQueue(config.max_waiting_requests, config.max_waiting_tokens, config.priority_seconds),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            prefix_caching=config.prefix_caching == "on",
            watcher=self._feed,
        )
        return configure

    def worker_ready(self, model: ModelInfo) -> None:
        """Serve from now on; requests that an earlier worker left behind go on first."""
        scheduler = self._active_scheduler()
        self._model = replace(model, max_model_len=scheduler.configure.max_model_len)
        if self._stop_holding is not None:
            self._stop_holding.cancel()
            self._stop_holding = None
        held, self._held = self._held, []
        for request in held:
            try:
                if model.name != self._held_model_name:
                    raise UnavailableError(f"the model {self._held_model_name} is no longer served; {model.name} is.")
                scheduler.resume(request)
            except BlockplaneError as error:
                # Neither held any more nor queued: there is nothing to take it out of.
                request.ended = True
                self._fail(request, error)
        self._announce(ServingState(self._model))
        self.work.set()

    def detach_worker(self) -> None:
        """The worker is gone: its requests keep all they have emitted and wait for the next one, up to a limit."""
        if self._scheduler is None or self._feed is None:
            return
        self._held += self._scheduler.unfinished()
        self._feed.close()
        if self._model is not None:
            self._held_model_name = self._model.name
        self._scheduler, self._model, self._feed = None, None, None
        self._announce(ServingState(None))
        if self._held and self._stop_holding is None:
            logger.warning("the worker left; %d requests wait for its return", len(self._held))
            loop, seconds = asyncio.get_running_loop(), self._config.max_queue_seconds
            self._stop_holding = loop.call_later(seconds, self._give_up_held)

    def _give_up_held(self) -> None:
        seconds, self._stop_holding = self._config.max_queue_seconds, None
        for request in tuple(self._held):
            self._fail(request, UnavailableError(f"no worker came back within {seconds} s; send the request again."))

    def next_plan(self) -> StepPlan | None:
        plan = self._active_scheduler().schedule(self._clock())
        if plan is not None and self._feed is not None:
            self._feed.planned(plan.step)
        return plan

    def take_result(self, result: StepResult) -> None:
        """Fold a step's answer in and put what clients are to get into the outboxes, unflushed."""
        outputs = self._active_scheduler().update(result)
        if self._feed is not None:
            self._feed.answered(result.step)
        for request, told in outputs.told_prompts:
            self._outboxes[request.owner].put_prompt_logprobs(PromptLogprobs(request.stream_id, told))
        for owner, outbox in self._outboxes.items():
            own = outputs if len(self._outboxes) == 1 else outputs.of(owner)
            outbox.put_tokens(own.stream_ids, own.token_ids, own.logprobs, one_each=own.one_each)
        for end in outputs.finished:
            self._put_ending(end.request, end.outcome)
            self._forget(end.request)

    def flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()

    # -- the prefix cache's watchers -----------------------------------------------------------------------------------

    def watch(self) -> KVWatcher:
        """Tell somebody what is cached, and from now on what changes."""
        watcher = KVWatcher()
        self._watchers.add(watcher)
        if self._feed is not None:
            watcher.put(self._feed.snapshot())
        return watcher

    def unwatch(self, watcher: KVWatcher) -> None:
        self._watchers.discard(watcher)

    def reset_prefix_cache(self) -> None:
        """Let no block be found that was cached before. Raises UnavailableError while no worker is attached."""
        if self._scheduler is None or self._feed is None:
            raise UnavailableError("no worker is attached, so nothing is cached.")
        self._scheduler.blocks.cache.reset()
        self._feed.release()

    def statistics(self) -> Statistics:
        """Raises UnavailableError while no worker is attached."""
        if self._scheduler is None:
            raise UnavailableError("no worker is attached, so there is nothing to tell.")
        return self._scheduler.statistics()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _arm_deadline(self) -> None:
        """Have `_end_overdue` called when the next request is overdue."""
        if self._next_deadline is not None:
            self._next_deadline.cancel()
        if (earliest := self._deadlines.earliest) is not None:
            delay = max(0.0, earliest - self._clock())
            self._next_deadline = asyncio.get_running_loop().call_later(delay, self._end_overdue)

    def _end_overdue(self) -> None:
        for request in self._deadlines.pop_overdue(self._clock()):
            self._fail(request, DeadlineError("the request's deadline passed before its end; allow more time."))
        self.work.set()
        self._arm_deadline()

    def _fail(self, request: Request, error: BlockplaneError) -> None:
        self._put_ending(request, error)
        self._outboxes[request.owner].flush()
        self._end(request)

    def _put_ending(self, request: Request, outcome: FinishReason | BlockplaneError) -> None:
        self._outboxes[request.owner].put_ending(Ending(request.stream_id, outcome, request.num_cached_tokens or 0))

    def _end(self, request: Request) -> None:
        if request in self._held:
            self._held.remove(request)
            request.ended = True
        elif self._scheduler is not None and not request.ended:
            self._scheduler.end(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._streams[request.owner, request.stream_id]
        family = self._requests[request.request_id]
        family.remove(request)
        if not family:
            del self._requests[request.request_id]

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _announce(self, serving: ServingState) -> None:
        for outbox in self._outboxes.values():
            outbox.put_serving(serving)
            outbox.flush()

    def _active_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "a worker is attached"
        return self._scheduler


def _samples(owner: int, submission: Submission) -> list[Request]:
    """A submission's requests: the first leads, the others share the blocks of its prompt through the prefix cache.

    The first tells of the prompt too, if that is asked for.
    """
    params = submission.params
    # Drawn here, once: whatever happens to the request later, its noise stays the same.
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return [
        Request(
            request_id=submission.request_id,
            token_ids=submission.prompt_token_ids,
            num_prompt_tokens=len(submission.prompt_token_ids),
            params=params if index == 0 else replace(params, prompt_logprobs=None),
            seed=_sample_seed(seed, index),
            owner=owner,
            stream_id=submission.stream_id + index,
            priority=submission.priority,
            cache_salt=submission.cache_salt,
            skip_prefix_cache=submission.skip_prefix_cache,
        )
        for index in range(submission.num_samples)
    ]


def _sample_seed(seed: int, index: int) -> int:
    """The seed of a prompt's sample of that index; unrelated ones, though the first is the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
