"""What the engine writes into its journal and reads from it, in requests' terms. Knows neither groups nor outboxes."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from blockplane.control_plane.engine.journal import Journal
from blockplane.control_plane.engine.journal_entries import (
    AcceptedRequest,
    JournaledRequest,
    JournalEntry,
    SampleEnding,
    sample_number,
)
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.samples import samples_of
from blockplane.control_plane.engine.slots import Slots
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.control_plane.engine.step_log import StepLog
from blockplane.protos import delivery_wire as wire
from blockplane.protos.delivery import Ending, Resumed, Submission
from blockplane.protos.errors import UnavailableError
from blockplane.protos.plan import Int32Array
from blockplane.v1 import engine_pb2 as pb

Found: TypeAlias = "FoundRequest | UnavailableError | None"


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A request as the journal has it: what was committed is in `resumed`, one for each sample, on streams from 0 on.

    `rest`: per sample how it ended, or the live request from which the rest comes.
    """

    resumed: tuple[Resumed, ...]
    rest: tuple[Ending | Request, ...]


@dataclass(frozen=True, slots=True)
class RestoredRequest:
    """A live request of an earlier engine. `age`, `seconds_left`: how long ago it came, and its deadline if any."""

    submission: Submission
    model_name: str
    output_token_ids: tuple[Int32Array, ...]
    has_ended: tuple[bool, ...]
    number: int
    age: float
    seconds_left: float | None

    def live_requests(self, priority_seconds: float, now: float) -> list[tuple[int, Request]]:
        """The samples that have not ended, by index, with all that they have put out, at their old rank.

        Of prompts nothing is told any more: nobody knows what was told before.
        """
        submission = self.submission
        submission = replace(submission, params=replace(submission.params, prompt_logprobs=None))
        live = []
        for index, request in enumerate(samples_of(submission)):
            if not self.has_ended[index]:
                output = self.output_token_ids[index]
                request.token_ids = np.concatenate((request.token_ids, output))
                request.num_cached_tokens = 0 if output.size else None
                request.rank = now - self.age + request.priority * priority_seconds, self.number
                live.append((index, request))
        return live


class Journaling:
    """The engine's side of its journal. All callbacks come in its event loop, in the order of what they answer."""

    def __init__(
        self,
        journal: Journal,
        on_committed: Callable[[StepOutputs, StepLog | None], None],
        on_failure: Callable[[], None],
    ) -> None:
        """`on_committed` hears of what was settled once it is in the file, `on_failure` once that the file failed."""
        self.slots = Slots()
        self.failure: UnavailableError | None = None
        """Why nothing can be written any more; None = it can."""
        self._journal = journal
        self._on_committed, self._on_failure = on_committed, on_failure
        self._loop = asyncio.get_running_loop()

    @property
    def num_commits(self) -> int:
        """Of the file, so far."""
        return self._journal.num_commits

    def close(self) -> None:
        self._journal.close()

    # -- at the start --------------------------------------------------------------------------------------------------

    def load(self) -> Iterator[RestoredRequest]:
        """What lived when the last engine ended, in the order of its acceptance. Asked for once, before all else."""
        now = time.time()
        for journaled in self._journal.load():
            accepted = journaled.accepted
            yield RestoredRequest(
                _submission_of(accepted),
                accepted.model,
                journaled.output_token_ids,
                tuple(ending is not None for ending in journaled.endings),
                accepted.number,
                max(0.0, now - accepted.arrival),
                None if accepted.deadline is None else accepted.deadline - now,
            )
        self._journal.start()

    def restore(self, request: Request, number: int, sample_index: int) -> None:
        self.slots.put(request, sample_number(number, sample_index))

    # -- writing -------------------------------------------------------------------------------------------------------

    def accept(self, submission: Submission, requests: Sequence[Request], owner: int, model_name: str) -> None:
        """Note a request, which its owner reads. `submission` has the seed that was drawn for it."""
        number, now = self._journal.draw_number(), time.time()
        for index, request in enumerate(requests):
            stream_id = request.stream_id
            self.slots.put(request, sample_number(number, index))
            self.slots.set_reader(request, (owner, stream_id))
        seconds = submission.timeout_seconds
        accepted = AcceptedRequest(
            number,
            submission.request_id,
            submission.caller,
            model_name,
            wire.submission_to_proto(submission).SerializeToString(),
            len(requests),
            now,
            None if seconds is None else now + seconds,
        )
        self._write(JournalEntry((accepted,)), None)

    def settle(self, outputs: StepOutputs, steps: StepLog | None = None) -> None:
        """Note new tokens and ends; `on_committed` delivers them."""
        endings = tuple(
            SampleEnding(
                self.slots.number(request),
                wire.ending_to_proto(Ending(0, outcome, request.num_cached_tokens or 0)).SerializeToString(),
            )
            for request, outcome in outputs.finished
        )
        self._write(JournalEntry((), self.slots.numbers(outputs), outputs.token_ids, endings), outputs, steps)

    def _write(self, entry: JournalEntry, outputs: StepOutputs | None, steps: StepLog | None = None) -> None:
        def done(error: UnavailableError | None) -> None:
            self._loop.call_soon_threadsafe(self._written, outputs, steps, error)

        self._journal.write(entry, done)

    def _written(self, outputs: StepOutputs | None, steps: StepLog | None, error: UnavailableError | None) -> None:
        if error is not None:
            if self.failure is None:
                self.failure = error
                self._on_failure()
        elif outputs is not None:
            self._on_committed(outputs, steps)

    # -- resuming ------------------------------------------------------------------------------------------------------

    def find(self, request_id: str, caller: str, on_found: Callable[[Found], None]) -> None:
        """Look a caller's request up; what is delivered before `on_found` is in it, and nothing that is later."""

        def hand_over(found: JournaledRequest | UnavailableError | None) -> None:
            on_found(self._found(found) if isinstance(found, JournaledRequest) else found)

        def done(found: JournaledRequest | UnavailableError | None) -> None:
            self._loop.call_soon_threadsafe(hand_over, found)

        self._journal.find(request_id, caller, done)

    def _found(self, journaled: JournaledRequest) -> FoundRequest | UnavailableError:
        if self.failure is not None:
            return self.failure
        accepted, rest = journaled.accepted, list[Ending | Request]()
        for index, ending in enumerate(journaled.endings):
            if ending is None:
                rest.append(self.slots.request(sample_number(accepted.number, index)))
            else:
                rest.append(wire.ending_from_proto(pb.Ending.FromString(ending)))
        submission = _submission_of(accepted)
        prompt = submission.prompt_token_ids
        return FoundRequest(
            tuple(
                Resumed(
                    index,
                    np.concatenate((prompt, token_ids)),
                    len(prompt),
                    accepted.num_samples,
                    submission.frontend_state,
                )
                for index, token_ids in enumerate(journaled.output_token_ids)
            ),
            tuple(rest),
        )


def _submission_of(accepted: AcceptedRequest) -> Submission:
    return wire.submission_from_proto(pb.Submission.FromString(accepted.submission))
