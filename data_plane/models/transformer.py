"""The one decoder of the Llama, Qwen3 and Gemma 3 families: a rank's arithmetic; knows neither files nor steps."""

import torch
from torch import Tensor
from torch.nn import functional

from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec
from blockplane.data_plane.models.config import LayerConfig, ModelConfig, RopeConfig
from blockplane.data_plane.models.fingerprint import fingerprint
from blockplane.data_plane.models.linear import fastest_linear
from blockplane.data_plane.models.rope import rotary_table, rotate
from blockplane.data_plane.models.vocabulary import embed, whole_logits
from blockplane.data_plane.models.weights import DecoderWeights, LayerWeights
from blockplane.data_plane.ranks.collectives import ALONE, Ranks


class Transformer:
    """A decoder over filled weights; see `Model` for what the runner asks of it.

    Of a group, each rank has its own heads, MLP columns and vocabulary rows (Shoeybi et al. 2019, arXiv 1909.08053);
    hidden states are whole in all of them.

    Attributes:
        config: of the whole model. ranks: the group, this rank being one of it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        max_model_len: int | None = None,
        kv_cache_dtype: str | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Prepare for positions below `max_model_len`, by default all that the model was made for, where weights lie.

        `kv_cache_dtype` None = that of the weights. `ranks`: those that the weights were divided among.
        """
        self.config, self.ranks = config, ranks
        self._tokens = weights.shard.vocabulary.own
        self.vocab_size = config.vocab_size
        self.dtype = str(weights.embeddings.dtype).removeprefix("torch.")
        self.kv_cache_dtype = kv_cache_dtype or self.dtype
        self.fingerprint = self._fingerprint(weights)
        self._embeddings = fastest_linear(weights.embeddings)
        self._output = self._embeddings if config.tied_embeddings else fastest_linear(weights.output)
        # Rounded to the model's dtype, as the checkpoint's makers trained it.
        scale = torch.tensor(config.embedding_scale or 1.0, dtype=weights.embeddings.dtype)
        self._embedding_scale = None if config.embedding_scale is None else scale.item()
        num_positions, device = max_model_len or config.max_position_embeddings, weights.embeddings.device
        self._rotary_tables = {
            rope: rotary_table(rope, config.head_dim, num_positions).to(device)
            for rope in {layer.rope for layer in config.layers}
        }
        self._norm = RMSNorm(weights.norm, config, weights.embeddings.dtype)
        self._layers = [
            DecoderLayer(config, layer, layer_weights, ranks)
            for layer, layer_weights in zip(config.layers, weights.layers, strict=True)
        ]
        self.attentions: tuple[Attention, ...] = tuple(layer.attention for layer in self._layers)

    def refill(self, weights: DecoderWeights) -> None:
        """Take other weights, of the same configuration, into the tensors that are there, wherever `weights` lie."""
        self._embeddings.refill(weights.embeddings)
        if self._output is not self._embeddings:
            self._output.refill(weights.output)
        self._norm.refill(weights.norm)
        for layer, layer_weights in zip(self._layers, weights.layers, strict=True):
            layer.refill(layer_weights)
        self.fingerprint = self._fingerprint(weights)

    def _fingerprint(self, weights: DecoderWeights) -> bytes:
        parameters = f"{self.config} {self.kv_cache_dtype} {weights.kv_scales}"
        return fingerprint(parameters, weights.named_tensors())

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        """int64 [num_tokens] twice -> hidden states [num_tokens, hidden_size]; writes these tokens' KV."""
        hidden = embed(input_ids, self._embeddings, self._tokens, self.ranks)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        rotations = {rope: table[positions].unbind(1) for rope, table in self._rotary_tables.items()}
        for layer in self._layers:
            hidden = layer(hidden, rotations[layer.rope], batches)
        return self._norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[num_sampled, hidden_size] -> float32 [num_sampled, vocab_size]."""
        logits = whole_logits(self._output(hidden), self.vocab_size, self.ranks).float()
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def idle_hidden(self, num_tokens: int) -> Tensor:
        """Zeros on the host, [num_tokens, hidden_size]."""
        return torch.zeros(num_tokens, self.config.hidden_size, dtype=getattr(torch, self.dtype))


class DecoderLayer:
    """Attention, then a gated MLP, each around a residual addition; their outputs are sums over the ranks."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, weights: LayerWeights, ranks: Ranks) -> None:
        num_heads, num_kv_heads = len(weights.shard.heads), len(weights.shard.kv_heads)
        self.rope: RopeConfig = layer.rope
        self._ranks = ranks
        self.attention = Attention(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=config.head_dim,
                scale=config.query_scale,
                sliding_window=layer.sliding_window,
                soft_cap=config.attention_soft_cap,
                k_scale=weights.k_scale,
                v_scale=weights.v_scale,
            )
        )
        self._qkv = fastest_linear(weights.qkv, weights.qkv_bias)
        self._output = fastest_linear(weights.output, weights.output_bias)
        self._gate_up, self._down = fastest_linear(weights.gate_up), fastest_linear(weights.down)
        self._gelu = config.activation == "gelu_tanh"
        self._head_shape = (num_heads + 2 * num_kv_heads, config.head_dim)
        self._num_rotated = num_heads + num_kv_heads
        self._num_heads = num_heads

        def norm(weight: Tensor | None) -> RMSNorm | None:
            return None if weight is None else RMSNorm(weight, config, weights.qkv.dtype)

        self._attention_norm = RMSNorm(weights.attention_norm, config, weights.qkv.dtype)
        self._mlp_norm = RMSNorm(weights.mlp_norm, config, weights.qkv.dtype)
        self._attention_output_norm = norm(weights.attention_output_norm)
        self._mlp_output_norm = norm(weights.mlp_output_norm)
        self._qk_norm = norm(_per_head(weights))

    def refill(self, weights: LayerWeights) -> None:
        """Take other weights of the same shapes, and other scales."""
        self._qkv.refill(weights.qkv, weights.qkv_bias)
        self._output.refill(weights.output, weights.output_bias)
        self._gate_up.refill(weights.gate_up)
        self._down.refill(weights.down)
        for norm, weight in (
            (self._attention_norm, weights.attention_norm),
            (self._mlp_norm, weights.mlp_norm),
            (self._attention_output_norm, weights.attention_output_norm),
            (self._mlp_output_norm, weights.mlp_output_norm),
            (self._qk_norm, _per_head(weights)),
        ):
            if norm is not None and weight is not None:
                norm.refill(weight)
        self.attention.rescale(weights.k_scale, weights.v_scale)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, ...], batches: AttentionBatches) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape. `rotation`: cosines and sines of this layer's rope."""
        attended = self._attend(self._attention_norm(hidden), rotation, batches)
        if self._attention_output_norm is not None:
            attended = self._attention_output_norm(attended)
        hidden = hidden + attended
        activated = self._mlp(self._mlp_norm(hidden))
        if self._mlp_output_norm is not None:
            activated = self._mlp_output_norm(activated)
        return hidden + activated

    def _attend(self, normed: Tensor, rotation: tuple[Tensor, ...], batches: AttentionBatches) -> Tensor:
        heads = self._qkv(normed).view(-1, *self._head_shape)
        query_key, value = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        if self._qk_norm is not None:
            query_key = self._qk_norm(query_key)
        rotated = rotate(query_key, *rotation).to(value.dtype)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        attended = self.attention(query, key, value, batches).flatten(1)
        return self._ranks.all_reduce(self._output(attended))

    def _mlp(self, normed: Tensor) -> Tensor:
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        gate = functional.gelu(gate, approximate="tanh") if self._gelu else functional.silu(gate)
        return self._ranks.all_reduce(self._down(gate * up))


