"""All that the decoder needs to know of a model, as one frozen value; knows neither weights nor files."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: pair i of a head turns by `position * theta^(-2i / head_dim) / divisors[i]`.

    `divisors` holds head_dim / 2 factors, however the checkpoint states them (linear, Llama 3); None = all one.
    """

    theta: float
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from layer to layer. `sliding_window` counts visible keys, the query's own included; None = all."""

    sliding_window: int | None
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama, Qwen3 or Gemma 3 text family.

    Attributes:
        architecture: the Hugging Face class name, such as "LlamaForCausalLM".
        layers: one per decoder layer, in order.
        norm_eps: added to the mean square in every RMS norm.
        norm_adds_one: norms multiply by 1 + weight in float32 (Gemma) instead of by weight in the model's dtype.
        sandwich_norms: attention and MLP outputs are normed too, before the residual addition (Gemma).
        qk_norm: queries and keys are normed per head, before the rotation.
        attention_bias: the four attention projections have biases.
        tied_embeddings: the output projection is the embedding matrix.
        embedding_scale: factor on token embeddings, None = untouched.
        query_scale: factor on query . key.
        attention_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap); None = untouched.
        max_position_embeddings: tokens that the model was made for.
        eos_token_ids, bos_token_id: as the model's configuration has them.
        dtype: of the checkpoint, a name such as "bfloat16".
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    activation: Activation
    norm_eps: float
    norm_adds_one: bool
    sandwich_norms: bool
    qk_norm: bool
    attention_bias: bool
    tied_embeddings: bool
    embedding_scale: float | None
    query_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
