"""Writes a model that Blockplane loads as a Hugging Face directory, for peers that read no GGUF; knows no peer."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from blockplane.data_plane.loading.build import load_weights
from blockplane.data_plane.loading.checkpoint import open_checkpoint
from blockplane.data_plane.models.config import ModelConfig


def write_hugging_face_copy(model: str, folder: Path) -> None:
    """The weights as bfloat16 and what a config.json says of a Gemma 3; no tokenizer, for prompts are token ids.

    The tensors are those that Blockplane computes with: a norm's weight is its distance from one, as Hugging Face's
    Gemma has it.

    Args:
        model: as the setting `model` names it. folder: there, and empty.

    Raises:
        ModelError: there is no such model. ValueError: it is no Gemma 3.
    """
    checkpoint = open_checkpoint(model)
    (folder / "config.json").write_text(json.dumps(gemma3_config(checkpoint.config), indent=1) + "\n")
    weights = load_weights(checkpoint, "bfloat16")
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in weights.named_tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def gemma3_config(config: ModelConfig) -> dict[str, Any]:
    """What `config.json` says, spelled as transformers reads it. Raises ValueError if it is no Gemma 3."""
    if config.architecture != "Gemma3ForCausalLM":
        raise ValueError(f"{config.architecture} is no Gemma3ForCausalLM, which alone is written for peers.")
    windowed = [layer for layer in config.layers if layer.sliding_window is not None]
    full = [layer for layer in config.layers if layer.sliding_window is None]
    return {
        "architectures": [config.architecture],
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.norm_eps,
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "attention_bias": config.attention_bias,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": windowed[0].sliding_window,
        "layer_types": [
            "full_attention" if layer.sliding_window is None else "sliding_attention" for layer in config.layers
        ],
        "rope_theta": full[0].rope.theta,
        "rope_local_base_freq": windowed[0].rope.theta,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
