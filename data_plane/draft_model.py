"""Drafts from a second, smaller model with KV of its own. Knows neither the target model nor what it makes of them."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from blockplane.data_plane.graphs import Graphs
from blockplane.data_plane.inputs import StepInputs, decode_inputs
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import NO_LOGPROBS, sample
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
        graphs: the model's forward, all shapes of which exist once it is built.
    """

    def __init__(self, model: Model, configure: Configure, rows: Rows, sampling: SamplingRows) -> None:
        """`rows`, `sampling`: the target's, whose KV caches and this model's are bound."""
        configure = replace(configure, num_draft_tokens=0)
        self._model = model
        self._target_rows, self._rows = rows, rows.at_another_pace(configure)
        self._sampling = sampling
        self.graphs = Graphs(model, configure)

    def build(self) -> None:
        self.graphs.build()

    def apply(self, plan: StepPlan) -> None:
        """Rows are all that it goes by."""

    def propose(self, decode_rows: IntArray, most: Int32Array) -> Int32Array:
        """Guess token by token, over the rows that have room for so many."""
        rows, draft_token_ids = self._rows, np.zeros((len(decode_rows), most.max()), np.int32)
        rows.num_computed_tokens[decode_rows] = self._target_rows.num_computed_tokens[decode_rows]
        for index in range(draft_token_ids.shape[1] + 1):
            at = np.flatnonzero(most >= index)
            hidden = self._forward(decode_rows[at])
            asks = most[at] > index
            if asks.any():
                at = at[asks]
                draft_token_ids[at, index] = self._sample(hidden[torch.from_numpy(asks)], decode_rows[at], index)
                rows.propose(decode_rows, draft_token_ids, np.minimum(most, index + 1))
        return most

    def follow(self, prefill: StepInputs) -> None:
        self.graphs.run(prefill.shape, prefill.input_ids, prefill.positions, prefill.batches)

    def _forward(self, decode_rows: IntArray) -> Tensor:
        """Compute each row's next token: the hidden states after them, [num_rows, hidden_size]."""
        inputs = decode_inputs(self._rows, decode_rows)
        hidden = self.graphs.run(inputs.shape, inputs.input_ids, inputs.positions, inputs.batches)
        self._rows.advance(decode_rows, inputs.num_scheduled_tokens)
        return hidden[inputs.logits_indices]

    def _sample(self, hidden: Tensor, rows: IntArray, index: int) -> Int32Array:
        """Each row's draft of that index; where the model fails, any token."""
        batch = self._sampling.batch(self._rows, rows, self._rows.num_tokens[rows] + index)
        batch = replace(batch, num_logprobs=np.full_like(batch.num_logprobs, NO_LOGPROBS))
        return np.maximum(sample(self._model.logits(hidden), batch).token_ids, 0)
