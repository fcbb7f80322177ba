"""The decoder's parameters: shapes, fusion and Hugging Face names; knows neither arithmetic nor files."""

from collections.abc import Iterator

import torch
from torch import Tensor

from blockplane.data_plane.models.config import ModelConfig

NamedTensors = Iterator[tuple[str, Tensor]]

HOST = torch.device("cpu")


class LayerWeights:
    """One decoder layer's parameters, allocated and not yet filled.

    Projections that read the same input are one matrix (`qkv`, `gate_up`), so that a token costs fewer and longer
    products. Norms are float32: they are small, and Gemma multiplies by them in float32. `k_scale` and `v_scale`, of an
    FP8 KV cache, are 1 until a checkpoint has others.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, heads = config.hidden_size, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._qkv_sizes = [count * config.head_dim for count in heads]
        self.qkv = torch.empty(sum(self._qkv_sizes), hidden, dtype=dtype)
        self.output = torch.empty(hidden, self._qkv_sizes[0], dtype=dtype)
        self.qkv_bias = torch.empty(sum(self._qkv_sizes), dtype=dtype) if config.attention_bias else None
        self.output_bias = torch.empty(hidden, dtype=dtype) if config.attention_bias else None
        self.q_norm = torch.empty(config.head_dim) if config.qk_norm else None
        self.k_norm = torch.empty(config.head_dim) if config.qk_norm else None
        self.gate_up = torch.empty(2 * config.intermediate_size, hidden, dtype=dtype)
        self.down = torch.empty(hidden, config.intermediate_size, dtype=dtype)
        self.attention_norm, self.mlp_norm = torch.empty(hidden), torch.empty(hidden)
        self.attention_output_norm = torch.empty(hidden) if config.sandwich_norms else None
        self.mlp_output_norm = torch.empty(hidden) if config.sandwich_norms else None
        self.k_scale = self.v_scale = 1.0

    def named_tensors(self) -> NamedTensors:
        """Every parameter by its Hugging Face name within the layer; parts of a fused one are views of it."""
        yield from self._attention_tensors()
        gate, up = self.gate_up.chunk(2)
        yield "mlp.gate_proj.weight", gate
        yield "mlp.up_proj.weight", up
        yield "mlp.down_proj.weight", self.down
        yield "input_layernorm.weight", self.attention_norm
        if self.attention_output_norm is not None and self.mlp_output_norm is not None:
            yield "post_attention_layernorm.weight", self.attention_output_norm
            yield "pre_feedforward_layernorm.weight", self.mlp_norm
            yield "post_feedforward_layernorm.weight", self.mlp_output_norm
        else:
            yield "post_attention_layernorm.weight", self.mlp_norm

    def _attention_tensors(self) -> NamedTensors:
        projections = [f"self_attn.{name}_proj" for name in "qkv"]
        for name, part in zip(projections, torch.split(self.qkv, self._qkv_sizes), strict=True):
            yield f"{name}.weight", part
        yield "self_attn.o_proj.weight", self.output
        if self.qkv_bias is not None and self.output_bias is not None:
            for name, part in zip(projections, torch.split(self.qkv_bias, self._qkv_sizes), strict=True):
                yield f"{name}.bias", part
            yield "self_attn.o_proj.bias", self.output_bias
        if self.q_norm is not None and self.k_norm is not None:
            yield "self_attn.q_norm.weight", self.q_norm
            yield "self_attn.k_norm.weight", self.k_norm


class DecoderWeights:
    """A whole decoder's parameters, allocated and not yet filled."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device = HOST) -> None:
        with device:
            self.embeddings = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
            self.output = self.embeddings if config.tied_embeddings else torch.empty_like(self.embeddings)
            self.norm = torch.empty(config.hidden_size)
            self.layers = [LayerWeights(config, dtype) for _ in config.layers]

    @property
    def kv_scales(self) -> list[tuple[float, float]]:
        """Of each layer's keys and values."""
        return [(layer.k_scale, layer.v_scale) for layer in self.layers]

    def named_tensors(self) -> NamedTensors:
        """Every parameter by its Hugging Face name; copying into them all fills the decoder."""
        yield "model.embed_tokens.weight", self.embeddings
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.named_tensors():
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self.norm
        if self.output is not self.embeddings:
            yield "lm_head.weight", self.output
