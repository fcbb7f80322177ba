"""A GGUF model as a Checkpoint: its metadata as a config, its tensors under Hugging Face names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockplane.data_plane.loading.checkpoint import Checkpoint, StoredTensor
from blockplane.data_plane.loading.gguf_file import GgufFile
from blockplane.data_plane.loading.gguf_tokenizer import adds_bos, tokenizer_json
from blockplane.data_plane.models.config import ModelConfig
from blockplane.data_plane.models.config_json import FULL, SLIDING, parse_config
from blockplane.protos.errors import ModelError
from blockplane.protos.model import GenerationDefaults

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
_SETTINGS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_local_experts",
    "feed_forward_length": "intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_NAMES = _NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_DIVISORS = "rope_freqs.weight"
# The one size of Gemma 3 whose queries are scaled by the width per head instead of by head_dim, which no key tells.
_GEMMA_27B_LAYERS = 62


def read_gguf(path: Path, name: str | None = None) -> Checkpoint:
    """Open a GGUF file of architecture llama, qwen3 or gemma3.

    Raises:
        ModelError: the architecture, a setting or the tokenizer is unknown; the message names it.
    """
    file = GgufFile(path)
    metadata = file.metadata
    config = _config(file)
    ends = (metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id"))
    return Checkpoint(
        name=name or metadata.get("general.name") or path.stem,
        config=config,
        tensors=_tensors(file, config),
        tokenizer_json=tokenizer_json(metadata),
        bos_token_id=config.bos_token_id if adds_bos(metadata) else None,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        defaults=GenerationDefaults(temperature=metadata.get("general.sampling.temp", 1.0)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(
            f"{file.path} holds the architecture {architecture}, which is unknown; Blockplane reads {known}."
        )
    if "token_embd.weight" not in file:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight; fetch it again.")
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    settings = {hf_key: stated[key] for key, hf_key in _SETTINGS.items() if key in stated}
    settings |= {
        "architectures": [_ARCHITECTURES[architecture]],
        "attention_bias": "blk.0.attn_q.bias" in file,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_scaling": _rope_scaling(stated),
        "tie_word_embeddings": "output.weight" not in file,
        "vocab_size": file.shape("token_embd.weight")[0],
    }
    settings |= _derived(architecture, stated, settings)
    config = parse_config(settings)
    return _with_rope_divisors(config, file) if _ROPE_DIVISORS in file else config


def _derived(architecture: str, stated: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that GGUF spells differently or leaves to the reader."""
    derived: dict[str, Any] = {}
    num_heads = settings.get("num_attention_heads", 1)
    width_per_head = settings.get("hidden_size", 0) // num_heads
    if "head_dim" not in settings:
        derived["head_dim"] = width_per_head
    rotated = stated.get("rope.dimension_count")
    if rotated is not None:
        derived["partial_rotary_factor"] = rotated / (derived | settings)["head_dim"]
    if architecture == "gemma3":
        is_27b = settings.get("num_hidden_layers") == _GEMMA_27B_LAYERS
        derived["query_pre_attn_scalar"] = width_per_head if is_27b else (derived | settings)["head_dim"]
        pattern = stated.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            derived["layer_types"] = [SLIDING if sliding else FULL for sliding in pattern]
        elif pattern is not None:
            derived["sliding_window_pattern"] = pattern
    return derived


def _rope_scaling(stated: dict[str, Any]) -> dict[str, Any]:
    kind = stated.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    return {"rope_type": kind, "factor": stated.get("rope.scaling.factor", 1.0)}


def _with_rope_divisors(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Llama 3's scaling comes as a tensor of divisors, not as metadata."""
    divisors = tuple(file.tensor(_ROPE_DIVISORS).tolist())
    layers = tuple(replace(layer, rope=replace(layer.rope, divisors=divisors)) for layer in config.layers)
    return replace(config, layers=layers)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a GGUF file; rows are dequantized alone, columns with all the others of their rows."""

    file: GgufFile
    name: str
    config: ModelConfig

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.shape(self.name)

    def read(self, index: tuple[slice, ...] | None = None) -> Tensor:
        if index is None:
            return self._as_trained(torch.from_numpy(self.file.tensor(self.name)))
        rows = range(*index[0].indices(self.shape[0]))
        return self._as_trained(torch.from_numpy(self.file.tensor(self.name, rows)))[:, *index[1:]]

    def _as_trained(self, rows: Tensor) -> Tensor:
        """Undo what llama.cpp's converter did to a tensor, or to whole heads of it."""
        if self.config.norm_adds_one and self.name.endswith("norm.weight"):
            # Gemma's norms are stored as the factor itself, not as its distance from one.
            return rows - 1.0
        if self.config.architecture == "LlamaForCausalLM" and re.search(r"\.attn_[qk]\.", self.name):
            return _split_halves(rows, self.config.head_dim)
        return rows


def _tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
    for name in file.tensor_names:
        if name != _ROPE_DIVISORS:
            yield _hugging_face_name(name, config), _Stored(file, name, config)


def _split_halves(projection: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's order of a rotated head, in which a pair's two rows are neighbours, not half a head apart."""
    pairs = projection.view(-1, head_dim // 2, 2, *projection.shape[1:])
    return pairs.transpose(1, 2).reshape(projection.shape)


def _hugging_face_name(name: str, config: ModelConfig) -> str:
    names = _GEMMA_NAMES if config.sandwich_norms else _NAMES
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        raise ModelError(f"The GGUF file holds the tensor {name}, which a {config.architecture} does not have.")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{names[match[2]]}.{match[3]}"
