"""Keys and values kept in FP8: rounded once, scaled as the checkpoint says, and nothing else is any different."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_attention import NUM_TOKENS, SPECS, dense
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec, DecodeBatch, PrefillBatch
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.kv_cache import layer_kv_specs
from blockplane.data_plane.loading.build import load_model
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.loading.named import load_named
from blockplane.data_plane.models.transformer import Transformer
from blockplane.protos.config import Config
from blockplane.protos.errors import ModelError

FP8 = torch.float8_e4m3fn
GREATEST = 448.0
K_SCALE, V_SCALE = 0.03, 1.7
NUM_LAYERS = 7
SCALES = {"k": [0.05 + 0.01 * layer for layer in range(NUM_LAYERS)], "v": [0.5 / (layer + 1) for layer in range(7)]}
SPELLINGS = {
    "compressed-tensors": "self_attn.{kind}_scale",
    "older compressed-tensors and Quark": "self_attn.{kind}_proj.output_scale",
    "ModelOpt": "self_attn.{kind}_proj.{kind}_scale",
    "vLLM": "self_attn.attn.{kind}_scale",
}


def kept(kv: Tensor, scale: float) -> Tensor:
    """What an FP8 cache gives back, in float64."""
    return (kv.float() / scale).clamp(-GREATEST, GREATEST).to(FP8).double() * scale


# -- one layer ---------------------------------------------------------------------------------------------------------


def attend(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two segments and then token by token, among NaN."""
    attention = Attention(spec)
    attention.bind_kv_cache(*(torch.full((7, 2, 2, 8), float("nan")).to(FP8) for _ in range(2)), CPU.kernels)
    table = torch.tensor([[5, 1, 4, 2, 6, 3]], dtype=torch.int32)
    slots = table[0].long().repeat_interleave(2) * 2 + torch.arange(12) % 2
    outputs = []
    for start, end in ((0, 4), (4, 7)):
        bounds, prior = torch.tensor([0, end - start]).int(), torch.tensor([start]).int()
        batch = PrefillBatch(slots[start:end], table, bounds, prior, kv_segment_size=2)
        outputs.append(attention(query[start:end], key[start:end], value[start:end], (batch,)))
    for start in range(7, NUM_TOKENS):
        new = slice(start, start + 1)
        batch = DecodeBatch(slots[new], table, torch.tensor([new.stop]).int())
        outputs.append(attention(query[new], key[new], value[new], (batch,)))
    return torch.cat(outputs)


def random_qkv() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(NUM_TOKENS, heads, 8) for heads in (4, 2, 2)]


