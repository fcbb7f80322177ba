"""From a step's inputs to its samples: the model's graphs and the sampler, one after the other. Knows no rows.

Of several ranks all compute, the first one samples, and the others are told what.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.fused_sampling import FusedSampling
from blockplane.data_plane.graphs import Graphs, idle_tensors
from blockplane.data_plane.inputs import StepInputs
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.sampler import Samples, SamplingBatch, sample
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.plan import NO_ROWS, Configure


class Execution(Protocol):
    """A model on a device.

    Attributes:
        graphs: all shapes of which exist once it is built.
        computed_at: when the last run had its logits, nanoseconds of `time.monotonic_ns`: as far as the host knows, for
            a device may compute on while it goes on. None = they are sampled where they are computed.
    """

    @property
    def graphs(self) -> Graphs: ...

    @property
    def computed_at(self) -> int | None: ...

    def build(self) -> None: ...

    def run(self, parts: Sequence[StepInputs], batch: SamplingBatch | None) -> tuple[Samples, list[Tensor]]:
        """Compute the parts of a step, and sample after the tokens that they name.

        Args:
            batch: of those tokens, part after part; None = nothing is sampled.

        Returns:
            The samples; each part's hidden states [num_padded_tokens, hidden_size].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Some of a part's hidden states, [num_hidden, hidden_size] -> float32 [num_hidden, vocab_size]."""
        ...


class ForwardThenSample:
    """Graphs of the forward alone; logits are there of what is sampled, of all parts at once."""

    def __init__(self, model: Model, configure: Configure, backend: Backend, ranks: Ranks = ALONE) -> None:
        idle = partial(idle_tensors, configure=configure, is_compiled=backend.is_compiled)
        self.graphs = Graphs(model.forward, idle, configure, backend)
        self.computed_at: int | None = None
        self._model = model
        self._sample = sample if ranks.world_size == 1 else partial(sample_in_first, ranks)

    def build(self) -> None:
        self.graphs.build()

    def run(self, parts: Sequence[StepInputs], batch: SamplingBatch | None) -> tuple[Samples, list[Tensor]]:
        hidden = [self._forward(part) for part in parts]
        if batch is None:
            self.computed_at = time.monotonic_ns()
            return Samples(NO_ROWS), hidden
        sampled = torch.cat([states[part.logits_indices] for part, states in zip(parts, hidden, strict=True)])
        samples = self._greedy_samples(sampled) if batch.is_greedy else None
        if samples is None:
            logits = self._model.logits(sampled)
            self.computed_at = time.monotonic_ns()
            samples = self._sample(logits, batch)
        return samples, hidden

    def _greedy_samples(self, hidden: Tensor) -> Samples | None:
        token_ids = self._model.greedy_tokens(hidden)
        self.computed_at = time.monotonic_ns()
        return None if token_ids is None else Samples(token_ids.numpy().astype(np.int32))

    def _forward(self, part: StepInputs) -> Tensor:
        hidden: Tensor = self.graphs.run(part.shape, part.input_ids, part.positions, part.batches)
        self.graphs.num_padding_tokens[part.shape] += part.num_padding_tokens
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def sample_in_first(ranks: Ranks, logits: Tensor, batch: SamplingBatch) -> Samples:
    """Rank 0's samples; the others know the tokens alone, and need neither grammars nor what else changes logits."""
    if ranks.rank == 0:
        samples = sample(logits, batch)
        ranks.broadcast(torch.from_numpy(samples.token_ids))
        return samples
    return Samples(ranks.broadcast(torch.empty(len(logits), dtype=torch.int32)).numpy())


def execution_of(model: Model, configure: Configure, backend: Backend, ranks: Ranks = ALONE) -> Execution:
    """The one that the backend has.

    Raises:
        ConfigurationError: the backend computes in one rank alone.
    """
    if not backend.fuses_sampling:
        return ForwardThenSample(model, configure, backend, ranks)
    if ranks.world_size > 1:
        raise ConfigurationError(
            f"tensor_parallel_size is {ranks.world_size}, and the device {backend.name} draws tokens inside graphs that"
            " know one rank alone; set tensor_parallel_size to 1, or choose device cpu."
        )
    return FusedSampling(model, configure, backend)
