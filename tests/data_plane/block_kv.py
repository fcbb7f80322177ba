"""Drives a model over one sequence in scattered blocks; knows neither plans nor steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockplane.data_plane.attention import DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.ranks.context_kernels import kernels_of
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID, slots_of
from blockplane.protos.plan import Configure


class BlockKVDriver:
    """Feeds one sequence to a model: its blocks are scattered, every slot that it does not own holds NaN."""

    def __init__(self, model: Model, block_size: int, max_tokens: int, ranks: Ranks = ALONE) -> None:
        """`block_size`: tokens of a block that this one of the ranks keeps."""
        self.model = model
        self.block_size, self.context_parallel = block_size, ranks.context_parallel
        num_sharing = self.context_parallel.world_size
        num_blocks = -(-max_tokens // (block_size * num_sharing))
        total_blocks = 2 * num_blocks + 1
        # Block 0 is the null block; the table names every other of the rest, out of order, and ends in skips.
        blocks = 1 + torch.randperm(total_blocks - 1)[:num_blocks]
        self.block_table = torch.cat((blocks, torch.full((2,), SKIP_BLOCK_ID)))[None].to(torch.int32)
        self.num_computed_tokens = 0
        configure = Configure(block_size * num_sharing, total_blocks, 1, (1,), (1,), context_parallel_size=num_sharing)
        for attention in model.attentions:
            shape = (total_blocks, block_size, attention.spec.num_kv_heads, attention.spec.head_dim)
            caches = (torch.full(shape, float("nan"), dtype=getattr(torch, model.kv_cache_dtype)) for _ in range(2))
            attention.bind_kv_cache(*caches, kernels_of(CPU, configure, ranks))

    def prefill(self, token_ids: Sequence[int], num_padding: int = 0) -> Tensor:
        """Run one segment, padded; return its logits [num_tokens, vocab_size]."""
        prior, count = self.num_computed_tokens, len(token_ids)
        padding = torch.zeros(num_padding, dtype=torch.int64)
        positions = torch.cat((torch.arange(prior, prior + count), padding))
        batch = PrefillBatch(
            slot_mapping=self._slots(positions, count),
            block_table=self.block_table,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            prior_tokens=torch.tensor([prior], dtype=torch.int32),
            kv_segment_size=512,
        )
        hidden = self.model.forward(torch.cat((torch.tensor(token_ids), padding)), positions, (batch,))
        self.num_computed_tokens += count
        return self.model.logits(hidden[:count])

    def decode(self, token_id: int) -> Tensor:
        """Run one token beside a padding row; return its logits [1, vocab_size]."""
        positions = torch.tensor([self.num_computed_tokens, 0])
        batch = DecodeBatch(
            slot_mapping=self._slots(positions, 1),
            block_table=torch.cat((self.block_table, torch.full_like(self.block_table, SKIP_BLOCK_ID))),
            seq_lens=torch.tensor([self.num_computed_tokens + 1, 0], dtype=torch.int32),
        )
        hidden = self.model.forward(torch.tensor([token_id, 0]), positions, (batch,))
        self.num_computed_tokens += 1
        return self.model.logits(hidden[:1])

    def _slots(self, positions: Tensor, num_real: int) -> Tensor:
        rows = torch.zeros_like(positions)
        slots = slots_of(self.block_table, rows, positions, self.block_size, self.context_parallel)
        slots[num_real:] = PAD_SLOT_ID
        return slots


def logits_of(path: str, token_ids: Sequence[int], ranks: Ranks = ALONE) -> Tensor:
    """Of a checkpoint in float32, at each of the tokens: two padded prompt segments, of 6 and 8, and then decodes."""
    model = load_model(open_checkpoint(path), "float32", max_model_len=len(token_ids), ranks=ranks)
    driver = BlockKVDriver(model, 4, len(token_ids), ranks)
    parts = [driver.prefill(token_ids[:6], num_padding=3), driver.prefill(token_ids[6:14], num_padding=1)]
    return torch.cat(parts + [driver.decode(token_id) for token_id in token_ids[14:]])
