"""What a worker's answer means: tokens to their requests, ends, full blocks, windows left. Plans nothing."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from blockplane.control_plane.engine.kv_blocks import KVBlocks
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.rows import Rows
from blockplane.control_plane.engine.step import Finished, InFlight, Segment, StepOutputs, ToldPrompt
from blockplane.control_plane.engine.stops import BoolArray, Stops
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.errors import BlockplaneError, ModelOutputError, ProtocolError
from blockplane.protos.finish import FinishReason, finish_reason
from blockplane.protos.logprobs import Logprobs
from blockplane.protos.plan import Int32Array, IntArray, StepResult

Outcome: TypeAlias = FinishReason | BlockplaneError


class Answers:
    """The confirming half of a scheduler, on the scheduler's own rows, blocks and queue.

    Attributes:
        num_draft_tokens, num_accepted_tokens, num_discarded_tokens: of all answers, what `Statistics` says of
            them.
    """

    def __init__(
        self,
        rows: Rows,
        blocks: KVBlocks,
        waiting: WaitingQueue,
        stops: Stops,
        end: Callable[[Request], None],
    ) -> None:
        """`end` takes a request out of rows and queue."""
        self._rows, self._blocks, self._waiting, self._stops, self._end = rows, blocks, waiting, stops, end
        self.num_draft_tokens = self.num_accepted_tokens = self.num_discarded_tokens = 0

    def take(self, plan: InFlight | None, result: StepResult, *, all_have_rows: bool) -> StepOutputs:
        """Fold an answer in. `all_have_rows`: no request of the plan has lost its row since.

        Raises:
            ProtocolError: it is no answer to `plan`; nothing has changed.
        """
        if plan is None or result.step != plan.step:
            expected = "none is expected" if plan is None else f"that of step {plan.step} is expected"
            raise ProtocolError(f"got the result of step {result.step} while {expected}.")
        counts, may_stop = _counts(plan, result), self._stops.are_to_see(result.token_ids)
        self._stops.check(result.token_ids)
        self._check_logprobs(plan, result)
        self.num_draft_tokens += result.num_draft_tokens
        if result.num_tokens is not None:
            self.num_accepted_tokens += int(result.num_tokens.sum()) - len(result.num_tokens)
        rows, token_ids, unused = plan.sampled.rows, result.token_ids, _unused(plan, counts)
        told_prompts, logprobs = _told_prompts(plan.prefills, result.prompt_logprobs), result.logprobs
        late = None
        if not all_have_rows:
            has_row = np.array([request.row is not None for request in plan.sampled.requests], bool)
            is_kept = has_row if counts is None else np.repeat(has_row, counts)
            late = self._answer_without_rows(plan.sampled.requests, token_ids, counts, logprobs)
            logprobs = None if logprobs is None else logprobs.take(np.flatnonzero(is_kept))
            rows, token_ids, may_stop = rows[has_row], token_ids[is_kept], may_stop[is_kept]
            counts = None if counts is None else counts[has_row]
            unused = None if unused is None else unused[has_row]
        if plan.prefills:
            self._answer_prefills(plan.prefills)
        if unused is not None:
            self._rows.num_granted[rows] -= unused
        outputs = self._answer_rows(rows, token_ids, counts, may_stop, logprobs)
        outputs = outputs if late is None else late.beside(outputs)
        return outputs._replace(told_prompts=told_prompts) if told_prompts else outputs

    def _check_logprobs(self, plan: InFlight, result: StepResult) -> None:
        """Raise ProtocolError unless prompts are told of as they were asked, in token ids of the model."""
        num_asked = sum(segment.num_told for segment in plan.prefills)
        num_told = 0 if result.prompt_logprobs is None else len(result.prompt_logprobs.num_entries)
        if num_told != num_asked:
            raise ProtocolError(f"step {plan.step} was to tell of {num_asked} prompt tokens; got {num_told}.")
        for logprobs in (result.logprobs, result.prompt_logprobs):
            if logprobs is not None:
                self._stops.check(logprobs.token_ids)

    # -- requests that have their rows ---------------------------------------------------------------------------------

    def _answer_rows(
        self,
        at: IntArray,
        token_ids: Int32Array,
        counts: Int32Array | None,
        may_stop: BoolArray,
        logprobs: Logprobs | None,
    ) -> StepOutputs:
        """Give each row its new tokens: one, or as many as `counts` says; look closer at those that reach a mark."""
        rows = self._rows
        before = rows.num_tokens[at]
        if counts is None or not at.size:
            rows.token_ids[at, before] = token_ids
            after, per_token, stops = before + 1, at, may_stop
        else:
            starts, per_token = np.cumsum(counts) - counts, np.repeat(at, counts)
            rows.token_ids[per_token, np.arange(len(token_ids)) + np.repeat(before - starts, counts)] = token_ids
            after, stops = before + counts, np.logical_or.reduceat(may_stop, starts)
        rows.num_tokens[at] = after
        owners, stream_ids = rows.owners[per_token], rows.stream_ids[per_token]
        outputs = StepOutputs(owners, stream_ids, token_ids, one_each=counts is None, logprobs=logprobs)
        is_due = stops | (after >= rows.confirm_mark[at])
        if not np.count_nonzero(is_due):
            return outputs
        self._settle(at[is_due], after[is_due] - 1)
        may_end = np.flatnonzero(stops | (after >= rows.final_len[at]))
        return self._end_rows(at[may_end], before[may_end], after[may_end], outputs) if may_end.size else outputs

    def _end_rows(self, at: IntArray, before: IntArray, after: IntArray, outputs: StepOutputs) -> StepOutputs:
        """Ask of rows whether the request ends with one of its new tokens; what follows that one is dropped."""
        rows, finished, num_dropped = self._rows, [], []
        for row, start, stop in zip(at.tolist(), before.tolist(), after.tolist(), strict=True):
            request = rows.request(row)
            kept, outcome = self._outcome(request, start, rows.token_ids[row, start:stop].tolist())
            if outcome is None:
                continue
            if isinstance(outcome, ModelOutputError):
                self._blocks.distrust(row)
            rows.num_tokens[row] = start + kept
            num_dropped.append(stop - start - kept)
            self.num_discarded_tokens += stop - start - kept
            finished.append(Finished(request, outcome))
            self._end(request)
        return outputs.ending(finished, num_dropped)

    def _settle(self, at: IntArray, num_computed: IntArray) -> None:
        """Publish the blocks that have become full, and let go of those that left a window."""
        rows, block_size = self._rows, self._blocks.block_size
        num_full = num_computed // block_size
        has_new = num_full > rows.num_published[at]
        if not has_new.all():
            at, num_computed, num_full = at[has_new], num_computed[has_new], num_full[has_new]
        if not at.size:
            return
        self._publish(at, num_full)
        self._blocks.give_up_unseen(at, num_computed)

    def _publish(self, at: IntArray, num_full: IntArray) -> None:
        """Let each row's first `num_full` logical blocks be found; one of them is new, with drafts maybe more."""
        rows, block_size = self._rows, self._blocks.block_size
        while at.size:
            blocks = rows.num_published[at]
            positions = blocks[:, None] * block_size + np.arange(block_size)
            requests = [rows.request(row) for row in at.tolist()]
            self._blocks.publish_one_each(requests, at, blocks, rows.token_ids[at[:, None], positions])
            rows.note_published(at, blocks + 1, block_size)
            has_more = num_full > blocks + 1
            at, num_full = at[has_more], num_full[has_more]

    def _answer_prefills(self, segments: Sequence[Segment]) -> None:
        """Let go of what the next segments, or the decodes behind them, see no more."""
        held = [segment for segment in segments if segment.request.row is not None]
        at, stops = np.array([(segment.row, segment.stop) for segment in held], np.int64).reshape(-1, 2).T
        # Whoever takes a request over begins behind its last whole block, and sees from there.
        stops = np.where(self._rows.stands[at], stops - stops % self._blocks.block_size, stops)
        self._blocks.give_up_unseen(at, stops)

    # -- requests that lost their rows meanwhile -----------------------------------------------------------------------

    def _answer_without_rows(
        self,
        requests: Sequence[Request],
        token_ids: Int32Array,
        counts: Int32Array | None,
        logprobs: Logprobs | None,
    ) -> StepOutputs:
        """Give their tokens to requests that wait again or are parked; those that have ended get none."""
        news, finished = [], []
        stop = 0
        for request, count in zip(requests, [1] * len(requests) if counts is None else counts.tolist(), strict=True):
            start, stop = stop, stop + count
            if request.ended:
                self.num_discarded_tokens += count
            if request.ended or request.row is not None:
                continue
            tokens = token_ids[start:stop].tolist()
            kept, outcome = self._outcome(request, request.num_tokens, tokens)
            self.num_discarded_tokens += count - kept
            for index, token_id in enumerate(tokens[:kept], start):
                if request.is_parked:
                    request.append(token_id)
                else:
                    self._waiting.append_token(request, token_id)
                news.append((request.owner, request.stream_id, index))
            if outcome is not None:
                if isinstance(outcome, ModelOutputError):
                    self._blocks.distrust_keys(request)
                finished.append(Finished(request, outcome))
                self._end(request)
        owners, stream_ids, kept_tokens = np.array(news, np.int32).reshape(-1, 3).T
        logprobs = None if logprobs is None else logprobs.take(kept_tokens)
        return StepOutputs(owners, stream_ids, token_ids[kept_tokens], counts is None, tuple(finished), logprobs)

    def _outcome(self, request: Request, num_before: int, token_ids: Sequence[int]) -> tuple[int, Outcome | None]:
        """How many of a request's new tokens count, and what ends it with the last of them; None = it goes on."""
        for index, token_id in enumerate(token_ids):
            if token_id < 0:
                return index, ModelOutputError(
                    "the model's output for this request was not finite, or its parameters left no token that may come;"
                    " change its parameters or its prompt, or look at the weights."
                )
            num_tokens = num_before + index + 1
            reason = finish_reason(
                token_id,
                num_tokens - request.num_prompt_tokens,
                num_tokens,
                request.params,
                eos_token_ids=self._stops.eos_token_ids,
                max_model_len=self._rows.token_ids.shape[1],
                cache_capacity=self._blocks.capacity,
            )
            if reason is not None:
                return index + 1, reason
        return len(token_ids), None


