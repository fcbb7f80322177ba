"""Runs one step from plan to result: apply, inputs, forward, sample, advance. Knows no gRPC and no architecture."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockplane.data_plane.graphs import Graphs
from blockplane.data_plane.inputs import StepInputs, decode_inputs, prefill_inputs
from blockplane.data_plane.kv_cache import bind_kv_caches
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import sample
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import NO_ROWS, Configure, Int32Array, StepPlan, StepResult


class Runner:
    """One worker's rows, KV cache and model, from one attach to the next.

    Attributes:
        configure: what it was built for. graphs: the model's forward, all shapes of which exist.
    """

    def __init__(
        self,
        model: Model,
        configure: Configure,
        eos_token_ids: Sequence[int] = (),
        kernel_block_size: int | None = None,
    ) -> None:
        """Build what the engine decided, every graph too.

        Args:
            eos_token_ids: what ends the model's texts.
            kernel_block_size: tokens in a block as the attention kernel has them; None = as the engine has them.

        Raises:
            ProtocolError: it asks for what this model or this worker does not have.
            ConfigurationError: kernel_block_size does not divide block_size.
        """
        if configure.num_draft_tokens:
            raise ProtocolError(
                f"the engine counts on {configure.num_draft_tokens} draft tokens, but this worker proposes no drafts; "
                "set num_draft_tokens to 0."
            )
        self._rows = Rows(configure, kernel_block_size)
        bind_kv_caches(model, configure)
        if kernel_block_size is not None:
            _split_blocks(model, kernel_block_size)
        self._model = model
        self.configure = configure
        self.graphs = Graphs(model, configure)
        self._sampling = SamplingRows(configure.max_num_seqs, model.vocab_size, eos_token_ids)
        with torch.inference_mode():
            self.graphs.build()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Compute one plan.

        Raises:
            ProtocolError: the plan is bad; this runner must not be used any more.
        """
        rows = self._rows
        rows.apply(plan)
        self._sampling.apply(plan)
        graphs = []
        if rows.decode_rows.size:
            graphs.append(decode_inputs(rows, rows.decode_rows, rows.decode_num_tokens))
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
        hidden = self.graphs.run(inputs.shape, inputs.input_ids, inputs.positions, inputs.batches)
        return hidden[inputs.logits_indices]

    def _sample(self, hidden: Tensor, sampled_rows: Int32Array) -> Int32Array:
        """Draw a token from each hidden state [num_sampled, hidden_size], all at once: int32 [num_sampled]."""
        if not sampled_rows.size:
            return NO_ROWS
        return sample(self._model.logits(hidden), self._sampling.batch(self._rows, sampled_rows)).token_ids


def _split_blocks(model: Model, kernel_block_size: int) -> None:
    """Show every KV cache to the kernel in blocks of its own size; the slots in them stay where they are."""
    for attention in model.attentions:
        assert attention.caches is not None, "bind_kv_caches comes before"
        k_cache, v_cache = (cache.view(-1, kernel_block_size, *cache.shape[2:]) for cache in attention.caches)
        attention.bind_kv_cache(k_cache, v_cache, attention.group)
