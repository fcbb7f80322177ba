"""A rank's attention where neighbours share the positions of their heads' KV; knows neither models nor steps.

Of C ranks that have the same KV heads each keeps every C-th position, in blocks that all of them number alike: each has
1/C of the KV that it would have alone, and a pool of the same memory holds C times the tokens.

What a rank gets from the C - 1 others, per token and layer, where each has `num_heads` query heads:

    their queries                  (C - 1) * num_heads * head_dim * bytes of the query's dtype
    their parts of all C's heads   (C - 1) * C * num_heads * (head_dim + 1) * 4 bytes

Both depend on the tokens that a step computes alone, and not on how long their contexts are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockplane.data_plane.backends.backend import Backend, Kernels, PartialKernels
from blockplane.data_plane.ranks.collectives import Ranks
from blockplane.kernels.context_parallel import combine
from blockplane.protos.errors import ConfigurationError, ProtocolError
from blockplane.protos.plan import Configure


def kernels_of(backend: Backend, configure: Configure, ranks: Ranks) -> Kernels:
    """The backend's kernels; where ranks share positions, with attention over what all of them keep.

    Raises:
        ProtocolError: the engine counts on another number of ranks that share positions, or they cannot share its
            blocks.
        ConfigurationError: the backend cannot attend to a part of the positions.
    """
    share, told = ranks.context_parallel, configure.context_parallel_size
    if told != share.world_size:
        raise ProtocolError(
            f"the engine asks for blocks that {told} ranks share, and {share.world_size} share them here; run the same"
            " version of Blockplane on both."
        )
    if share.world_size == 1:
        return backend.kernels
    if configure.block_size % (share.world_size * share.interleave_size):
        raise ProtocolError(
            f"the engine asks for blocks of {configure.block_size} tokens, which {share.world_size} ranks cannot share"
            f" in runs of {share.interleave_size}; run the same version of Blockplane on both."
        )
    if backend.kernels.partial is None:
        raise ConfigurationError(
            f"context_parallel_size is {share.world_size}, and device {backend.name} has no attention over a part of"
            " the positions; set context_parallel_size to 1."
        )
    attention = _SharedAttention(backend.kernels.partial, ranks)
    return Kernels(backend.kernels.write_kv, attention.decode_attention, attention.segmented_attention)


@dataclass(frozen=True, slots=True)
class _SharedAttention:
    """Twins of `kernels.reference`'s attentions, of a rank's own heads over all positions; all ranks call them at once.

    The caches are this rank's, whose blocks have the places of its own positions alone.
    """

    partial: PartialKernels
    ranks: Ranks

    def decode_attention(self, query: Tensor, *context: Tensor, sinks: Tensor | None, **settings: Any) -> Tensor:
        return self._attend(self.partial.decode_attention, query, context, sinks, settings)

    def segmented_attention(self, query: Tensor, *context: Tensor, sinks: Tensor | None, **settings: Any) -> Tensor:
        return self._attend(self.partial.segmented_attention, query, context, sinks, settings)

    def _attend(
        self,
        partial_attention: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        context: tuple[Tensor, ...],
        sinks: Tensor | None,
        settings: dict[str, Any],
    ) -> Tensor:
        """Every rank attends to its positions from all ranks' heads, and puts together the parts of its own."""
        share, num_heads = self.ranks.context_parallel, query.shape[-2]
        queries = self.ranks.gather_context(query).movedim(0, -3).flatten(-3, -2)
        part = partial_attention(queries, *context, context_parallel=share, **settings)
        # Side by side, so that one call moves both.
        parts = self.ranks.gather_context(torch.cat((part[0], part[1][..., None]), dim=-1))
        own = parts.narrow(-2, share.rank * num_heads, num_heads)
        return combine(own[..., :-1], own[..., -1], sinks).to(query.dtype)
