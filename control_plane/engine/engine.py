"""The engine's state: live requests, their owners, the worker group's scheduler. Pure of gRPC; the server drives it."""

import asyncio
import logging
import secrets
from dataclasses import dataclass, replace

from blockplane.control_plane.engine.kv_planning import plan_kv_cache
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.protos.config import Config
from blockplane.protos.delivery import Ending, FrontendBatch, ServingState, Submission
from blockplane.protos.errors import AbortedError, BlockplaneError, DuplicateError, UnavailableError
from blockplane.protos.model import LayerKVSpec, ModelInfo
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import check_token_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stream:
    """Who waits for a request: a frontend's outbox and the frontend's number for the stream."""

    outbox: Outbox
    stream_id: int


class Engine:
    """Accepts requests from frontends, plans a worker group's steps, hands tokens back. All in one event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._outboxes: set[Outbox] = set()
        self._requests: dict[str, Request] = {}
        """Live requests by id. Every one of them is in the scheduler, or held while no worker is attached."""
        self._streams: dict[Stream, Request] = {}
        self._held: list[Request] = []
        self._held_model_name = ""
        self._model: ModelInfo | None = None
        self._scheduler: Scheduler | None = None
        self.work = asyncio.Event()
        """Set whenever there may be something to plan; the worker's driver waits for it and clears it."""

    # -- frontends -----------------------------------------------------------------------------------------------------

    def attach_frontend(self) -> Outbox:
        outbox = Outbox()
        outbox.put_serving(ServingState(self._model))
        outbox.flush()
        self._outboxes.add(outbox)
        return outbox

    def detach_frontend(self, outbox: Outbox) -> None:
        """Forget a frontend; nobody is left to read its streams, so they end."""
        self._outboxes.discard(outbox)
        for stream in [stream for stream in self._streams if stream.outbox is outbox]:
            self._end(self._streams[stream])

    def take_batch(self, outbox: Outbox, batch: FrontendBatch) -> None:
        """Accept, refuse and abort as a frontend says."""
        for submission in batch.submissions:
            stream = Stream(outbox, submission.stream_id)
            try:
                self._accept(stream, submission)
            except BlockplaneError as error:
                outbox.put_ending(Ending(submission.stream_id, error))
        for stream_id in batch.aborted_stream_ids:
            if (request := self._streams.get(Stream(outbox, stream_id))) is not None:
                self._end(request)
        for request_id in batch.aborted_request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._fail(request, AbortedError(f"request {request_id} was aborted by its id."))
        outbox.flush()
        self.work.set()

    def _accept(self, stream: Stream, submission: Submission) -> None:
        if self._scheduler is None or self._model is None:
            raise UnavailableError("no worker is ready; retry once the service's health is SERVING.")
        if submission.request_id in self._requests:
            raise DuplicateError(f"request id {submission.request_id!r} is live; choose another or wait for its end.")
        check_token_ids("prompt", submission.prompt_token_ids, self._model.vocab_size)
        params = submission.params
        request = Request(
            request_id=submission.request_id,
            token_ids=submission.prompt_token_ids.tolist(),
            num_prompt_tokens=len(submission.prompt_token_ids),
            params=params,
            # Drawn here, once: whatever happens to the request later, its noise stays the same.
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            owner=stream,
            cache_salt=submission.cache_salt,
        )
        self._scheduler.add(request)
        self._requests[request.request_id] = request
        self._streams[stream] = request

    # -- the worker group ----------------------------------------------------------------------------------------------

    def configure_worker(self, model: ModelInfo, layers: list[LayerKVSpec], available_memory: int) -> Configure:
        """Answer a worker's hello with what it is to build.

        Raises:
            UnavailableError: another worker is attached; this one may try again, a standby for the first.
            ConfigurationError: the settings do not fit the worker.
        """
        if self._scheduler is not None:
            raise UnavailableError("a worker is attached already, and this engine drives one at a time; try again.")
        configure = plan_kv_cache(self._config, layers, available_memory, model.max_model_len)
        self._scheduler = Scheduler(
            configure,
            model.eos_token_ids,
            self._config.max_waiting_requests,
            prefix_caching=self._config.prefix_caching == "on",
        )
        return configure

    def worker_ready(self, model: ModelInfo) -> None:
        """Serve from now on; requests that an earlier worker left behind go on first."""
        scheduler = self._active_scheduler()
        self._model = replace(model, max_model_len=scheduler.configure.max_model_len)
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
        """The worker is gone: its requests keep all they have emitted and wait for the next one."""
        if self._scheduler is None:
            return
        self._held += self._scheduler.unfinished()
        if self._model is not None:
            self._held_model_name = self._model.name
        self._scheduler, self._model = None, None
        self._announce(ServingState(None))
        if self._held:
            logger.warning("the worker left; %d requests wait for its return", len(self._held))

    def next_plan(self) -> StepPlan | None:
        return self._active_scheduler().schedule()

    def take_result(self, result: StepResult) -> None:
        """Fold a step's answer in and put what clients are to get into the outboxes, unflushed."""
        for progress in self._active_scheduler().update(result):
            stream: Stream = progress.request.owner
            if progress.token_id is not None:
                stream.outbox.put_token(stream.stream_id, progress.token_id)
            if progress.outcome is not None:
                num_cached_tokens = progress.request.num_cached_tokens or 0
                stream.outbox.put_ending(Ending(stream.stream_id, progress.outcome, num_cached_tokens))
                self._forget(progress.request)

    def flush(self) -> None:
        for outbox in self._outboxes:
            outbox.flush()

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: BlockplaneError) -> None:
        stream: Stream = request.owner
        stream.outbox.put_ending(Ending(stream.stream_id, error))
        stream.outbox.flush()
        self._end(request)

    def _end(self, request: Request) -> None:
        if request in self._held:
            self._held.remove(request)
            request.ended = True
        elif self._scheduler is not None and not request.ended:
            self._scheduler.end(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        del self._streams[request.owner]

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _announce(self, serving: ServingState) -> None:
        for outbox in self._outboxes:
            outbox.put_serving(serving)
            outbox.flush()

    def _active_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "a worker is attached"
        return self._scheduler
