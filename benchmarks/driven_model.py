"""Drives a model over one text, segment by segment or token by token; knows neither rows nor plans."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatch, DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.kv_cache import bind_kv_caches
from blockplane.data_plane.models.interface import Model
from blockplane.protos.plan import Configure

BLOCK_SIZE = 32
SEGMENT_SIZE = 512


class DrivenModel:
    """A model on this CPU whose KV cache holds one text, in blocks from 1 on."""

    def __init__(self, model: Model, max_tokens: int) -> None:
        self.model = model
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        bind_kv_caches(model, Configure(BLOCK_SIZE, num_blocks + 1, max_tokens, (SEGMENT_SIZE,), (1,)), CPU)
        self._block_table = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]

    def prefill(self, token_ids: Sequence[int], start: int = 0) -> Tensor:
        """Compute a segment behind the first `start` tokens. Returns its hidden states [num_tokens, hidden_size]."""
        positions = torch.arange(start, start + len(token_ids))
        batch = PrefillBatch(
            self._slots(positions),
            self._block_table,
            torch.tensor([0, len(token_ids)], dtype=torch.int32),
            torch.tensor([start], dtype=torch.int32),
            SEGMENT_SIZE,
        )
        return self._forward(token_ids, positions, batch)

    def decode(self, token_id: int, position: int) -> Tensor:
        """Compute one token behind all before it. Returns its hidden state [1, hidden_size]."""
        positions = torch.tensor([position])
        seq_lens = torch.tensor([position + 1], dtype=torch.int32)
        return self._forward([token_id], positions, DecodeBatch(self._slots(positions), self._block_table, seq_lens))

    def _forward(self, token_ids: Sequence[int], positions: Tensor, batch: AttentionBatch) -> Tensor:
        return self.model.forward(torch.tensor(token_ids), positions, (batch,))

    def _slots(self, positions: Tensor) -> Tensor:
        return self._block_table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
