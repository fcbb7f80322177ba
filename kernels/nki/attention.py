"""The reference's functions by kernels for NeuronCores: turns torch tensors into a kernel's arguments and has it run.

Shapes as in `reference`, except that caches are head-major, [num_blocks, num_kv_heads, block_size, head_dim], as
`layout` makes them: they are read and written where they are. Who runs a kernel (a device, a simulator) is the caller's
choice; on a device the reshaping here is a part of the graph around the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockplane.kernels.nki import decode, decode_arguments, prefill_arguments, segmented
from blockplane.kernels.nki.query_groups import TILE, group_queries
from blockplane.kernels.nki.unsupported import is_power_of_two, require
from blockplane.kernels.nki.write_kv import write_kv

NO_SINK = -1e30


@dataclass(frozen=True, slots=True)
class NkiAttention:
    """The reference's functions over a way to run kernels.

    Attributes:
        run: `run(kernel, *arguments)` runs a kernel of this folder, such as `decode.decode_attention`, and returns what
            it returns.
        max_group_queries: into how large groups the queries of a prefill are divided, a multiple of 128; None = as
            large as a core can carry.
    """

    run: Callable[..., Any]
    max_group_queries: int | None = None

    def write_kv(
        self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `reference.write_kv`; FP8 is clamped to what the generation at hand has.

        Raises:
            UnsupportedByKernelError: blocks or caches that row ids cannot count.
        """
        prefill_arguments.check_cache(k_cache)
        if not len(slot_mapping):
            return k_cache, v_cache
        slots = slot_mapping.to(torch.int32)[:, None]
        caches = self.run(write_kv, key.contiguous(), value.contiguous(), as_bytes(k_cache), as_bytes(v_cache), slots)
        return caches[0].view(k_cache.dtype), caches[1].view(v_cache.dtype)

    def decode_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        mask_active: Tensor | None = None,
    ) -> Tensor:
        """As `reference.decode_attention`.

        Raises:
            UnsupportedByKernelError: another dtype or size than the kernel's.
        """
        check_settings(query, scale, attention_chunk_size)
        prefill_arguments.check_cache(k_cache)
        decode_arguments.check_decode(query, k_cache)
        num_kv_heads = k_cache.shape[1]
        output: Tensor = self.run(
            decode.decode_attention,
            decode_arguments.by_item(query, num_kv_heads),
            as_bytes(k_cache),
            as_bytes(v_cache),
            block_table.to(torch.int32),
            seq_lens.to(torch.int32)[:, None],
            decode_arguments.sinks_of(sinks, query, num_kv_heads),
            decode_arguments.active_mask_of(query, seq_lens, mask_active, attention_chunk_size, num_kv_heads),
            query.shape[1],
            scale,
            sliding_window or 0,
            attention_chunk_size or 0,
            soft_cap or 0.0,
        )
        return decode_arguments.by_head(output, query.shape)

    def segmented_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        prior_tokens: Tensor,
        *,
        kv_segment_size: int,
        scale: float,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `reference.segmented_attention`.

        Raises:
            UnsupportedByKernelError: another dtype, size or alignment than the kernel's, a table that lacks a block
                which a query sees, or an unsegmented request that takes several groups, of which each has the earlier
                ones as its prior KV.
        """
        check_settings(query, scale, attention_chunk_size)
        prefill_arguments.check_cache(k_cache)
        prefill_arguments.check_queries(query, prior_tokens, k_cache.shape[2], kv_segment_size)
        num_heads, head_dim = query.shape[1:]
        fitting = TILE * (segmented.max_units(head_dim) // (num_heads // k_cache.shape[1]))
        groups = group_queries(query_start_loc, prior_tokens, self.max_group_queries or fitting)
        if not len(groups.rows):
            return torch.zeros_like(query)
        require(
            kv_segment_size > 0 or len(groups.rows) == len(set(groups.rows.tolist())),
            f"kv_segment_size is 0, and a request has more than the {groups.token_ids.shape[1]} tokens of a group,"
            f" which reads no prior KV then: give one of {segmented.SEGMENT_SIZES}.",
        )
        output = self.run(
            segmented.segmented_attention,
            groups.pack(query),
            as_bytes(k_cache),
            as_bytes(v_cache),
            prefill_arguments.table_of(
                groups, block_table, k_cache.shape[2], kv_segment_size, sliding_window, attention_chunk_size
            ),
            groups.prior_tokens,
            groups.num_tokens,
            sinks_of_heads(sinks, query)[None],
            kv_segment_size,
            scale,
            sliding_window or 0,
            attention_chunk_size or 0,
            soft_cap or 0.0,
        )
        return groups.unpack(output, query)


def check_settings(query: Tensor, scale: float, attention_chunk_size: int | None) -> None:
    require(
        query.dtype.itemsize == 2, f"Queries are {query.dtype}, and TensorE takes 2 bytes here: give torch.bfloat16."
    )
    require(
        scale > 0,
        f"scale is {scale}, and the kernels take the greatest product for the greatest logit: give more than 0.",
    )
    require(
        attention_chunk_size is None or is_power_of_two(attention_chunk_size),
        f"attention_chunk_size is {attention_chunk_size}, and the kernels round positions by bits: give a power of 2.",
    )


def sinks_of_heads(sinks: Tensor | None, query: Tensor) -> Tensor:
    """float32 [num_heads]; without sinks, what weighs nothing."""
    heads = query.new_full((query.shape[-2],), NO_SINK) if sinks is None else sinks
    return heads.float().clamp(min=NO_SINK)


def as_bytes(cache: Tensor) -> Tensor:
    """FP8 as bytes, since which FP8 they are is the generation's matter; any other cache as it is."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
