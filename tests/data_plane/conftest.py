"""Fixtures of the model tests: tiny Hugging Face checkpoints, and what drives a model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from block_kv import BlockKVDriver
from nki_on_cpu import ensure_nki
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel

# Kernels for NeuronCores import it, where tests run them.
ensure_nki()

VOCAB_SIZE = 96
BOS, EOS = 1, 2


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
