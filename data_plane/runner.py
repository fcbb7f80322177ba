"""Runs one step from plan to result: apply, propose, inputs, forward, sample, accept, advance.

Knows no gRPC and no architecture.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from blockplane.data_plane.attention import Attention
from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.draft_model import DraftModel
from blockplane.data_plane.drafts import DraftSource, accept
from blockplane.data_plane.execution import execution_of
from blockplane.data_plane.grammars import Grammars
from blockplane.data_plane.graphs import Graphs
from blockplane.data_plane.inputs import StepInputs, decode_inputs, prefill_inputs
from blockplane.data_plane.kv_cache import attentions_of, bind_kv_caches
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.prompt_lookup import PromptLookup
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.rows import Rows
from blockplane.data_plane.sampler import Samples
from blockplane.data_plane.sampling_rows import SamplingRows
from blockplane.data_plane.told_prompts import ToldPrompts
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Configure, Int32Array, IntArray, StepPlan, StepResult


class Runner:
    """One worker's rows, KV cache and model, in one attach after another.

    Attributes:
        configure: what it was built for. graphs: the model's, all shapes of which exist.
        last_step: the last step that was computed whole.
        marks: when it had its inputs, its logits and its tokens, nanoseconds of `time.monotonic_ns`; see `StepTimes`.
    """

    def __init__(
        self,
        model: Model,
        configure: Configure,
        eos_token_ids: Sequence[int] = (),
        kernel_block_size: int | None = None,
        *,
        num_draft_tokens: int = 0,
        draft_model: Model | None = None,
        grammars: Grammars | None = None,
        backend: Backend = CPU,
        ranks: Ranks = ALONE,
    ) -> None:
        """Build what the engine decided, every graph too.

        Args:
            eos_token_ids: what ends the model's texts.
            kernel_block_size: tokens in a block as the attention kernel has them; None = as the engine has them.
            num_draft_tokens: the most that this worker proposes for a row in a step.
            draft_model: what proposes them, of the same vocabulary; None = the rows' own texts do.
            grammars: what holds rows to structured outputs; None = no row may ask for one.
            backend: where the models' weights lie.
            ranks: those that the models are divided among; each has a runner, and all are given the same plans. The
                first one samples, and alone knows what is told of the tokens beside their ids; it alone needs grammars.

        Raises:
            ProtocolError: it asks for what this model or this worker does not have.
            ConfigurationError: kernel_block_size does not divide block_size, or the backend knows one rank alone.
        """
        if configure.num_draft_tokens > num_draft_tokens:
            raise ProtocolError(
                f"the engine counts on {configure.num_draft_tokens} draft tokens, and this worker proposes "
                f"{num_draft_tokens}; give both the same num_draft_tokens."
            )
        self._rows = Rows(configure, kernel_block_size, ranks.context_parallel)
        bind_kv_caches(model, configure, backend, draft_model, ranks)
        if kernel_block_size is not None:
            _split_blocks(attentions_of(model, draft_model), kernel_block_size)
        self.configure, self._backend, self._ranks = configure, backend, ranks
        self.last_step, self.marks = configure.last_step, (0, 0, 0)
        self._execution = execution_of(model, configure, backend, ranks)
        self.graphs = self._execution.graphs
        self._sampling = SamplingRows(
            configure.max_num_seqs, model.vocab_size, eos_token_ids, grammars, draws=ranks.rank == 0
        )
        self._told_prompts = ToldPrompts(self._rows, self._execution.logits)
        self._drafts = self._draft_source(draft_model) if configure.num_draft_tokens else None
        with torch.inference_mode():
            self._execution.build()
            if self._drafts is not None:
                self._drafts.build()

    @property
    def all_graphs(self) -> dict[str, Graphs]:
        """The model's and, if it has one, its draft model's, by what they are called before their phases."""
        of_drafts = {"draft_": self._drafts.graphs} if isinstance(self._drafts, DraftModel) else {}
        return {"": self.graphs, **of_drafts}

    def reset(self, configure: Configure) -> None:
        """Begin another attach: rows are free, steps are numbered on from `configure.last_step`, KV and graphs stay.

        Whether the KV counts is the engine's to know: a row reads what it computed itself, and of what was there before
        only the blocks that its admission calls computed.

        Args:
            configure: that of the attach before, but for what names the attach.
        """
        self.configure, self.last_step = configure, configure.last_step
        self._rows.reset(configure)
        everything = StepPlan(configure.last_step, released_rows=np.arange(configure.max_num_seqs, dtype=np.int32))
        self._sampling.apply(everything)
        self._told_prompts.apply(everything)
        if self._drafts is not None:
            self._drafts.apply(everything)

    def _draft_source(self, draft_model: Model | None) -> DraftSource:
        if draft_model is None:
            return PromptLookup(self._rows)
        return DraftModel(draft_model, self.configure, self._rows, self._sampling, self._backend, self._ranks)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Compute one plan.

        Raises:
            ProtocolError: the plan is bad; this runner must not be used any more before it is reset.
        """
        self._rows.apply(plan)
        self._sampling.apply(plan)
        self._told_prompts.apply(plan)
        granted, num_drafts = self._propose(plan)
        parts = self._inputs(plan, granted)
        sampled_rows = np.concatenate([part.sampled_rows for part in parts])
        positions = _sampled_positions(parts) if num_drafts else None
        batch = self._sampling.batch(self._rows, sampled_rows, positions) if sampled_rows.size else None
        prepared = time.monotonic_ns()
        samples, hidden = self._execution.run(parts, batch)
        sampled = time.monotonic_ns()
        self.marks = prepared, self._execution.computed_at or sampled, sampled
        told = self._told_prompts.logprobs(parts[-1], hidden[-1]) if plan.prefill_rows.size else None
        if self._drafts is not None and plan.prefill_rows.size:
            self._drafts.follow(parts[-1])
        num_tokens = None
        if num_drafts:
            samples, num_tokens = _accept(parts[0], samples)
        result = StepResult(
            plan.step, samples.token_ids, num_tokens, samples.logprobs, told, num_drafts, self.configure.epoch
        )
        self._rows.fold(plan, result)
        self.last_step = plan.step
        return result

    def _propose(self, plan: StepPlan) -> tuple[Int32Array, int]:
        """Have drafts placed behind the rows that decode.

        Returns:
            int32 [num_rows], how many tokens each of them computes; how many of all these are drafts.
        """
        granted = self._rows.decode_num_tokens
        if self._drafts is None:
            return granted, 0
        self._drafts.apply(plan)
        if not granted.size:
            return granted, 0
        num_drafts = self._drafts.propose(self._rows.decode_rows, granted - 1)
        return 1 + num_drafts, int(num_drafts.sum())

    def _inputs(self, plan: StepPlan, num_tokens: Int32Array) -> list[StepInputs]:
        """What each graph of the step is fed: the decode's first, then the prefill's."""
        rows, parts, is_compiled = self._rows, [], self._backend.is_compiled
        if rows.decode_rows.size:
            parts.append(decode_inputs(rows, rows.decode_rows, num_tokens, is_compiled=is_compiled))
        if plan.prefill_rows.size:
            parts.append(prefill_inputs(rows, plan.prefill_rows, plan.prefill_num_tokens, is_compiled=is_compiled))
        if not parts:
            raise ProtocolError(f"the engine's plan of step {plan.step} has no work; run the same version on both.")
        return parts


def _accept(decode: StepInputs, samples: Samples) -> tuple[Samples, Int32Array]:
    """The samples that count, the decode's accepted ones, then the prefill's; and how many each decode row got."""
    num_decoded = len(decode.sampled_rows)
    is_new, num_new = accept(decode, samples.token_ids[:num_decoded])
    prefilled = np.arange(num_decoded, len(samples.token_ids))
    return samples.take(np.concatenate((np.flatnonzero(is_new), prefilled))), num_new


def _sampled_positions(parts: Sequence[StepInputs]) -> IntArray:
    """int64 [num_sampled]: where the tokens that are sampled come, each behind the one that it is sampled after."""
    return torch.cat([part.positions[part.logits_indices] for part in parts]).numpy() + 1


def _split_blocks(attentions: Sequence[Attention], kernel_block_size: int) -> None:
    """Show every KV cache to the kernel in blocks of its own size; the slots in them stay where they are.

    Token-major ones only: in others a part of a block does not lie in one piece.
    """
    for attention in attentions:
        caches, kernels = attention.bound()
        k_cache, v_cache = (cache.view(-1, kernel_block_size, *cache.shape[2:]) for cache in caches)
        attention.bind_kv_cache(k_cache, v_cache, kernels, attention.group)