def _counts(plan: InFlight, result: StepResult) -> Int32Array | None:
    """How many tokens each sampled row got, None = 1 each. Raises ProtocolError if the answer's columns are too long,
    too short, or have more for a row than it was granted.
    """
    num_rows = num_tokens = len(plan.sampled.requests)
    counts = result.num_tokens
    if counts is not None:
        granted = 1 if plan.num_granted is None else plan.num_granted
        if len(counts) != len(plan.decodes.requests) or bool(((counts < 1) | (counts > granted)).any()):
            raise ProtocolError(f"step {plan.step} gives rows other numbers of tokens than they were granted.")
        counts = np.concatenate((counts, np.ones(num_rows - len(counts), np.int32)))
        num_tokens = int(counts.sum())
    if len(result.token_ids) != num_tokens:
        raise ProtocolError(f"step {plan.step} sampled {num_tokens} tokens; got {len(result.token_ids)}.")
    return counts


def _told_prompts(segments: Sequence[Segment], logprobs: Logprobs | None) -> tuple[ToldPrompt, ...]:
    """What is new of what an answer tells of prompts: a request that lost its row may compute its own once more."""
    if logprobs is None:
        return ()
    told_prompts = []
    asked = [segment for segment in segments if segment.num_told]
    for segment, told in zip(asked, logprobs.split([segment.num_told for segment in asked]), strict=True):
        request, first, stop = segment.request, segment.start + 1, segment.start + 1 + segment.num_told
        if not request.ended and stop > request.num_prompt_told:
            new = np.arange(max(0, request.num_prompt_told - first), segment.num_told)
            request.num_prompt_told = stop
            told_prompts.append(ToldPrompt(request, told.take(new)))
    return tuple(told_prompts)


def _unused(plan: InFlight, counts: Int32Array | None) -> Int32Array | None:
    """Of the tokens that each sampled row was granted, how many it did not get; None = it got them all."""
    if plan.num_granted is None:
        return None
    num_prefilled = len(plan.sampled.requests) - len(plan.num_granted)
    granted = np.concatenate((plan.num_granted, np.ones(num_prefilled, np.int32)))
    return granted - (1 if counts is None else counts)
