"""The reference's functions inside of a compiled graph: as `attention`, but shapes alone decide, and no number is read.

So a prefill's requests begin at multiples of 128 tokens, where `attention` puts them for itself, and what `attention`
checks by looking is the caller's to keep: prior tokens are whole blocks, and no block that a query sees is missing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockplane.kernels.nki import prefill_arguments
from blockplane.kernels.nki.attention import NkiAttention, as_bytes, check_settings, sinks_of_heads
from blockplane.kernels.nki.decode import decode_attention
from blockplane.kernels.nki.query_groups import TILE
from blockplane.kernels.nki.segmented import SEGMENT_SIZES, max_units, segmented_attention
from blockplane.kernels.nki.write_kv import write_kv
from blockplane.kernels.slots import SKIP_BLOCK_ID

KERNELS = (write_kv, decode_attention, segmented_attention)
"""All that a `GraphAttention` asks its runner for."""


@dataclass(frozen=True, slots=True)
class GraphAttention(NkiAttention):
    """`NkiAttention`, which a compiler can trace."""

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
        """As `reference.segmented_attention`. One request's queries are as few groups as fit on a core, each of which
        reads its prior KV once; those of several are groups of 128. The later groups of a request have the earlier ones
        among their prior KV.

        Args:
            query: [num_tokens, ...], num_tokens a multiple of 128. Segments that begin at another place than a
                multiple of 128 are gaps, whose output is zero.
            kv_segment_size: 0 only where no request has prior tokens: then a group's prior KV is its own request's.
        """
        kv_segment_size = kv_segment_size or SEGMENT_SIZES[0]
        check_settings(query, scale, attention_chunk_size)
        prefill_arguments.check_cache(k_cache)
        num_tokens, num_heads, head_dim = query.shape
        group_size = TILE
        if len(block_table) == 1:
            group_size = _largest_group(num_tokens, max_units(head_dim) // (num_heads // k_cache.shape[1]))
        first = torch.arange(0, num_tokens, group_size, dtype=torch.int32, device=query.device)
        # The last segment that begins no later than the group.
        segment = (query_start_loc[:-1] <= first[:, None]).sum(dim=1) - 1
        length = (query_start_loc[1:][segment] - first).clamp(0, group_size)
        prior = torch.where(length > 0, prior_tokens[segment] + first - query_start_loc[segment], 0)
        output: Tensor = self.run(
            segmented_attention,
            query.reshape(-1, group_size, num_heads, head_dim),
            as_bytes(k_cache),
            as_bytes(v_cache),
            _table(block_table, k_cache.shape[2], kv_segment_size, group_size)[segment],
            prior.to(torch.int32)[:, None],
            length.to(torch.int32)[:, None],
            sinks_of_heads(sinks, query)[None],
            kv_segment_size,
            scale,
            sliding_window or 0,
            attention_chunk_size or 0,
            soft_cap or 0.0,
        )
        return output.reshape(query.shape)


def _largest_group(num_tokens: int, max_tiles: int) -> int:
    """Queries of a group, of at most so many tiles, such that equal groups make up the tokens."""
    num_tiles = num_tokens // TILE
    count = max(1, min(max_tiles, num_tiles))
    while num_tiles % count:
        count -= 1
    return TILE * count


def _table(block_table: Tensor, block_size: int, kv_segment_size: int, group_size: int) -> Tensor:
    """int32 [num_segments, width], with room for a group behind a row's end, in whole segments of KV."""
    segment_blocks = kv_segment_size // block_size
    width = block_table.shape[1] + -(-group_size // block_size)
    missing = -(-width // segment_blocks) * segment_blocks - block_table.shape[1]
    return pad(block_table, (0, missing), value=SKIP_BLOCK_ID).to(torch.int32)
