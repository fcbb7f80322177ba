"""Tiny models of every family, and a writer of GGUF files as llama.cpp's converter would write them; knows no test."""

from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE | {"original_max_position_embeddings": 32})
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES | {"num_hidden_layers": 7}, sliding_window=8, query_pre_attn_scalar=16)
    ),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, model: PreTrainedModel, architecture: str) -> Path:
    """Write what llama.cpp's converter would: its names, its order of rotated rows, its norms, its metadata."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6 if architecture == "gemma3" else 1e4)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    add_tokenizer(writer, "gpt2" if architecture == "qwen3" else "llama")
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(*gguf_tensor(name, tensor, architecture, config))
    if architecture == "llama":
        plain = 1e4 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, kind: str) -> None:
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
        tokens = [*letters, "ab", "abc"]
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(["a b", "ab c"])
        writer.add_token_types([1] * len(tokens))
    else:
        tokens = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(86)),
            "\u2581",
            "a",
            "b",
            "ab",
            "\u2581ab",
        ]
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_token_types([2, 3, 3, *[6] * 86, *[1] * 5])
        writer.add_unk_token_id(0)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def gguf_tensor(name, tensor, architecture, config):
    names = GEMMA_NAMES if architecture == "gemma3" else GGUF_NAMES
    prefix, _, kind = name.rpartition(".")
    layer = ""
    if prefix.startswith("model.layers."):
        _, _, index, prefix = prefix.split(".", 3)
        layer = f"blk.{index}."
    if architecture == "gemma3" and "norm" in prefix:
        tensor = tensor + 1.0
    if architecture == "llama" and prefix in ("self_attn.q_proj", "self_attn.k_proj"):
        num_heads = config.num_attention_heads if "q_proj" in prefix else config.num_key_value_heads
        tensor = tensor.reshape(num_heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
    return f"{layer}{names[prefix]}.{kind}", tensor.contiguous().numpy()
