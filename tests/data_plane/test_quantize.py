"""A decoder with quantized weights, end to end: it computes with what the codes stand for, and is another model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_kv import BlockKVDriver
from ranks_in_threads import run_ranks
from torch import Tensor
from torch.testing import assert_close
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from blockplane.data_plane.loading.build import load_model, load_weights
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.loading.named import load_named
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.transformer import Transformer
from blockplane.data_plane.models.weights import DecoderWeights
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.data_plane.reloading import WeightSource
from blockplane.kernels.quantization import quantize
from blockplane.protos.config import Config

# Of two ranks each has whole groups of every product's input, and whole panels of the gated one.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
MODELS = {
    "own output, biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "tied output": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8)),
}
TOKEN_IDS = torch.randint(0, SIZES["vocab_size"], (20,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER_BITS = {"int8": 8, "int4": 4}


@pytest.fixture(params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path: Path, randomized: Callable, save_checkpoint: Callable) -> str:
    return str(save_checkpoint(randomized(MODELS[request.param]()), tmp_path))


def logits_of(model: Model, ranks: Ranks = ALONE) -> Tensor:
    """Of a prompt and a few decodes."""
    driver = BlockKVDriver(model, 4, len(TOKEN_IDS), ranks)
    parts = [driver.prefill(TOKEN_IDS[:15])] + [driver.decode(token_id) for token_id in TOKEN_IDS[15:]]
    return torch.cat(parts)


def load(path: str, **settings: Any) -> Transformer:
    model = load_named(path, Config(model=path, **settings))[0]
    assert isinstance(model, Transformer)
    return model


def put_numbers_of_codes(weights: DecoderWeights, other_bits: int) -> None:
    """In the place of each quantized weight."""
    sensitive = [weights.embeddings, *(layer.qkv for layer in weights.layers)]
    if weights.output is not weights.embeddings:
        sensitive.append(weights.output)
    others = [matrix for layer in weights.layers for matrix in (layer.output, layer.gate_up, layer.down)]
    for matrices, bits in ((sensitive, 8), (others, other_bits)):
        for matrix in matrices:
            matrix.copy_(quantize(matrix, bits).numbers())


@pytest.mark.parametrize("setting", OTHER_BITS)
def test_it_computes_with_the_numbers_of_the_codes(path: str, setting: str) -> None:
    checkpoint = open_checkpoint(path)
    weights = load_weights(checkpoint, "float32")
    put_numbers_of_codes(weights, OTHER_BITS[setting])
    expected = logits_of(Transformer(checkpoint.config, weights))
    logits = logits_of(load(path, dtype="float32", quantize=setting))
    assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert not torch.allclose(logits, logits_of(load(path, dtype="float32")), rtol=1e-3)


@pytest.mark.parametrize(("setting", "least"), [("int8", 0.99), ("int4", 0.9)])
def test_in_bfloat16_it_stays_near_the_unquantized_model(path: str, setting: str, least: float) -> None:
    expected, logits = logits_of(load(path, dtype="float32")), logits_of(load(path, quantize=setting))
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > least


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_fingerprint_is_of_its_own_since_its_kv_is(path: str, dtype: str) -> None:
    prints = {setting: load(path, dtype=dtype, quantize=setting).fingerprint for setting in ("none", "int8", "int4")}
    assert len(set(prints.values())) == 3
    assert load(path, dtype=dtype, quantize="int4").fingerprint == prints["int4"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("setting", OTHER_BITS)
def test_weights_that_are_read_anew_are_quantized_anew(
    tmp_path: Path, randomized: Callable, save_checkpoint: Callable, dtype: str, setting: str
) -> None:
    model, folders = randomized(MODELS["tied output"]()), [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        save_checkpoint(model, folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.75).add_(0.01)
    config = Config(model=str(folders[0]), dtype=dtype, quantize=setting)
    ours, info = load_named(config.model, config)
    WeightSource(ours, info, config).read(str(folders[1]))()
    expected = load(str(folders[1]), dtype=dtype, quantize=setting)
    assert torch.equal(logits_of(ours), logits_of(expected))
    assert ours.fingerprint == expected.fingerprint


@pytest.mark.parametrize("setting", OTHER_BITS)
def test_ranks_that_quantize_their_own_parts_say_what_one_says(path: str, setting: str) -> None:
    def say(ranks: Ranks) -> Tensor:
        model = load_model(open_checkpoint(path), "float32", ranks=ranks, quantize=setting)
        return logits_of(model, ranks)

    alone = say(ALONE)
    for logits in run_ranks(2, say):
        assert_close(logits, alone, rtol=1e-4, atol=1e-4 * alone.abs().max().item())
