"""The fingerprint of a model: the same for the same tensors and arithmetic, another for any others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from blockplane.data_plane.loading.named import load_named
from blockplane.data_plane.models.fingerprint import NUM_BYTES, SAMPLE_BYTES, fingerprint, model_fingerprint
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.protos.config import Config

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embeddings": torch.randn(300, 64, generator=generator),
        "norm": torch.randn(64, generator=generator).bfloat16(),
        "empty": torch.zeros(0),
    }


def of(named: dict[str, Tensor], parameters: str = "") -> bytes:
    return fingerprint(parameters, named.items())


def test_equal_tensors_have_one_fingerprint_however_they_lie_in_memory() -> None:
    views = {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in tensors().items()}
    assert not views["embeddings"].is_contiguous()
    assert of(views) == of(tensors())
    assert len(of(views)) == NUM_BYTES


@pytest.mark.parametrize("name", ["embeddings", "norm"])
def test_other_values_names_shapes_dtypes_and_parameters_have_others(name: str) -> None:
    base = tensors()
    others = [
        {**base, name: base[name] + 1},
        {**base, name: base[name].flip(0)},
        {**base, name: base[name][None]},
        {**base, name: base[name].view(torch.int16 if name == "norm" else torch.int32)},
        {f"{name}." if key == name else key: tensor for key, tensor in base.items()},
        {key: tensor for key, tensor in base.items() if key != name},
    ]
    assert len({of(base), of(base, "rope"), *map(of, others)}) == 2 + len(others)


def test_of_large_tensors_a_sample_over_all_of_them_counts() -> None:
    large = torch.zeros(SAMPLE_BYTES * 8)
    changed = large.clone()
    changed[-len(changed) // 4 :] = 1
    assert of({"large": changed}) != of({"large": large})


def test_a_checkpoint_is_the_same_each_time_it_is_loaded_and_not_as_another_dtype(
    tmp_path: Path, randomized: Callable[..., Any], save_checkpoint: Callable[..., Path]
) -> None:
    path = str(save_checkpoint(randomized(LlamaForCausalLM(LlamaConfig(**TINY))), tmp_path))

    def load(**settings: str) -> bytes:
        return load_named(path, Config(**settings))[0].fingerprint

    first = load(dtype="float32")
    assert load(dtype="float32") == first
    assert len({first, load(dtype="bfloat16"), load(dtype="float32", kv_cache_dtype="fp8_e4m3")}) == 3


def test_a_draft_model_counts() -> None:
    model, draft = SyntheticModel("float32"), SyntheticModel("bfloat16")
    both = {model_fingerprint(model, None), model_fingerprint(model, draft), model_fingerprint(draft, model)}
    assert len({*both, model_fingerprint(model, model)}) == 4