class RMSNorm:
    """x / rms(x) * weight over the last axis, reckoned in float32 (Zhang and Sennrich 2019, arXiv 1910.07467).

    Families differ in where they round to the model's dtype: Gemma after the product with 1 + weight, the others
    before the product with weight.
    """

    def __init__(self, weight: Tensor, config: ModelConfig, dtype: torch.dtype) -> None:
        self._rounds_last = config.norm_adds_one
        self._weight = weight + 1.0 if config.norm_adds_one else weight.to(dtype)
        self._eps = config.norm_eps

    def refill(self, weight: Tensor) -> None:
        """Take another of the same shape."""
        self._weight.copy_(weight + 1.0 if self._rounds_last else weight)

    def __call__(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), x.shape[-1:], eps=self._eps)
        if self._rounds_last:
            return (normed * self._weight).to(x.dtype)
        return normed.to(x.dtype) * self._weight


def _per_head(weights: LayerWeights) -> Tensor | None:
    """Query and key norms side by side, [num_heads + num_kv_heads, head_dim], so that one product serves both."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    num_heads, num_kv_heads = len(weights.shard.heads), len(weights.shard.kv_heads)
    return torch.cat((weights.q_norm.expand(num_heads, -1), weights.k_norm.expand(num_kv_heads, -1)))
