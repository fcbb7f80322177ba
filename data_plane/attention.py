"""One attention layer's KV cache and the two ways to read it; knows neither rows nor the model around it."""

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from blockplane.data_plane.backends.backend import Kernels


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention is: fixed by the model, the same for every step.

    Attributes:
        scale: factor on query . key.
        sliding_window: how many keys a query sees, its own included; None = all.
        attention_chunk_size: tokens; a query sees its own chunk, up to itself; None = no chunks. It overrules
            `sliding_window`.
        soft_cap: scores become cap * tanh(score / cap); None = untouched.
        sinks: [num_heads] weights of the model, one logit per head that takes its part of the softmax and gives no
            value; None = none. Two specs are equal whatever theirs.
        k_scale, v_scale: what an FP8 cache's numbers are multiplied by to be keys and values; no other cache has them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    k_scale: float = 1.0
    v_scale: float = 1.0


class AttentionBatch(Protocol):
    """The step's side of attention in one KV cache group: which slots new KV goes to and which blocks are read."""

    @property
    def slot_mapping(self) -> Tensor: ...

    def attend(
        self, kernels: Kernels, spec: AttentionSpec, query: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor: ...

    def copied_to(self, device: torch.device) -> Self: ...


AttentionBatches = tuple[AttentionBatch, ...]
"""One per KV cache group; they differ in slots and blocks only."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows with as many new tokens each, padded to a bucket of `num_seqs`; several are a chain, the first a sampled
    token and the others drafts.

    slot_mapping: int64 [num_seqs * num_new_tokens], row by row, -1 on padding. block_table: int32 [num_seqs, width],
    -1 = skip. seq_lens: int32 [num_seqs], the new tokens included; 0 on padding rows. A row with fewer tokens has them
    at the end of its own.

    Of a window the table may lack what lies before it: `seq_lens` counts from the table's first token on. That is all
    that a kernel need know, since within a window only distances matter.
    """

    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor

    def attend(self, kernels: Kernels, spec: AttentionSpec, query: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        rows = query.view(self.seq_lens.shape[0], -1, *query.shape[1:])
        return kernels.decode_attention(
            rows,
            k_cache,
            v_cache,
            self.block_table,
            self.seq_lens,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            attention_chunk_size=spec.attention_chunk_size,
            soft_cap=spec.soft_cap,
            sinks=spec.sinks,
        ).view_as(query)

    def copied_to(self, device: torch.device) -> "DecodeBatch":
        copied = (tensor.to(device, copy=True) for tensor in (self.slot_mapping, self.block_table, self.seq_lens))
        return DecodeBatch(*copied)


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Segments of several requests, packed and padded to a bucket of `num_tokens`.

    slot_mapping: int64 [num_tokens], -1 on padding. block_table: int32 [num_segments, width], -1 = skip.
    query_start_loc: int32 [num_segments + 1]. prior_tokens: int32 [num_segments], tokens in the cache before. Padding
    between two requests, whose segments a backend wants to begin at its tiles, is a segment of no blocks.
    kv_segment_size: tokens of prior KV that a kernel reads at a time; 0 = unsegmented, and no prior KV is read.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    prior_tokens: Tensor
    kv_segment_size: int

    def attend(self, kernels: Kernels, spec: AttentionSpec, query: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return kernels.segmented_attention(
            query,
            k_cache,
            v_cache,
            self.block_table,
            self.query_start_loc,
            self.prior_tokens,
            kv_segment_size=self.kv_segment_size,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            attention_chunk_size=spec.attention_chunk_size,
            soft_cap=spec.soft_cap,
            sinks=spec.sinks,
        )

    def copied_to(self, device: torch.device) -> "PrefillBatch":
        return PrefillBatch(
            self.slot_mapping.to(device, copy=True),
            self.block_table.to(device, copy=True),
            self.query_start_loc.to(device, copy=True),
            self.prior_tokens.to(device, copy=True),
            self.kv_segment_size,
        )


class Attention:
    """A layer's attention with its KV cache; the cache changes only here, inside the model's forward."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.caches: tuple[Tensor, Tensor] | None = None
        self._kernels: Kernels | None = None
        self.group = 0

    def bind_kv_cache(self, k_cache: Tensor, v_cache: Tensor, kernels: Kernels, group: int = 0) -> None:
        """Take the caches that KV planning allotted, and the kernels for the layout that they have.

        `group` is the KV cache group whose block table finds this layer's blocks in them.
        """
        self.caches, self._kernels = (k_cache, v_cache), kernels
        self.group = group

    def rescale(self, k_scale: float, v_scale: float) -> None:
        """Take other scales, for what is written from now on: nothing that was written before may be read."""
        self.spec = replace(self.spec, k_scale=k_scale, v_scale=v_scale)

    def bound(self) -> tuple[tuple[Tensor, Tensor], Kernels]:
        """The caches, and the kernels for them."""
        assert self.caches is not None, "bind_kv_cache comes before the first forward"
        assert self._kernels is not None, "bind_kv_cache gives both"
        return self.caches, self._kernels

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batches: AttentionBatches) -> Tensor:
        """Write the new KV, then attend.

        Args:
            query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].

        Returns:
            [num_tokens, num_heads, head_dim]
        """
        (caches, kernels), batch, spec = self.bound(), batches[self.group], self.spec
        if caches[0].dtype != torch.float8_e4m3fn:
            caches = kernels.write_kv(key, value, *caches, batch.slot_mapping)
            return batch.attend(kernels, spec, query, *caches)
        # Scores are linear in keys and outputs in values, so that the scales of what is read are factors of these.
        scaled_kv = key.float() / spec.k_scale, value.float() / spec.v_scale
        caches = kernels.write_kv(*scaled_kv, *caches, batch.slot_mapping)
        scaled = replace(spec, scale=spec.scale * spec.k_scale)
        return batch.attend(kernels, scaled, query, *caches) * spec.v_scale
