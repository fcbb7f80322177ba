"""The one decoder of the Llama, Qwen3 and Gemma 3 families: a rank's arithmetic; knows neither files nor steps."""

import torch
from torch import Tensor

from blockplane.data_plane.attention import Attention, AttentionBatches, AttentionSpec
from blockplane.data_plane.models.config import LayerConfig, ModelConfig, RopeConfig
from blockplane.data_plane.models.fingerprint import fingerprint
from blockplane.data_plane.models.heads import fastest_heads
from blockplane.data_plane.models.norm import Norm, fastest_norm
from blockplane.data_plane.models.quantized import WIDTHS, Widths, linear_in
from blockplane.data_plane.models.rope import rotary_table
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
        quantize: str = "none",
    ) -> None:
        """Prepare for positions below `max_model_len`, by default all that the model was made for, where weights lie.

        `kv_cache_dtype` None = that of the weights. `ranks`: those that the weights were divided among. `quantize`: as
        the setting has it.
        """
        self.config, self.ranks, self._quantize = config, ranks, quantize
        widths = WIDTHS[quantize]
        self._tokens = weights.shard.vocabulary.own
        self.vocab_size = config.vocab_size
        self.dtype = str(weights.embeddings.dtype).removeprefix("torch.")
        self.kv_cache_dtype = kv_cache_dtype or self.dtype
        self.fingerprint = self._fingerprint(weights)
        self._embeddings = linear_in(widths.sensitive, weights.embeddings)
        self._output = self._embeddings if config.tied_embeddings else linear_in(widths.sensitive, weights.output)
        # Rounded to the model's dtype, as the checkpoint's makers trained it.
        scale = torch.tensor(config.embedding_scale or 1.0, dtype=weights.embeddings.dtype)
        self._embedding_scale = None if config.embedding_scale is None else scale.item()
        num_positions, device = max_model_len or config.max_position_embeddings, weights.embeddings.device
        self._rotary_tables = {
            rope: rotary_table(rope, config.head_dim, num_positions).to(device)
            for rope in {layer.rope for layer in config.layers}
        }
        dtype = weights.embeddings.dtype
        self._norm = fastest_norm(weights.norm, config.norm_eps, dtype, adds_one=config.norm_adds_one)
        self._layers = [
            DecoderLayer(config, layer, layer_weights, ranks, widths)
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
        parameters = f"{self.config} {self.kv_cache_dtype} {weights.kv_scales} {self._quantize}"
        return fingerprint(parameters, weights.named_tensors())

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        """int64 [num_tokens] twice -> hidden states [num_tokens, hidden_size]; writes these tokens' KV."""
        hidden = embed(input_ids, self._embeddings, self._tokens, self.ranks)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        rotation = self._layers[0].heads.rotation
        rotations = {rope: rotation(table, positions) for rope, table in self._rotary_tables.items()}
        normed = self._layers[0].attention_norm(hidden)
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._norm]
        for layer, next_norm in zip(self._layers, next_norms, strict=True):
            hidden, normed = layer(hidden, normed, rotations[layer.rope], batches, next_norm)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[num_sampled, hidden_size] -> float32 [num_sampled, vocab_size]."""
        logits = whole_logits(self._output.logits(hidden), self.vocab_size, self.ranks)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.inference_mode()
    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        # A cap leaves the order as it is.
        return self._output.largest(hidden) if self.ranks.world_size == 1 else None

    def idle_hidden(self, num_tokens: int) -> Tensor:
        """Zeros on the host, [num_tokens, hidden_size]."""
        return torch.zeros(num_tokens, self.config.hidden_size, dtype=getattr(torch, self.dtype))


class DecoderLayer:
    """Attention, then a gated MLP, each around a residual addition; their outputs are sums over the ranks."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, weights: LayerWeights, ranks: Ranks, widths: Widths
    ) -> None:
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
        self._qkv = linear_in(widths.sensitive, weights.qkv, weights.qkv_bias)
        self._output = linear_in(widths.others, weights.output, weights.output_bias)
        self._gate_up = linear_in(widths.others, weights.gate_up, is_gated=True)
        self._down = linear_in(widths.others, weights.down)
        self._activation = config.activation
        dtype, eps, adds_one = weights.qkv.dtype, config.norm_eps, config.norm_adds_one
        qk_norm = None if (weight := _per_head(weights)) is None else (weight, eps, adds_one)
        self.heads = fastest_heads(num_heads, num_kv_heads, config.head_dim, qk_norm, dtype, weights.qkv.device)

        def norm(weight: Tensor) -> Norm:
            return fastest_norm(weight, eps, dtype, adds_one=adds_one)

        self.attention_norm, self._mlp_norm = norm(weights.attention_norm), norm(weights.mlp_norm)
        outer = weights.attention_output_norm, weights.mlp_output_norm
        self._attention_output_norm, self._mlp_output_norm = (
            None if weight is None else norm(weight) for weight in outer
        )

    def refill(self, weights: LayerWeights) -> None:
        """Take other weights of the same shapes, and other scales."""
        self._qkv.refill(weights.qkv, weights.qkv_bias)
        self._output.refill(weights.output, weights.output_bias)
        self._gate_up.refill(weights.gate_up)
        self._down.refill(weights.down)
        for norm, weight in (
            (self.attention_norm, weights.attention_norm),
            (self._mlp_norm, weights.mlp_norm),
            (self._attention_output_norm, weights.attention_output_norm),
            (self._mlp_output_norm, weights.mlp_output_norm),
        ):
            if norm is not None and weight is not None:
                norm.refill(weight)
        self.heads.refill(_per_head(weights))
        self.attention.rescale(weights.k_scale, weights.v_scale)

    def __call__(
        self,
        hidden: Tensor,
        normed: Tensor,
        rotation: tuple[Tensor, ...],
        batches: AttentionBatches,
        next_norm: Norm,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states behind this layer, and the norm of them that comes next, each [num_tokens, hidden_size].

        Args:
            hidden, normed: those before it; `hidden` may be overwritten.
            rotation: what `heads` turns by, of this layer's rope.
        """
        query, key, value = self.heads(self._qkv(normed), rotation)
        attended = self.attention(query, key, value, batches).flatten(1)
        attended = self._ranks.all_reduce(self._output(attended))
        hidden, normed = self._mlp_norm.after(hidden, attended, self._attention_output_norm)
        activated = self._ranks.all_reduce(self._down(self._gate_up.gated(normed, self._activation)))
        return next_norm.after(hidden, activated, self._mlp_output_norm)


def _per_head(weights: LayerWeights) -> Tensor | None:
    """Query and key norms side by side, [num_heads + num_kv_heads, head_dim], so that one product serves both."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    num_heads, num_kv_heads = len(weights.shard.heads), len(weights.shard.kv_heads)
    return torch.cat((weights.q_norm.expand(num_heads, -1), weights.k_norm.expand(num_kv_heads, -1)))
