"""Hugging Face `config.json` -> ModelConfig, as transformers 4 or 5 spells it; refuses what the decoder lacks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockplane.data_plane.models.config import Activation, LayerConfig, ModelConfig, RopeConfig
from blockplane.data_plane.models.layer_kinds import refuse_layers_without_kv
from blockplane.data_plane.models.rope import linear_divisors, llama3_divisors
from blockplane.protos.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture implies: the features of its layers, and the settings that its configs leave out."""

    qk_norm: bool
    gemma: bool
    defaults: Mapping[str, Any]


_FAMILIES = {
    "LlamaForCausalLM": _Family(qk_norm=False, gemma=False, defaults={"rope_theta": 10_000.0}),
    "Qwen3ForCausalLM": _Family(qk_norm=True, gemma=False, defaults={"rope_theta": 10_000.0, "head_dim": 128}),
    "Gemma3ForCausalLM": _Family(
        qk_norm=True,
        gemma=True,
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNSUPPORTED = (
    "mlp_bias",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "use_bidirectional_attention",
    "vision_config",
)


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read the parsed JSON of a `config.json`.

    Raises:
        ModelError: an architecture, layer kind, rope type or setting that the decoder does not have, or a missing key;
            the message names it.
    """
    refuse_layers_without_kv(config)
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    stated = {key: value for key, value in config.items() if value is not None}
    settings = _Settings({**_DEFAULTS, **family.defaults, **stated})
    for key in _UNSUPPORTED:
        if settings.get(key) and not (key == "quantization_config" and _rounds_kv_alone(settings[key])):
            raise ModelError(f"The model's config sets {key}, which Blockplane does not support; choose another model.")
    hidden_size, num_heads = settings["hidden_size"], settings["num_attention_heads"]
    head_dim = settings.get("head_dim", hidden_size // num_heads)
    eos_token_id = settings.get("eos_token_id", ())
    return ModelConfig(
        architecture=architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=settings["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=settings.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        layers=_layers(settings, family, head_dim),
        activation=_activation(settings),
        norm_eps=settings["rms_norm_eps"],
        norm_adds_one=family.gemma,
        sandwich_norms=family.gemma,
        qk_norm=family.qk_norm,
        attention_bias=settings["attention_bias"],
        tied_embeddings=settings["tie_word_embeddings"],
        embedding_scale=hidden_size**0.5 if family.gemma else None,
        query_scale=(settings["query_pre_attn_scalar"] if family.gemma else head_dim) ** -0.5,
        attention_soft_cap=settings.get("attn_logit_softcapping") if family.gemma else None,
        logit_soft_cap=settings.get("final_logit_softcapping") if family.gemma else None,
        max_position_embeddings=settings["max_position_embeddings"],
        bos_token_id=settings.get("bos_token_id"),
        eos_token_ids=(eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id),
        dtype=settings.get("dtype", settings.get("torch_dtype", "float32")),
    )


def _rounds_kv_alone(quantization: Mapping[str, Any]) -> bool:
    """Whether the weights are whole and all else is scales for FP8 KV (compressed-tensors' `kv_cache_scheme`)."""
    if quantization.get("quant_method") != "compressed-tensors" or quantization.get("config_groups"):
        return False
    scheme = quantization.get("kv_cache_scheme") or {}
    return (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


class _Settings(dict[str, Any]):
    """Settings whose absence, where the decoder needs one, is an error that names it."""

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"The model's config lacks {key}; its files are incomplete: fetch them again.")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or ["(none)"]
    if names[0] in _FAMILIES:
        return str(names[0])
    if names[0] == "Gemma3ForConditionalGeneration":
        raise ModelError(
            "Gemma3ForConditionalGeneration is a vision model, which Blockplane does not serve; "
            "choose a text-only Gemma 3 (Gemma3ForCausalLM)."
        )
    raise ModelError(f"Architecture {names[0]} is unknown; Blockplane serves {', '.join(_FAMILIES)}.")


def _activation(settings: _Settings) -> Activation:
    name = settings.get("hidden_activation", settings["hidden_act"])
    if name not in _ACTIVATIONS:
        raise ModelError(f"Activation {name} is unknown; Blockplane has {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _layers(settings: _Settings, family: _Family, head_dim: int) -> tuple[LayerConfig, ...]:
    kinds = _layer_kinds(settings, family)
    for layer, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise ModelError(f"Layer {layer} is of kind {kind}, which is unknown; Blockplane has {FULL} and {SLIDING}.")
    windows = {FULL: None, SLIDING: settings["sliding_window"] if SLIDING in kinds else None}
    ropes = {kind: _rope(_rope_parameters(settings, family, kind), settings, head_dim) for kind in sorted(set(kinds))}
    return tuple(LayerConfig(windows[kind], ropes[kind]) for kind in kinds)


def _layer_kinds(settings: _Settings, family: _Family) -> list[str]:
    num_layers = settings["num_hidden_layers"]
    if "layer_types" in settings:
        kinds: list[str] = settings["layer_types"]
        if len(kinds) != num_layers:
            raise ModelError(f"The model's config has {num_layers} layers but {len(kinds)} layer_types; correct it.")
        return kinds
    if family.gemma:
        pattern = settings["sliding_window_pattern"]
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    first_sliding = settings.get("max_window_layers", 0) if settings.get("use_sliding_window") else num_layers
    return [SLIDING if layer >= first_sliding else FULL for layer in range(num_layers)]


def _rope_parameters(settings: _Settings, family: _Family, kind: str) -> dict[str, Any]:
    """One layer kind's rope settings, whether the config nests them by kind, has one set, or spreads them out."""
    stated = settings.get("rope_parameters", {})
    if FULL in stated or SLIDING in stated:
        stated = stated.get(kind) or {}
    elif not (family.gemma and kind == SLIDING):
        # Gemma's scaling is for its full layers alone.
        stated = {**settings.get("rope_scaling", {}), **stated}
    theta = settings["rope_local_base_freq" if family.gemma and kind == SLIDING else "rope_theta"]
    return {"rope_theta": theta, **stated}


def _rope(parameters: dict[str, Any], settings: _Settings, head_dim: int) -> RopeConfig:
    rotated = parameters.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise ModelError(
            f"partial_rotary_factor is {rotated}, but Blockplane rotates whole heads; choose another model."
        )
    theta = float(parameters["rope_theta"])
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, linear_divisors(head_dim, _Settings(parameters)["factor"]))
    if rope_type == "llama3":
        scaling = _Settings({"original_max_position_embeddings": settings["max_position_embeddings"], **parameters})
        divisors = llama3_divisors(
            head_dim,
            theta,
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_positions=scaling["original_max_position_embeddings"],
        )
        return RopeConfig(theta, divisors)
    raise ModelError(f"Rope type {rope_type} is unknown; Blockplane has default, linear and llama3.")
