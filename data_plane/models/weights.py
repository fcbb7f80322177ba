"""A rank's parameters of a decoder: shapes, fusion and Hugging Face names; knows neither arithmetic nor files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockplane.data_plane.models.config import ModelConfig
from blockplane.data_plane.models.shards import Part, Shard, shard_of
from blockplane.data_plane.ranks.collectives import ALONE, Ranks

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's Hugging Face name, the rank's part of it, and which rows or columns these are; None = all."""

    name: str
    tensor: Tensor
    rows: Part | None = None
    columns: Part | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape that the model's whole parameter has."""
        sizes = list(self.tensor.shape)
        for axis, part in enumerate((self.rows, self.columns)):
            if part is not None:
                sizes[axis] = part.size
        return tuple(sizes)

    @property
    def index(self) -> tuple[slice, ...] | None:
        """What selects the rank's part of the whole parameter; None = it is the whole."""
        if tuple(self.tensor.shape) == self.whole_shape:
            return None
        parts = (self.rows, self.columns)[: self.tensor.dim()]
        return tuple(slice(None) if part is None else slice(part.own.start, part.own.stop) for part in parts)


Parameters = Iterator[Parameter]


class LayerWeights:
    """A rank's parameters of one decoder layer, allocated and not yet filled.

    Projections that read the same input are one matrix (`qkv`, `gate_up`), so that a token costs fewer and longer
    products. Norms are float32: they are small, and Gemma multiplies by them in float32. `k_scale` and `v_scale`, of an
    FP8 KV cache, are 1 until a checkpoint has others. `output_bias` is that of a sum over ranks: rank 0 has it, the
    others have nothing of it.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, shard: Shard) -> None:
        hidden, intermediate = config.hidden_size, len(shard.intermediate)
        self.shard = shard
        query, key_value = shard.heads.wide(config.head_dim), shard.kv_heads.wide(config.head_dim)
        self._qkv_parts = (query, key_value, key_value)
        num_qkv = sum(map(len, self._qkv_parts))
        self.qkv = torch.empty(num_qkv, hidden, dtype=dtype)
        self.output = torch.empty(hidden, len(query), dtype=dtype)
        self.qkv_bias = torch.empty(num_qkv, dtype=dtype) if config.attention_bias else None
        has_output_bias = config.attention_bias and len(shard.output_bias)
        self.output_bias = torch.empty(hidden, dtype=dtype) if has_output_bias else None
        self.q_norm = torch.empty(config.head_dim) if config.qk_norm else None
        self.k_norm = torch.empty(config.head_dim) if config.qk_norm else None
        self.gate_up = torch.empty(2 * intermediate, hidden, dtype=dtype)
        self.down = torch.empty(hidden, intermediate, dtype=dtype)
        self.attention_norm, self.mlp_norm = torch.empty(hidden), torch.empty(hidden)
        self.attention_output_norm = torch.empty(hidden) if config.sandwich_norms else None
        self.mlp_output_norm = torch.empty(hidden) if config.sandwich_norms else None
        self.k_scale = self.v_scale = 1.0

    def parameters(self) -> Parameters:
        """Every parameter by its Hugging Face name within the layer; parts of a fused one are views of it."""
        yield from self._attention_parameters()
        gate, up = self.gate_up.chunk(2)
        columns = self.shard.intermediate
        yield Parameter("mlp.gate_proj.weight", gate, rows=columns)
        yield Parameter("mlp.up_proj.weight", up, rows=columns)
        yield Parameter("mlp.down_proj.weight", self.down, columns=columns)
        yield Parameter("input_layernorm.weight", self.attention_norm)
        if self.attention_output_norm is not None and self.mlp_output_norm is not None:
            yield Parameter("post_attention_layernorm.weight", self.attention_output_norm)
            yield Parameter("pre_feedforward_layernorm.weight", self.mlp_norm)
            yield Parameter("post_feedforward_layernorm.weight", self.mlp_output_norm)
        else:
            yield Parameter("post_attention_layernorm.weight", self.mlp_norm)

    def _attention_parameters(self) -> Parameters:
        yield from self._qkv_parameters("weight", self.qkv)
        yield Parameter("self_attn.o_proj.weight", self.output, columns=self._qkv_parts[0])
        if self.qkv_bias is not None:
            yield from self._qkv_parameters("bias", self.qkv_bias)
            output_bias = self.qkv_bias[:0] if self.output_bias is None else self.output_bias
            yield Parameter("self_attn.o_proj.bias", output_bias, rows=self.shard.output_bias)
        if self.q_norm is not None and self.k_norm is not None:
            yield Parameter("self_attn.q_norm.weight", self.q_norm)
            yield Parameter("self_attn.k_norm.weight", self.k_norm)

    def _qkv_parameters(self, kind: str, fused: Tensor) -> Parameters:
        tensors = torch.split(fused, [len(part) for part in self._qkv_parts])
        for name, tensor, part in zip("qkv", tensors, self._qkv_parts, strict=True):
            yield Parameter(f"self_attn.{name}_proj.{kind}", tensor, rows=part)


class DecoderWeights:
    """A rank's parameters of a whole decoder, allocated and not yet filled.

    Attributes:
        embeddings, output: [shard.num_vocabulary_rows, hidden_size], of which those behind the rank's own rows mean
            nothing; tied, they are one.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device = HOST, ranks: Ranks = ALONE
    ) -> None:
        """Raises ModelError if the model cannot be divided among so many ranks."""
        self.shard = shard_of(config, ranks)
        with device:
            self.embeddings = torch.empty(self.shard.num_vocabulary_rows, config.hidden_size, dtype=dtype)
            self.output = self.embeddings if config.tied_embeddings else torch.empty_like(self.embeddings)
            self.norm = torch.empty(config.hidden_size)
            self.layers = [LayerWeights(config, dtype, self.shard) for _ in config.layers]

    @property
    def kv_scales(self) -> list[tuple[float, float]]:
        """Of each layer's keys and values."""
        return [(layer.k_scale, layer.v_scale) for layer in self.layers]

    def parameters(self) -> Parameters:
        """Every parameter by its Hugging Face name; copying into them all fills the decoder."""
        tokens = self.shard.vocabulary
        yield Parameter("model.embed_tokens.weight", self.embeddings[: len(tokens)], rows=tokens)
        for index, layer in enumerate(self.layers):
            for parameter in layer.parameters():
                yield replace(parameter, name=f"model.layers.{index}.{parameter.name}")
        yield Parameter("model.norm.weight", self.norm)
        if self.output is not self.embeddings:
            yield Parameter("lm_head.weight", self.output[: len(tokens)], rows=tokens)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same without what they are parts of."""
        for parameter in self.parameters():
            yield parameter.name, parameter.tensor
