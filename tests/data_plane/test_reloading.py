"""Weights read anew: the model is then the one that was read, in the tensors that were there, or the one it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from blockplane.data_plane.loading.named import load_named
from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.models.transformer import Transformer
from blockplane.data_plane.reloading import WeightSource
from blockplane.protos.config import Config, load_config
from blockplane.protos.errors import ModelError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "biases, output of its own": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "normed queries, tied output": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "norms that add one": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8)),
}
TEXT = list(range(3, 23))


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[], PreTrainedModel]:
    return request.param


@pytest.fixture
def old_and_new(tmp_path: Path, randomized: Callable, save_checkpoint: Callable) -> Callable[..., tuple[Path, Path]]:
    """Writes two checkpoints that differ in every number."""

    def write(make: Callable[[], PreTrainedModel]) -> tuple[Path, Path]:
        model, folders = randomized(make()), (tmp_path / "old", tmp_path / "new")
        for folder in folders:
            save_checkpoint(model, folder)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.75).add_(0.01)
        return folders

    return write


@pytest.fixture
def llamas(old_and_new: Callable[..., tuple[Path, Path]]) -> tuple[Path, Path]:
    return old_and_new(MODELS["biases, output of its own"])


def settings(path: Path, **others: str) -> Config:
    return load_config({"model": str(path), "dtype": "float32", **others}, {})


def loaded(path: Path, **others: str) -> tuple[Transformer, WeightSource]:
    config = settings(path, **others)
    model, info = load_named(config.model, config)
    assert isinstance(model, Transformer)
    return model, WeightSource(model, info, config)


def logits_of(model: Transformer, driver: type) -> Tensor:
    torch.manual_seed(0)
    return driver(model, 4, 32).prefill(TEXT)


def test_a_refilled_model_is_the_one_whose_weights_were_read(
    make: Callable, old_and_new: Callable, block_kv_driver: type
) -> None:
    old, new = old_and_new(make)
    model, weights = loaded(old)
    expected, _ = loaded(new)
    before = logits_of(model, block_kv_driver)
    weights.read(str(new))()
    after = logits_of(model, block_kv_driver)
    assert torch.equal(after, logits_of(expected, block_kv_driver))
    assert model.fingerprint == expected.fingerprint
    assert not torch.allclose(after, before, atol=1e-2)


def tensors_of(model: object, seen: set[int]) -> list[Tensor]:
    """Every tensor that a model holds, in one order."""
    if id(model) in seen:
        return []
    seen.add(id(model))
    if isinstance(model, Tensor):
        return [model]
    parts = model if isinstance(model, list | tuple) else list(getattr(model, "__dict__", {}).values())
    return [tensor for part in parts for tensor in tensors_of(part, seen)]


def test_every_tensor_stays_where_it_is(make: Callable, old_and_new: Callable) -> None:
    old, new = old_and_new(make)
    model, weights = loaded(old)
    places = [tensor.data_ptr() for tensor in tensors_of(model, set())]
    assert len(places) > 10
    weights.read(str(new))()
    assert [tensor.data_ptr() for tensor in tensors_of(model, set())] == places


def test_what_is_read_changes_nothing_until_it_is_written(llamas: tuple[Path, Path], block_kv_driver: type) -> None:
    old, new = llamas
    model, weights = loaded(old)
    before, fingerprint = logits_of(model, block_kv_driver), model.fingerprint
    weights.read(str(new))
    assert torch.equal(logits_of(model, block_kv_driver), before)
    assert model.fingerprint == fingerprint


def test_no_name_is_where_they_were_read_the_last_time(llamas: tuple[Path, Path]) -> None:
    old, new = llamas
    model, weights = loaded(old)
    first = model.fingerprint
    weights.read("")()
    assert model.fingerprint == first
    weights.read(str(new))()
    second = model.fingerprint
    add(new, {"model.norm.weight": torch.full((48,), 3.0)})
    weights.read("")()
    assert len({first, second, model.fingerprint}) == 3


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def of_another_shape(folder: Path) -> None:
    add(folder, {"model.norm.weight": torch.ones(5)})


def without_the_last_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name != "model.norm.weight"}
    save_file(kept, file, metadata={"format": "pt"})


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def of_another_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))


def of_another_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"t90"', '"u90"'))


def gone(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (of_another_shape, r"model.norm.weight has the shape \[5\]"),
        (without_the_last_tensor, "lacks the tensor model.norm.weight"),
        (cut_off, "MetadataIncompleteBuffer|incomplete metadata"),
        (of_another_config, "norm_eps 0.5 for 1e-06, and only weights can be read anew"),
        (of_another_tokenizer, "tokenizer_json_zlib"),
        (gone, "No model at"),
    ],
)
def test_what_cannot_be_read_is_told_and_the_weights_stay(
    llamas: tuple[Path, Path], block_kv_driver: type, spoil: Callable[[Path], None], sentence: str
) -> None:
    old, new = llamas
    model, weights = loaded(old)
    before, fingerprint = logits_of(model, block_kv_driver), model.fingerprint
    spoil(new)
    with pytest.raises(SafetensorError if spoil is cut_off else ModelError, match=sentence):
        weights.read(str(new))
    assert torch.equal(logits_of(model, block_kv_driver), before)
    assert model.fingerprint == fingerprint
    weights.read("")()


def test_fp8_scales_are_read_anew_too_unless_graphs_are_compiled_for_them(llamas: tuple[Path, Path]) -> None:
    old, new = llamas
    scales = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor([0.25 + layer]) for layer in range(2)}
    add(new, scales)
    model, weights = loaded(old, kv_cache_dtype="fp8_e4m3")
    expected, _ = loaded(new, kv_cache_dtype="fp8_e4m3")
    weights.read(str(new))()
    assert [attention.spec.k_scale for attention in model.attentions] == [0.25, 1.25]
    assert [attention.spec.v_scale for attention in model.attentions] == [0.25, 1.25]
    assert model.fingerprint == expected.fingerprint
    config = settings(new, kv_cache_dtype="fp8_e4m3")
    model, info = load_named(config.model, config)
    compiled = WeightSource(model, info, config, is_compiled=True)
    compiled.read("")()
    with pytest.raises(ModelError, match="other FP8 scales than the graphs were compiled for"):
        compiled.read(str(old))


def test_the_synthetic_model_s_weights_are_a_number(llamas: tuple[Path, Path]) -> None:
    config = load_config({"model": "synthetic-3", "max_model_len": "64", "dtype": "float32"}, {})
    model, info = load_named(config.model, config)
    assert info == synthetic_model_info(64)
    assert model.fingerprint == SyntheticModel("float32", seed=3).fingerprint
    weights = WeightSource(model, info, config)
    with pytest.raises(ModelError, match="no weights for the synthetic model"):
        weights.read(str(llamas[0]))
    weights.read("synthetic")()
    assert model.fingerprint == SyntheticModel("float32").fingerprint
    _, weights = loaded(llamas[0])
    with pytest.raises(ModelError, match="synthetic-2 has no weights for old"):
        weights.read("synthetic-2")
