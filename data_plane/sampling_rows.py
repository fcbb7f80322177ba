"""How each admitted row is to be sampled, and what a step's batch of them asks of the sampler. Knows no tensors."""

from collections.abc import Sequence

import numpy as np

from blockplane.data_plane.grammars import Grammars, Place, RowGrammar
from blockplane.data_plane.history import BadWords, SeenTokens
from blockplane.data_plane.logit_changes import LogitChanges, TokenMasks, entries
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import NO_LOGPROBS, SamplingBatch
from blockplane.protos.errors import InvalidRequestError, ProtocolError
from blockplane.protos.plan import Admission, Int32Array, IntArray, StepPlan
from blockplane.protos.sampling import SamplingParams, check_sampling_params

_NONE = np.zeros(0, np.int64)


class SamplingRows:
    """Sampling parameters of rows 0 .. max_num_seqs - 1, columnar; what few rows ask for is kept for those alone."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        grammars: Grammars | None = None,
        *,
        draws: bool = True,
    ) -> None:
        """
        Args:
            eos_token_ids: what ends the model's texts; ids that its logits do not reach end none.
            grammars: what holds rows to structured outputs; None = no row may ask for one.
            draws: False = another rank chooses the tokens, and what changes logits is not kept here.
        """
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._temperature = np.zeros(max_num_seqs)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs)
        self._min_p = np.zeros(max_num_seqs)
        self._num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self._grammars, self._draws = grammars, draws
        self._demands: dict[int, _RowDemands] = {}

    def apply(self, plan: StepPlan) -> None:
        """Take over whom a plan releases and admits.

        Raises:
            ProtocolError: a request asks for what the model or this worker cannot do; as after `Rows.apply`.
        """
        for row in plan.released_rows.tolist():
            demands = self._demands.pop(row, None)
            if demands is not None and demands.grammar is not None:
                demands.grammar.end()
        for admission in plan.admissions:
            self._admit(admission)

    def batch(self, rows: Rows, sampled_rows: IntArray, positions: IntArray | None = None) -> SamplingBatch:
        """What the sampler is to know of rows, [num_sampled].

        Args:
            positions: int32 [num_sampled], where in their texts the new tokens come; None = behind all known tokens. A
                row may be sampled at several positions: what lies behind its known tokens are its drafts.
        """
        positions = rows.num_tokens[sampled_rows] if positions is None else positions
        return SamplingBatch(
            seed=self._seed[sampled_rows],
            positions=positions,
            temperature=self._temperature[sampled_rows],
            top_k=self._top_k[sampled_rows],
            top_p=self._top_p[sampled_rows],
            min_p=self._min_p[sampled_rows],
            num_logprobs=self._num_logprobs[sampled_rows],
            logit_changes=self._logit_changes(rows, sampled_rows, positions) if self._demands else None,
        )

    def _admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.params
        try:
            check_sampling_params(params, self._vocab_size)
        except InvalidRequestError as error:
            raise ProtocolError(f"the engine admitted a bad request: {error}") from None
        self._seed[row] = admission.seed
        self._temperature[row] = params.temperature
        self._top_k[row] = min(params.top_k, self._vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if self._draws and _changes_logits(params):
            self._demands[row] = _RowDemands(admission, self._eos_token_ids, self._grammar(admission))

    def _grammar(self, admission: Admission) -> RowGrammar | None:
        structured = admission.params.structured
        if structured is None:
            return None
        if self._grammars is None:
            raise ProtocolError("the engine admitted a request for structured output, and this worker knows none.")
        return self._grammars.begin(structured, admission.num_prompt_tokens)

    def _logit_changes(self, rows: Rows, sampled_rows: IntArray, positions: IntArray) -> LogitChanges | None:
        """Gather what these rows change about their logits; None = nothing."""
        allowed, banned, biased, biases, penalized = [], [], [], [_NONE.astype(np.float64)], []
        counts, penalties = [_NONE], [np.zeros((0, 3))]
        masked: list[tuple[int, Place]] = []
        for index, (row, position) in enumerate(zip(sampled_rows.tolist(), positions.tolist(), strict=True)):
            demands = self._demands.get(row)
            if demands is None:
                continue
            token_ids = rows.token_ids[row, :position]
            allowed.append((index, demands.allowed))
            banned.append((index, demands.banned_after(token_ids)))
            biased.append((index, demands.biased))
            biases.append(demands.biases)
            num_known = int(rows.num_tokens[row])
            if demands.grammar is not None:
                masked.append((index, Place(demands.grammar, token_ids, num_known)))
            if demands.seen is not None:
                demands.seen.catch_up(token_ids[:num_known])
                seen_ids, seen_counts = demands.seen.counts(token_ids[num_known:])
                penalized.append((index, seen_ids))
                counts.append(seen_counts)
                penalties.append(np.tile(demands.penalties, (len(seen_ids), 1)))
        if not banned:
            return None
        return LogitChanges(
            allowed=entries(allowed),
            banned=entries(banned),
            biased=entries(biased),
            biases=np.concatenate(biases),
            penalized=entries(penalized),
            output_counts=np.concatenate(counts),
            penalties=np.concatenate(penalties),
            masks=self._masks(masked),
        )

    def _masks(self, masked: Sequence[tuple[int, Place]]) -> TokenMasks | None:
        if not masked or self._grammars is None:
            return None
        indices, places = zip(*masked, strict=True)
        return TokenMasks(np.array(indices, np.int64), self._grammars.masks(places))


class _RowDemands:
    """What one row changes about its logits, in the form in which batches need it."""

    def __init__(self, admission: Admission, eos_token_ids: tuple[int, ...], grammar: RowGrammar | None) -> None:
        params = admission.params
        self.allowed = np.unique(np.array(params.allowed_token_ids or (), np.int64))
        self.biased = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float64)
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        is_penalized = self.penalties != (1, 0, 0)
        self.seen = SeenTokens(admission.token_ids, admission.num_prompt_tokens) if is_penalized else None
        self.grammar = grammar
        self._bad_words = BadWords(params.bad_words)
        self._ending_ids = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        self._first_end = admission.num_prompt_tokens + params.min_tokens

    def banned_after(self, token_ids: Int32Array) -> Int32Array:
        """The ids, int32, that may not follow the row's tokens."""
        banned = self._bad_words.banned_after(token_ids)
        if len(token_ids) < self._first_end:
            banned += self._ending_ids
        return np.array(banned, np.int32)


def _changes_logits(params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.structured is not None
    )
