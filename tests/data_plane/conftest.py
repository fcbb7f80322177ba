"""Fixtures of the model tests: tiny Hugging Face checkpoints, and a driver that runs a model through block KV."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from nki_on_cpu import ensure_nki
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel

from blockplane.data_plane.attention import DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.models.interface import Model
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID, slots_of

# Kernels for NeuronCores import it, where tests run them.
ensure_nki()

VOCAB_SIZE = 96
BOS, EOS = 1, 2


class BlockKVDriver:
    """Feeds one sequence to a model: its blocks are scattered, every slot that it does not own holds NaN."""

    def __init__(self, model: Model, block_size: int, max_tokens: int) -> None:
        self.model = model
        self.block_size = block_size
        num_blocks = -(-max_tokens // block_size)
        total_blocks = 2 * num_blocks + 1
        # Block 0 is the null block; the table names every other of the rest, out of order, and ends in skips.
        blocks = 1 + torch.randperm(total_blocks - 1)[:num_blocks]
        self.block_table = torch.cat((blocks, torch.full((2,), SKIP_BLOCK_ID)))[None].to(torch.int32)
        self.num_computed_tokens = 0
        for attention in model.attentions:
            shape = (total_blocks, block_size, attention.spec.num_kv_heads, attention.spec.head_dim)
            caches = (torch.full(shape, float("nan"), dtype=getattr(torch, model.kv_cache_dtype)) for _ in range(2))
            attention.bind_kv_cache(*caches, CPU.kernels)

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
        slots = slots_of(self.block_table, torch.zeros_like(positions), positions, self.block_size)
        slots[num_real:] = PAD_SLOT_ID
        return slots


@pytest.fixture
def block_kv_driver() -> type[BlockKVDriver]:
    return BlockKVDriver


@pytest.fixture
def randomized() -> Callable[[PreTrainedModel], PreTrainedModel]:
    """Gives a model weights under which every norm, bias and projection matters."""

    def randomize(model: PreTrainedModel) -> PreTrainedModel:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                offset = parameter if "norm" in name else 0.0
                parameter.copy_(offset + 0.2 * torch.randn(parameter.shape, generator=generator))
        return model.eval()

    return randomize


@pytest.fixture
def save_checkpoint() -> Callable[..., Path]:
    """Writes a model with a tiny tokenizer that puts BOS before a text."""

    def save(model: PreTrainedModel, directory: Path, **settings: object) -> Path:
        model.save_pretrained(directory, **settings)
        vocabulary = {"<unk>": 0, "<s>": BOS, "</s>": EOS, "a": 3}
        vocabulary |= {f"t{index}": index for index in range(len(vocabulary), VOCAB_SIZE)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    return save
