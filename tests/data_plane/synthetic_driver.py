"""Runs the synthetic model over texts in scattered blocks, step by step; knows neither plans nor the worker."""

import random

import torch
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatch, DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.models.synthetic_arithmetic import NUM_CHANNELS
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID, slots_of


class SyntheticDriver:
    """Rows of texts with their states so far; row r's blocks are `block_table[r]`, in random order, never block 0.

    `fill` is what lies in every slot before it is written.
    """

    def __init__(
        self,
        texts: list[list[int]],
        *,
        model: SyntheticModel | None = None,
        kv_dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        fill: float = float("nan"),
        seed: int = 0,
    ) -> None:
        self.texts = [list(text) for text in texts]
        self.states: list[list[int]] = [[] for _ in texts]
        self.model = model or SyntheticModel("float32")
        self.block_size = block_size
        width = max(map(len, texts)) // block_size + 5
        blocks = random.Random(seed).sample(range(1, 2 * len(texts) * width), len(texts) * width)
        self.block_table = torch.tensor(blocks, dtype=torch.int32).view(len(texts), width)
        num_kv_heads = self.model.attentions[0].spec.num_kv_heads
        shape = 2 * len(texts) * width, block_size, num_kv_heads, NUM_CHANNELS
        self.caches = [
            (torch.full(shape, fill).to(kv_dtype), torch.full(shape, fill).to(kv_dtype)) for _ in self.model.attentions
        ]

    def bind(self) -> None:
        """Give the model these caches: several drivers may share one model."""
        for attention, caches in zip(self.model.attentions, self.caches, strict=True):
            attention.bind_kv_cache(*caches, CPU.kernels)

    def prefill(self, *segments: tuple[int, int], padding: int = 0) -> Tensor:
        """Compute the next `num_tokens` of each (row, num_tokens), packed; the hidden states without the padding."""
        rows = [row for row, num_tokens in segments for _ in range(num_tokens)]
        positions = [len(self.states[row]) + i for row, num_tokens in segments for i in range(num_tokens)]
        bounds = torch.tensor([0, *(num_tokens for _, num_tokens in segments)]).cumsum(0)
        chosen = [row for row, _ in segments]
        batch = PrefillBatch(
            slot_mapping=self.slots(rows, positions, padding),
            block_table=self.table(chosen, [len(self.states[row]) + num_tokens for row, num_tokens in segments]),
            query_start_loc=bounds.int(),
            prior_tokens=torch.tensor([len(self.states[row]) for row in chosen], dtype=torch.int32),
            kv_segment_size=512,
        )
        return self._forward(rows, positions, batch, padding)

    def decode(self, *rows: int, padding: int = 0) -> Tensor:
        """Compute the next token of each row; the hidden states without the padding."""
        positions = [len(self.states[row]) for row in rows]
        seq_lens = [position + 1 for position in positions]
        batch = DecodeBatch(
            slot_mapping=self.slots(list(rows), positions, padding),
            block_table=torch.nn.functional.pad(
                self.table(list(rows), seq_lens), (0, 0, 0, padding), value=SKIP_BLOCK_ID
            ),
            seq_lens=torch.tensor(seq_lens + [0] * padding, dtype=torch.int32),
        )
        return self._forward(list(rows), positions, batch, padding)

    def slot(self, row: int, position: int) -> tuple[int, int]:
        """(block, offset) of a token's KV."""
        return int(self.block_table[row, position // self.block_size]), position % self.block_size

    def slots(self, rows: list[int], positions: list[int], padding: int = 0) -> Tensor:
        """The slots of the tokens, then padding."""
        slots = slots_of(self.block_table, torch.tensor(rows), torch.tensor(positions), self.block_size)
        return torch.cat([slots, slots.new_full((padding,), PAD_SLOT_ID)])

    def table(self, rows: list[int], seq_lens: list[int]) -> Tensor:
        """The blocks in use; the rest of each row is -1."""
        table = self.block_table[rows]
        in_use = torch.arange(table.shape[1]) * self.block_size < torch.tensor(seq_lens)[:, None]
        return torch.where(in_use, table, SKIP_BLOCK_ID)

    def _forward(self, rows: list[int], positions: list[int], batch: AttentionBatch, padding: int) -> Tensor:
        self.bind()
        token_ids = [self.texts[row][position] for row, position in zip(rows, positions, strict=True)]
        pad = [0] * padding
        hidden = self.model.forward(torch.tensor(token_ids + pad), torch.tensor(positions + pad), (batch,))[: len(rows)]
        for row, state in zip(rows, hidden[:, 0].tolist(), strict=True):
            self.states[row].append(state)
        return hidden
