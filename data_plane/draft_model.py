"""Drafts from a second, smaller model with KV of its own. Knows neither the target model nor what it makes of them."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.execution import execution_of
from blockplane.data_plane.inputs import StepInputs, decode_inputs
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import NO_LOGPROBS
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.protos.plan import Configure, Int32Array, IntArray, StepPlan


class DraftModel:
    """Proposes what another model would say, with the row's own noise: where the two agree so do their samples, at any
    temperature.

    Its KV lies in the blocks of the target's, layer by layer, and is as complete: it computes the prompt segments that
    the target computes, and of a row that decodes the newest token and every draft. The last draft says nothing more
    here, but if it is accepted, nobody comes back to it: the next step starts behind it, a window may leave it, a
    prompt may find its block.

    Attributes:
        graphs: the model's, all shapes of which exist once it is built.
    """

    def __init__(
        self,
        model: Model,
        configure: Configure,
        rows: Rows,
        sampling: SamplingRows,
        backend: Backend,
        ranks: Ranks = ALONE,
    ) -> None:
        """`rows`, `sampling`: the target's, whose KV caches and this model's are bound."""
        configure = replace(configure, num_draft_tokens=0)
        self._target_rows, self._rows = rows, rows.at_another_pace(configure)
        self._sampling, self._is_compiled = sampling, backend.is_compiled
        self._execution = execution_of(model, configure, backend, ranks)
        self.graphs = self._execution.graphs

    def build(self) -> None:
        self._execution.build()

    def apply(self, plan: StepPlan) -> None:
        """Rows are all that it goes by."""

    def propose(self, decode_rows: IntArray, most: Int32Array) -> Int32Array:
        """Guess token by token, over the rows that have room for so many."""
        rows, draft_token_ids = self._rows, np.zeros((len(decode_rows), most.max()), np.int32)
        rows.num_computed_tokens[decode_rows] = self._target_rows.num_computed_tokens[decode_rows]
        for index in range(draft_token_ids.shape[1] + 1):
            at = np.flatnonzero(most >= index)
            asks = most[at] > index
            sampled = self._compute(decode_rows[at], asks, index)
            if asks.any():
                # Where the model fails, any token.
                draft_token_ids[at[asks], index] = np.maximum(sampled, 0)
                rows.propose(decode_rows, draft_token_ids, np.minimum(most, index + 1))
        return most

    def follow(self, prefill: StepInputs) -> None:
        self._execution.run([prefill], None)

    def _compute(self, decode_rows: IntArray, asks: NDArray[np.bool_], index: int) -> Int32Array:
        """Compute each row's next token, and sample that draft, of that index, of those rows that ask for it."""
        inputs = decode_inputs(self._rows, decode_rows, is_compiled=self._is_compiled)
        self._rows.advance(decode_rows, inputs.num_scheduled_tokens)
        rows = decode_rows[asks]
        if not rows.size:
            return self._execution.run([inputs], None)[0].token_ids
        inputs = replace(inputs, sampled_rows=rows, logits_indices=inputs.logits_indices[torch.from_numpy(asks)])
        batch = self._sampling.batch(self._rows, rows, self._rows.num_tokens[rows] + index)
        batch = replace(batch, num_logprobs=np.full_like(batch.num_logprobs, NO_LOGPROBS))
        return self._execution.run([inputs], batch)[0].token_ids
