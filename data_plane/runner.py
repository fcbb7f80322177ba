"""Runs one step from plan to result: apply, inputs, forward, sample, advance. Knows no gRPC and no architecture."""

import numpy as np
import torch
from torch import Tensor

from blockplane.data_plane.inputs import StepInputs, decode_inputs, prefill_inputs
from blockplane.data_plane.kv_cache import bind_kv_caches
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import sample
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import NO_ROWS, Configure, Int32Array, StepPlan, StepResult


class Runner:
    """One worker's rows, KV cache and model, from one attach to the next."""

    def __init__(self, model: Model, configure: Configure) -> None:
        """Build what the engine decided.

        Raises:
            ProtocolError: it asks for what this model or this worker does not have.
        """
        if configure.num_draft_tokens:
            raise ProtocolError(
                f"the engine counts on {configure.num_draft_tokens} draft tokens, but this worker proposes no drafts; "
                "set num_draft_tokens to 0."
            )
        bind_kv_caches(model, configure)
        self._model = model
        self._rows = Rows(configure)
        self.num_blocks = configure.num_blocks
        self.num_batched_tokens_buckets = configure.num_batched_tokens_buckets
        self.num_seqs_buckets = configure.num_seqs_buckets

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Compute one plan.

        Raises:
            ProtocolError: the plan is bad; this runner must not be used any more.
        """
        rows = self._rows
        rows.apply(plan)
        graphs = []
        if rows.decode_rows.size:
            graphs.append(decode_inputs(rows, rows.decode_rows))
        if plan.prefill_rows.size:
            graphs.append(prefill_inputs(rows, plan.prefill_rows, plan.prefill_num_tokens))
        if not graphs:
            raise ProtocolError(f"the engine's plan of step {plan.step} has no work; run the same version on both.")
        sampled_rows = np.concatenate([inputs.sampled_rows for inputs in graphs])
        sampled_ids = self._sample(torch.cat([self._forward(inputs) for inputs in graphs]), sampled_rows)
        for inputs in graphs:
            rows.advance(inputs.rows, inputs.num_scheduled_tokens)
        rows.append(sampled_rows, sampled_ids)
        return StepResult(plan.step, sampled_ids)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [num_sampled, hidden_size] of the tokens that are sampled; the rest is left behind here."""
        hidden = self._model.forward(inputs.input_ids, inputs.positions, inputs.batches)
        return hidden[inputs.logits_indices]

    def _sample(self, hidden: Tensor, sampled_rows: Int32Array) -> Int32Array:
        """Draw a token from each hidden state [num_sampled, hidden_size], all at once: int32 [num_sampled]."""
        if not sampled_rows.size:
            return NO_ROWS
        rows = self._rows
        logits = self._model.logits(hidden)
        return sample(logits, rows.temperature[sampled_rows], rows.seed[sampled_rows], rows.num_tokens[sampled_rows])