@pytest.mark.parametrize("scales", [(1.0, 1.0), (K_SCALE, V_SCALE)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_attention_over_fp8_is_attention_over_what_fp8_keeps(spec: AttentionSpec, scales: tuple[float, float]) -> None:
    query, key, value = random_qkv()
    output = attend(replace(spec, k_scale=scales[0], v_scale=scales[1]), query, key, value)
    expected = dense(spec, query, kept(key, scales[0]), kept(value, scales[1]))
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_exceeds_the_scaled_range_is_cut_off() -> None:
    query, key, value = random_qkv()
    key[3, 0, 0], value[4] = 1e4, -1e30
    output = attend(replace(SPECS["plain"], k_scale=K_SCALE, v_scale=V_SCALE), query, key, value)
    expected = dense(SPECS["plain"], query, kept(key, K_SCALE), kept(value, V_SCALE))
    assert expected.isfinite().all()
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_value_that_is_nan_is_still_seen_by_all_after_it() -> None:
    query, key, value = random_qkv()
    value[7, 1, 2] = float("nan")
    output = attend(replace(SPECS["plain"], v_scale=V_SCALE), query, key, value)
    assert output[:7].isfinite().all()
    assert output[7:, 2:, 2].isnan().all()
    assert output[7:, :2].isfinite().all()


def test_scales_mean_nothing_to_a_cache_of_another_dtype() -> None:
    query, key, value = random_qkv()
    bounds, prior = torch.tensor([0, NUM_TOKENS]).int(), torch.zeros(1).int()
    batch = PrefillBatch(torch.arange(2, 13), torch.arange(1, 7)[None].int(), bounds, prior, kv_segment_size=0)
    outputs = []
    for scales in {}, {"k_scale": K_SCALE, "v_scale": V_SCALE}:
        attention = Attention(replace(SPECS["plain"], **scales))
        attention.bind_kv_cache(torch.zeros(7, 2, 2, 8), torch.zeros(7, 2, 2, 8), CPU.kernels)
        outputs.append(attention(query, key, value, (batch,)))
    assert torch.equal(*outputs)


# -- a checkpoint and its scales ---------------------------------------------------------------------------------------


@pytest.fixture
def gemma(tmp_path: Path, randomized: Callable, save_checkpoint: Callable[..., Path]) -> Path:
    config = Gemma3TextConfig(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        sliding_window=8,
        query_pre_attn_scalar=24,
    )
    return save_checkpoint(randomized(Gemma3ForCausalLM(config)), tmp_path)


def add(directory: Path, tensors: dict[str, Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def scales(spelling: str) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.{spelling.format(kind=kind)}": torch.tensor(scale)
        for kind, of_layers in SCALES.items()
        for layer, scale in enumerate(of_layers)
    }


def load(directory: Path, kv_cache_dtype: str | None = "float8_e4m3fn") -> Transformer:
    return load_model(open_checkpoint(str(directory)), "float32", kv_cache_dtype=kv_cache_dtype)


def specs_of(model: Transformer) -> list[AttentionSpec]:
    return [attention.spec for attention in model.attentions]


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_layers_scales_are_found_by_every_name_and_none_is_missed(
    gemma: Path, spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    add(gemma, scales(spelling))
    specs = specs_of(load(gemma))
    assert [spec.k_scale for spec in specs] == pytest.approx(SCALES["k"])
    assert [spec.v_scale for spec in specs] == pytest.approx(SCALES["v"])
    assert not caplog.records


def test_a_scale_for_both_is_taken_for_both_and_one_of_queries_for_none(gemma: Path) -> None:
    both = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor([0.25]) for layer in range(NUM_LAYERS)}
    add(gemma, {**both, "model.layers.2.self_attn.q_scale": torch.tensor(9.0)})
    assert {(spec.k_scale, spec.v_scale) for spec in specs_of(load(gemma))} == {(0.25, 0.25)}


def test_one_warning_says_how_many_layers_have_no_scales(gemma: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    add(
        gemma,
        {
            name: scale
            for name, scale in scales(SPELLINGS["vLLM"]).items()
            if ".0." in name or "3.self_attn.attn.k" in name
        },
    )
    specs = specs_of(load(gemma))
    assert (specs[3].k_scale, specs[3].v_scale, specs[4].k_scale) == (pytest.approx(SCALES["k"][3]), 1.0, 1.0)
    assert len(caplog.messages) == 1
    assert f"scales for the KV of 1 of its {NUM_LAYERS} layers; the others are scaled by 1" in caplog.messages[0]


def test_no_warning_where_scales_would_mean_nothing(gemma: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = load(gemma, kv_cache_dtype=None)
    assert (model.kv_cache_dtype, caplog.messages) == ("float32", [])


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_scale_is_refused_by_name(gemma: Path, number: float) -> None:
    add(gemma, {"model.layers.1.self_attn.k_scale": torch.tensor(number)})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.k_scale is .*, which is no scale"):
        load(gemma)


def test_scales_per_head_and_those_of_a_layer_that_is_not_there_are_refused_by_name(gemma: Path) -> None:
    add(gemma, {"model.layers.1.self_attn.v_scale": torch.ones(2)})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale holds 2 scales"):
        load(gemma)
    add(
        gemma,
        {
            "model.layers.1.self_attn.v_scale": torch.ones(1),
            f"model.layers.{NUM_LAYERS}.self_attn.k_scale": torch.ones(1),
        },
    )
    with pytest.raises(ModelError, match=rf"holds the tensor model\.layers\.{NUM_LAYERS}\.self_attn\.k_scale"):
        load(gemma)


@pytest.mark.parametrize(
    ("quantization", "is_served"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "int", "num_bits": 8}}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, False),
        ({"quant_method": "fp8", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, False),
        (
            {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {"type": "float", "num_bits": 8},
                "config_groups": {"group_0": {}},
            },
            False,
        ),
    ],
)
def test_a_quantization_of_the_kv_alone_is_served_and_one_of_weights_is_not(
    gemma: Path, quantization: dict[str, object], is_served: bool
) -> None:
    config = json.loads((gemma / "config.json").read_text())
    (gemma / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    if is_served:
        load(gemma)
        return
    with pytest.raises(ModelError, match="quantization_config"):
        load(gemma)


@pytest.mark.parametrize(("setting", "dtype"), [("auto", "float32"), ("fp8_e4m3", "float8_e4m3fn")])
def test_the_setting_reaches_the_layers(gemma: Path, setting: str, dtype: str) -> None:
    for name in (str(gemma), "synthetic"):
        model, _ = load_named(name, Config(dtype="float32", kv_cache_dtype=setting))
        assert {spec.dtype for spec in layer_kv_specs(model)} == {dtype}


# -- a whole decoder ---------------------------------------------------------------------------------------------------


class DenseAttention:
    """One sequence at once, in float64, over what FP8 keeps of its keys and values."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batches: AttentionBatches) -> Tensor:
        spec, group = self.spec, self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (
            kept(kv, scale).repeat_interleave(group, dim=1)
            for kv, scale in ((key, spec.k_scale), (value, spec.v_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        hidden = (distance < 0) | (distance >= (spec.sliding_window or len(query)))
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def test_a_decoder_in_fp8_gives_the_logits_of_dense_attention_over_what_fp8_keeps(
    gemma: Path, block_kv_driver: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(gemma, scales(SPELLINGS["compressed-tensors"]))
    torch.manual_seed(3)
    model, token_ids = load(gemma), torch.randint(96, (30,)).tolist()
    driver = block_kv_driver(model, 4, len(token_ids))
    assert {cache.dtype for attention in model.attentions for cache in attention.caches or ()} == {FP8}
    logits = [driver.prefill(token_ids[:12], num_padding=3), driver.prefill(token_ids[12:21])]
    logits += [driver.decode(token_id) for token_id in token_ids[21:]]
    for layer in model._layers:
        monkeypatch.setattr(layer, "attention", DenseAttention(layer.attention.spec))
    expected = model.logits(model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), ()))
    torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    in_float32 = load(gemma, kv_cache_dtype=None)
    exact = block_kv_driver(in_float32, 4, len(token_ids)).prefill(token_ids)
    assert not torch.allclose(exact, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    torch.testing.assert_close(exact, expected, rtol=0.2, atol=0.2 * expected.abs().max().item())
