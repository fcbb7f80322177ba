"""One graph from a step's inputs to drawn tokens, where greedy and a temperature alone are asked. Knows no device.

A row that asks for more is sampled from its logits on the host, and always so: which of the two ways a row goes depends
on its own request alone, so that its batch-mates change nothing about its text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatches
from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.drawing import uniform_noise
from blockplane.data_plane.graphs import Graphs, Shape, idle_tensors
from blockplane.data_plane.inputs import StepInputs
from blockplane.data_plane.logprobs import NUM_AT_ONCE
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.packing import max_requests
from blockplane.data_plane.sampler import NO_LOGPROBS, NOT_FINITE, Samples, SamplingBatch, sample
from blockplane.protos.plan import NO_ROWS, Configure

LARGEST_NOISE = np.float32(1 - 2**-24)
"""The largest float32 below 1, to which float64 noise may not be rounded up."""


class FusedSampling:
    """See `Execution`. A graph gives hidden states, the logits of all tokens that may be sampled after, and ids.

    Logits stay where they are unless a row needs them on the host.
    """

    def __init__(self, model: Model, configure: Configure, backend: Backend) -> None:
        self.graphs = Graphs(self._compute, self._idle_inputs, configure, backend)
        self.computed_at: int | None = None
        self._model, self._configure, self._backend = model, configure, backend
        self._project = model.logits

    def build(self) -> None:
        self.graphs.build()
        self._project = self._backend.build(self._model.logits, (self._model.idle_hidden(NUM_AT_ONCE),))

    def run(self, parts: Sequence[StepInputs], batch: SamplingBatch | None) -> tuple[Samples, list[Tensor]]:
        sizes = [0 if batch is None else len(part.logits_indices) for part in parts]
        ends = np.cumsum(sizes)
        outputs = [
            self._run(part, batch, slice(end - size, end)) for part, size, end in zip(parts, sizes, ends, strict=True)
        ]
        hidden = [output[0] for output in outputs]
        if batch is None:
            return Samples(NO_ROWS), hidden
        places = [_places(part) for part in parts]
        drawn = torch.cat([output[2].cpu()[at] for output, at in zip(outputs, places, strict=True)])
        samples = Samples(drawn.numpy().astype(np.int32))
        on_host = _asks_for_more(batch)
        if not on_host.any():
            return samples, hidden
        logits = torch.cat([output[1].cpu()[at] for output, at in zip(outputs, places, strict=True)])
        return _with_host_rows(samples, logits, batch, on_host), hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """At most NUM_AT_ONCE of them, on the host."""
        padded = self._model.idle_hidden(NUM_AT_ONCE)
        padded[: len(hidden)] = hidden.cpu()
        logits: Tensor = self._project(padded)
        return logits.cpu()[: len(hidden)]

    def _run(self, part: StepInputs, batch: SamplingBatch | None, sampled: slice) -> tuple[Tensor, Tensor, Tensor]:
        indices, temperature, noise = _idle_sampling(part.shape, self._configure)
        if batch is not None:
            places = _places(part)
            indices[places] = part.logits_indices
            temperature[places] = torch.from_numpy(batch.temperature[sampled]).float()
            drawn = uniform_noise(batch.seed[sampled], batch.positions[sampled]).astype(np.float32)
            noise[places] = torch.from_numpy(np.minimum(drawn, LARGEST_NOISE))
        outputs: tuple[Tensor, Tensor, Tensor] = self.graphs.run(
            part.shape, part.input_ids, part.positions, part.batches, indices, temperature, noise
        )
        self.graphs.num_padding_tokens[part.shape] += part.num_padding_tokens
        return outputs

    def _compute(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batches: AttentionBatches,
        logits_indices: Tensor,
        temperature: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self._model.forward(input_ids, positions, batches)
        logits = self._model.logits(hidden[logits_indices])
        return hidden, logits, draw(logits, temperature, noise)

    def _idle_inputs(self, shape: Shape) -> tuple[Any, ...]:
        idle = idle_tensors(shape, self._configure, is_compiled=self._backend.is_compiled)
        return *idle, *_idle_sampling(shape, self._configure)


def draw(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """Each row's token: its likeliest, or by inverse transform as `drawing.draw_from_all`, but in float32 sums.

    Args:
        logits: float32 [num_rows, vocab_size]. temperature: float32 [num_rows]; 0 = greedy. noise: float32 [num_rows]
            in [0, 1).

    Returns:
        int64 [num_rows], NOT_FINITE where a logit is not.
    """
    is_random = temperature > 0
    lead = logits - logits.amax(1, keepdim=True)
    cumulative = (lead / torch.where(is_random, temperature, 1.0)[:, None]).exp().cumsum(1)
    # What `searchsorted` would find, in comparisons, which every device has.
    drawn = (cumulative <= noise[:, None] * cumulative[:, -1:]).sum(1).clamp_max(logits.shape[1] - 1)
    chosen = torch.where(is_random, drawn, logits.argmax(1))
    return torch.where(torch.isfinite(logits.sum(1)), chosen, NOT_FINITE)


def _idle_sampling(shape: Shape, configure: Configure) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, temperatures and noise of all tokens that a graph may sample after: of a decode every one."""
    num_logits = shape.num_tokens if shape.num_seqs else max_requests(shape.num_tokens, configure)
    indices = torch.arange(num_logits) if shape.num_seqs else torch.zeros(num_logits, dtype=torch.int64)
    return indices, torch.zeros(num_logits), torch.zeros(num_logits)


def _places(part: StepInputs) -> Tensor:
    """int64 [num_sampled]: which of a graph's logits are those of the tokens that a part samples after."""
    return part.logits_indices if part.shape.num_seqs else torch.arange(len(part.logits_indices))


def _asks_for_more(batch: SamplingBatch) -> NDArray[np.bool_]:
    """bool [num_sampled]: the rows whose tokens a graph does not draw."""
    is_truncated = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    more: NDArray[np.bool_] = (is_truncated & (batch.temperature > 0)) | (batch.num_logprobs != NO_LOGPROBS)
    if batch.logit_changes is not None:
        more[batch.logit_changes.changed] = True
    return more


def _with_host_rows(samples: Samples, logits: Tensor, batch: SamplingBatch, on_host: NDArray[np.bool_]) -> Samples:
    """Sample those rows from float32 [num_sampled, vocab_size] on the host; the others keep what was drawn."""
    # The cheapest way for the others, whose outcome is not looked at.
    on_the_host = sample(logits, replace(batch, temperature=np.where(on_host, batch.temperature, 0.0)))
    return replace(on_the_host, token_ids=np.where(on_host, on_the_host.token_ids, samples.token_ids))
