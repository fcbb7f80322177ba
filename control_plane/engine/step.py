"""One step as the scheduler sees it: its draft, what is remembered until the answer, and what the answer gives.

Knows no rule of scheduling.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from blockplane.control_plane.engine.request import Request
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs import Logprobs, join_told
from blockplane.protos.plan import NO_ROWS, Admission, Int32Array, IntArray, StepPlan


class RowSet(NamedTuple):
    """Rows and, in the same order, the requests that hold them. An answer goes by it, never to a row's next request."""

    rows: IntArray
    requests: tuple[Request, ...]


NO_ROW_SET = RowSet(NO_ROWS, ())


class Segment(NamedTuple):
    """A request's tokens `start` to `stop` - 1 in one prefill; it samples where they reach the last known token."""

    request: Request
    row: int
    start: int
    stop: int
    samples: bool

    @property
    def num_told(self) -> int:
        """How many prompt tokens its answer tells of: those that follow one which it computes, if the request asks."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.stop, self.request.num_prompt_tokens - 1) - self.start)


@dataclass(slots=True)
class Draft:
    """A plan in the making.

    Attributes:
        budget: tokens of the prefill bucket that are left.
        last_step, num_answered: the step planned before, and how many have their answers.
        decodes: rows that decode. num_granted: tokens that each may compute; None = 1.
        filling: by key, who fills a block in this step, so that others wait for it instead of filling their own.
        may_admit: nobody may take blocks that a running row lacks.
        must_wait: blocks that the only running row needs come free with an answer in flight, or with a lease's end.
    """

    budget: int
    last_step: int
    num_answered: int
    decodes: RowSet = NO_ROW_SET
    num_granted: Int32Array | None = None
    prefills: list[Segment] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    block_rows: list[IntArray] = field(default_factory=list)
    block_ids: list[Int32Array] = field(default_factory=list)
    filling: dict[bytes, Request] = field(default_factory=dict)
    may_admit: bool = True
    must_wait: bool = False

    @property
    def is_empty(self) -> bool:
        return self.must_wait or not (self.decodes.requests or self.prefills)

    def add_blocks(self, rows: IntArray, block_ids: Int32Array) -> None:
        """Per new logical block its row, and its ids, [num_blocks, num_groups]."""
        if rows.size:
            self.block_rows.append(rows)
            self.block_ids.append(block_ids)

    def plan(self, released_rows: list[int], last: "InFlight") -> StepPlan:
        """The plan in columns; what equals the plan before is left out."""
        same_rows = self.decodes is last.decodes or np.array_equal(self.decodes.rows, last.decodes.rows)
        granted, before = self.num_granted, last.num_granted
        same_grants = granted is None or (same_rows and before is not None and np.array_equal(granted, before))
        prefills = self.prefills
        return StepPlan(
            self.last_step + 1,
            np.array(released_rows, np.int32) if released_rows else NO_ROWS,
            tuple(self.admissions),
            _joined(self.block_rows),
            _joined(self.block_ids),
            np.array([segment.row for segment in prefills], np.int32) if prefills else NO_ROWS,
            np.array([segment.stop - segment.start for segment in prefills], np.int32) if prefills else NO_ROWS,
            None if same_rows else self.decodes.rows.astype(np.int32),
            None if same_grants else granted,
        )

    def sampled(self) -> RowSet:
        """The rows that get tokens, in the order of the answer."""
        sampling = [segment for segment in self.prefills if segment.samples]
        if not sampling:
            return self.decodes
        rows = np.array([segment.row for segment in sampling])
        requests = tuple(segment.request for segment in sampling)
        return RowSet(np.concatenate((self.decodes.rows, rows)), self.decodes.requests + requests)


class InFlight(NamedTuple):
    """What a plan's answer will be for.

    `sampled` are the decode rows, then the prefilled ones that sample. `num_released`: how many rows had ever been
    released when it was planned; as long as there are no more, every request still has its row.
    """

    step: int
    decodes: RowSet
    sampled: RowSet
    num_granted: Int32Array | None
    prefills: tuple[Segment, ...]
    num_released: int

    def requests(self) -> tuple[Request, ...]:
        """Whom the step computes for; one that is prefilled to its end is named twice."""
        return (*self.sampled.requests, *(segment.request for segment in self.prefills))

    def num_tokens(self) -> int:
        """How many tokens it computes, at most."""
        num_granted = len(self.decodes.requests) if self.num_granted is None else int(self.num_granted.sum())
        return num_granted + sum(segment.stop - segment.start for segment in self.prefills)


class Finished(NamedTuple):
    """A request's end: by itself, with a reason, or by an error."""

    request: Request
    outcome: FinishReason | BlockplaneError


class ToldPrompt(NamedTuple):
    """What an answer tells of a request's next prompt tokens."""

    request: Request
    logprobs: Logprobs


class StepOutputs(NamedTuple):
    """What a step's answer gives to whoever submitted the requests: per new token its request's owner and stream, int32
    [num_new_tokens] each, a request's tokens in order; and the requests that ended with it. `one_each`: no request got
    more than one. `logprobs`: of the new tokens, None = nobody asks; `told_prompts` come before them.
    """

    owners: Int32Array
    stream_ids: Int32Array
    token_ids: Int32Array
    one_each: bool = False
    finished: tuple[Finished, ...] = ()
    logprobs: Logprobs | None = None
    told_prompts: tuple[ToldPrompt, ...] = ()

    def ending(self, finished: list[Finished], num_dropped: list[int]) -> "StepOutputs":
        """The same with these ends; of each one's tokens the last few come after its end and are dropped."""
        is_kept = np.ones(len(self.token_ids), bool)
        for end, num in zip(finished, num_dropped, strict=True):
            if num:
                request = end.request
                own = np.flatnonzero((self.stream_ids == request.stream_id) & (self.owners == request.owner))
                is_kept[own[len(own) - num :]] = False
        return self._take(np.flatnonzero(is_kept))._replace(finished=tuple(finished))

    def of(self, owner: int) -> "StepOutputs":
        """The same without the tokens of others' requests."""
        return self._take(np.flatnonzero(self.owners == owner))

    def _take(self, tokens: IntArray) -> "StepOutputs":
        return self._replace(
            owners=self.owners[tokens],
            stream_ids=self.stream_ids[tokens],
            token_ids=self.token_ids[tokens],
            logprobs=None if self.logprobs is None else self.logprobs.take(tokens),
        )

    def beside(self, other: "StepOutputs") -> "StepOutputs":
        """These and those of other requests."""
        return StepOutputs(
            np.concatenate((self.owners, other.owners)),
            np.concatenate((self.stream_ids, other.stream_ids)),
            np.concatenate((self.token_ids, other.token_ids)),
            self.one_each and other.one_each,
            self.finished + other.finished,
            join_told([(len(outputs.token_ids), outputs.logprobs) for outputs in (self, other)]),
        )


NO_OUTPUTS = StepOutputs(NO_ROWS, NO_ROWS, NO_ROWS)


def _joined(columns: list[Any]) -> Int32Array:
    return np.concatenate([column.ravel() for column in columns]).astype(np.int32) if columns else NO_ROWS
