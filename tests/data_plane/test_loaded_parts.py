"""Of a checkpoint, each rank reads its own part and no more; together they read everything as one would."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from ranks_in_threads import RanksAtOnce, run_ranks
from safetensors.torch import load_file, save_file
from tiny_gguf import MODELS, write_gguf
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from blockplane.data_plane.loading import gguf_file
from blockplane.data_plane.loading.build import load_model, load_weights
from blockplane.data_plane.loading.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from blockplane.data_plane.loading.gguf_file import GgufFile
from blockplane.data_plane.loading.named import load_draft_model, load_named
from blockplane.data_plane.ranks.collectives import ALONE, Ranks
from blockplane.protos.config import Config
from blockplane.protos.errors import ModelError

NUM_RANKS = 2


@pytest.fixture(params=[(name, kind) for name in MODELS for kind in ("safetensors", "gguf")], ids="-".join)
def path(request, tmp_path, randomized, save_checkpoint) -> str:
    name, kind = request.param
    model = randomized(MODELS[name]())
    if kind == "gguf":
        return str(write_gguf(tmp_path / "tiny.gguf", model, name))
    return str(save_checkpoint(model, tmp_path))


@pytest.fixture
def llama_path(tmp_path, randomized, save_checkpoint) -> str:
    return str(save_checkpoint(randomized(MODELS["llama"]()), tmp_path))


class Watched:
    """A stored tensor that keeps count of what is read of it."""

    def __init__(self, stored: StoredTensor, num_read: dict[str, int], name: str) -> None:
        self._stored, self._num_read, self._name = stored, num_read, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape

    def read(self, index: tuple[slice, ...] | None = None) -> Tensor:
        tensor = self._stored.read(index)
        self._num_read[self._name] = self._num_read.get(self._name, 0) + tensor.numel()
        return tensor


def watched(checkpoint: Checkpoint, num_read: dict[str, int]) -> Checkpoint:
    tensors = ((name, Watched(stored, num_read, name)) for name, stored in checkpoint.tensors)
    return replace(checkpoint, tensors=tensors)


def test_a_ranks_parameters_are_its_rows_and_columns_of_the_whole_ones(path):
    whole = dict(load_weights(open_checkpoint(path), "float32").named_tensors())

    def check(ranks: Ranks) -> dict[str, int]:
        weights = load_weights(open_checkpoint(path), "float32", ranks=ranks)
        for parameter in weights.parameters():
            expected = whole[parameter.name]
            assert parameter.whole_shape == tuple(expected.shape)
            assert torch.equal(parameter.tensor, expected if parameter.index is None else expected[parameter.index])
        return {parameter.name: parameter.tensor.numel() for parameter in weights.parameters()}

    sizes = run_ranks(NUM_RANKS, check)
    for name, tensor in whole.items():
        num_copies = NUM_RANKS if "norm" in name else 1
        assert sum(of_rank[name] for of_rank in sizes) == num_copies * tensor.numel(), name


def test_a_rank_reads_of_every_tensor_its_own_part_once(path):
    def read(ranks: Ranks) -> None:
        num_read: dict[str, int] = {}
        weights = load_weights(watched(open_checkpoint(path), num_read), "float32", ranks=ranks)
        assert num_read == {name: tensor.numel() for name, tensor in weights.named_tensors()}

    run_ranks(NUM_RANKS, read)


@pytest.fixture
def num_dequantized(monkeypatch) -> list[int]:
    """Numbers of elements, piece by piece."""
    dequantize, counts = gguf.dequantize, []

    def counted(stored: Any, kind: Any) -> Any:
        result = dequantize(stored, kind)
        counts.append(result.size)
        return result

    monkeypatch.setattr(gguf_file.gguf, "dequantize", counted)
    return counts


def test_rows_of_a_gguf_file_are_dequantized_without_the_others(tmp_path, num_dequantized):
    values = torch.randn(1100, 256).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(tmp_path / "quantized.gguf", "llama")
    writer.add_tensor("matrix", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(Path(tmp_path / "quantized.gguf"))
    whole = file.tensor("matrix")
    num_dequantized.clear()
    assert (file.tensor("matrix", range(37, 900)) == whole[37:900]).all()
    assert sum(num_dequantized) == (900 - 37) * 256


def test_a_rank_dequantizes_its_own_rows_alone(tmp_path, randomized, num_dequantized):
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", randomized(MODELS["llama"]()), "llama")))
    num_dequantized.clear()
    weights = load_weights(checkpoint, "float32", ranks=RanksAtOnce(NUM_RANKS).ranks[1])
    # Columns come with all the others of their rows.
    read = (math.prod(p.whole_shape) if p.columns else p.tensor.numel() for p in weights.parameters())
    assert sum(num_dequantized) == sum(read)


def test_biases_of_sums_are_rank_0s_alone(tmp_path, randomized, save_checkpoint):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True}
    path = str(save_checkpoint(randomized(LlamaForCausalLM(LlamaConfig(**sizes, **heads))), tmp_path))

    def biases(ranks: Ranks) -> tuple[Tensor | None, Tensor | None]:
        (layer,) = load_weights(open_checkpoint(path), "float32", ranks=ranks).layers
        return layer.qkv_bias, layer.output_bias

    (first, of_first), (second, of_second) = run_ranks(2, biases)
    whole, of_whole = biases(ALONE)
    assert torch.equal(of_first, of_whole)
    assert of_second is None
    # Queries, keys and values of a head each.
    assert torch.equal(torch.stack((first.view(3, -1), second.view(3, -1)), 1).flatten(), whole)


def test_fp8_scales_are_every_ranks(llama_path):
    file = Path(llama_path) / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(0.5 + layer) for layer in (0, 1) for kind in "kv"
    }
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})

    def scales_of(ranks: Ranks) -> list[tuple[float, float]]:
        model = load_model(open_checkpoint(llama_path), "float32", None, "float8_e4m3fn", ranks=ranks)
        return [(attention.spec.k_scale, attention.spec.v_scale) for attention in model.attentions]

    assert run_ranks(NUM_RANKS, scales_of) == [[(0.5, 0.5), (1.5, 1.5)]] * NUM_RANKS


def test_named_models_and_draft_models_are_divided(llama_path):
    config = Config(dtype="float32", num_draft_tokens=2, draft_source="model", draft_model=llama_path)

    def num_heads(ranks: Ranks) -> list[int]:
        model, info = load_named(llama_path, config, ranks=ranks)
        models = [model, load_draft_model(config, info, ranks=ranks), load_named("synthetic", config, ranks=ranks)[0]]
        return [model.attentions[0].spec.num_heads for model in models]

    assert run_ranks(NUM_RANKS, num_heads) == [[3, 3, 4]] * NUM_RANKS


def test_a_model_that_cannot_be_divided_is_refused_before_anything_is_read(llama_path):
    num_read: dict[str, int] = {}

    def load(ranks: Ranks) -> None:
        load_weights(watched(open_checkpoint(llama_path), num_read), "float32", ranks=ranks)

    with pytest.raises(ModelError, match="6 attention heads cannot be divided among 4 ranks"):
        run_ranks(4, load)
    assert not num_read
