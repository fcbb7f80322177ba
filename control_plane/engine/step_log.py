"""One worker group's last steps, when each of them was where, and what all took together. Knows no rows and no gRPC."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from blockplane.protos.buckets import choose_bucket
from blockplane.protos.histogram import Histogram
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.step_times import StepTimes

NUM_KEPT = 4096


class LoggedStep(NamedTuple):
    """One step that was answered. Times are seconds of the engine's clock; 0 = not yet.

    Attributes:
        num_decode_tokens: with drafts.
        num_bucket_tokens: of the buckets that its prefill and its decode are padded to.
        scheduled: the engine began to plan it. planned: its plan was handed to gRPC.
        answered, settled, delivered: the engine had its answer, had handed it to the requests, and let the frontends
            see their tokens, behind the next plan.
        times: the worker's own, on its clock; None = it does not tell.
    """

    step: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_bucket_tokens: int
    num_plan_bytes: int
    scheduled: float
    planned: float
    answered: float
    settled: float
    delivered: float
    times: StepTimes | None


_FIELDS = range(len(LoggedStep._fields))
_STEP, _PREFILL, _DECODE, _BUCKET, _BYTES, _SCHEDULED, _PLANNED, _ANSWERED, _SETTLED, _DELIVERED, _TIMES = _FIELDS
_NUM_UNCOUNTED = 256


class StepLog:
    """Told of every step's stations in their order. It lives as long as the group's cache does.

    A step costs little more than its times: it is a list of what `LoggedStep` has, first with its plan in place of the
    number and its drafts in that of the decoded tokens, until it is counted with many others.

    Attributes:
        clock: counts seconds as the event loop does.
    """

    def __init__(self, configure: Configure, clock: Callable[[], float], histogram: Histogram) -> None:
        """`configure`: its buckets. `histogram`: of each step's seconds, as they are counted."""
        self.clock = clock
        self._configure, self._histogram = configure, histogram
        self._num_steps = self._num_plan_bytes = self._num_computed_tokens = self._num_bucket_tokens = 0
        self._step_seconds = self._idle_seconds = 0.0
        self._in_flight: deque[list[Any]] = deque()
        self._uncounted: list[list[Any]] = []
        self._counted: deque[list[Any]] = deque(maxlen=NUM_KEPT)
        self._undelivered: deque[list[Any]] = deque(maxlen=NUM_KEPT)
        self._num_decode_rows = self._num_decode_bucket_tokens = 0
        """Of the last plan that was counted: the next one leaves out what is the same."""
        self._last_counted_answer = 0.0
        self._idle_since: float | None = None

    def begin_attach(self) -> None:
        """What was in flight gets no answer, and the next plan leaves nothing out."""
        self._count()
        self._in_flight.clear()
        self._num_decode_rows = self._num_decode_bucket_tokens = 0
        self._idle_since = None

    def last(self, num_steps: int = NUM_KEPT) -> list[LoggedStep]:
        """Of the steps that were answered the last ones, oldest first."""
        self._count()
        return [_logged(step) for step in list(self._counted)[-num_steps:]] if num_steps else []

    def totals(self) -> dict[str, Any]:
        """What `Statistics` has of steps, by its names."""
        self._count()
        return {
            "num_steps": self._num_steps,
            "num_plan_bytes": self._num_plan_bytes,
            "step_seconds": self._step_seconds,
            "idle_seconds": self._idle_seconds,
            "num_computed_tokens": self._num_computed_tokens,
            "num_bucket_tokens": self._num_bucket_tokens,
        }

    # -- a step's stations ---------------------------------------------------------------------------------------------

    def scheduled(self, plan: StepPlan, began: float, has_idled: bool) -> None:
        """There is a plan.

        Args:
            began: when the engine turned to it.
            has_idled: until then requests had rows, and nothing was in flight.
        """
        if not has_idled:
            self._idle_since = None
        self._in_flight.append([plan, 0, 0, 0, 0, began, began, 0.0, 0.0, 0.0, b""])

    def sent(self, num_plan_bytes: int) -> None:
        """The last plan is handed over to be sent."""
        now, step = self.clock(), self._in_flight[-1]
        step[_PLANNED], step[_BYTES] = now, num_plan_bytes
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
            self._idle_since = None

    def settled(self, result: StepResult, answered: float) -> None:
        """The oldest step in flight has its answer, since then, and what it brought is with its requests."""
        if len(self._uncounted) == _NUM_UNCOUNTED:
            self._count()
        step = self._in_flight.popleft()
        step[_DECODE], step[_TIMES] = result.num_draft_tokens, result.times
        step[_ANSWERED], step[_SETTLED] = answered, self.clock()
        self._idle_since = answered
        self._uncounted.append(step)
        self._undelivered.append(step)

    def delivered(self) -> None:
        """The frontends see what all that are settled brought."""
        undelivered = self._undelivered
        if undelivered:
            now = self.clock()
            while undelivered:
                undelivered.popleft()[_DELIVERED] = now

    def committed(self) -> None:
        """They see what the oldest of those brought, where each waits for the journal."""
        self._undelivered.popleft()[_DELIVERED] = self.clock()

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        for step in self._uncounted:
            plan, num_drafts = step[_STEP], step[_DECODE]
            if plan.decode_rows is not None:
                self._note_decodes(len(plan.decode_rows))
            num_prefill, num_bucket = 0, self._num_decode_bucket_tokens
            if plan.prefill_rows.size:
                num_prefill, num_prefill_bucket = self._prefill(plan)
                num_bucket += num_prefill_bucket
            num_decode = self._num_decode_rows + num_drafts
            step[_STEP], step[_PREFILL], step[_DECODE], step[_BUCKET] = plan.step, num_prefill, num_decode, num_bucket
            seconds = step[_ANSWERED] - max(step[_PLANNED], self._last_counted_answer)
            self._last_counted_answer = step[_ANSWERED]
            self._histogram.observe(seconds)
            self._step_seconds += seconds
            self._num_plan_bytes += step[_BYTES]
            self._num_computed_tokens += num_prefill + num_decode
            self._num_bucket_tokens += num_bucket
        self._num_steps += len(self._uncounted)
        self._counted.extend(self._uncounted)
        self._uncounted.clear()

    def _note_decodes(self, num_rows: int) -> None:
        configure = self._configure
        bucket = (choose_bucket(num_rows, configure.num_seqs_buckets) or num_rows) if num_rows else 0
        self._num_decode_rows, self._num_decode_bucket_tokens = num_rows, bucket * configure.decode_token_threshold

    def _prefill(self, plan: StepPlan) -> tuple[int, int]:
        """Tokens of its segments, and of the bucket that they are packed into."""
        num_packed = int(self._configure.num_bucket_tokens(plan.prefill_num_tokens).sum())
        bucket = choose_bucket(num_packed, self._configure.num_batched_tokens_buckets)
        return int(plan.prefill_num_tokens.sum()), num_packed if bucket is None else bucket


def _logged(step: list[Any]) -> LoggedStep:
    return LoggedStep._make((*step[:_TIMES], StepTimes.from_bytes(step[_TIMES])))
