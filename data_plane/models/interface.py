"""What the runner asks of a model; knows no architecture."""

from typing import Protocol

from torch import Tensor

from blockplane.data_plane.attention import Attention, AttentionBatches


class Model(Protocol):
    """A decoder: token ids and positions in, hidden states out; logits only for the rows that are sampled.

    Of a group, every rank has its own heads and computes every step; hidden states and logits are whole in all of them.
    """

    vocab_size: int
    dtype: str
    kv_cache_dtype: str
    """Of what the layers keep in their caches: `dtype`, or "float8_e4m3fn"."""
    attentions: tuple[Attention, ...]
    """One per layer, in layer order; the runner binds their KV caches."""
    fingerprint: bytes
    """The same for every process that loaded the same part of the same model for the same arithmetic."""

    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        """int64 [num_tokens] twice -> hidden states [num_tokens, hidden_size]; writes these tokens' KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_sampled, hidden_size] -> float32 [num_sampled, vocab_size]."""
        ...

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """[num_sampled, hidden_size] -> int64 [num_sampled], each one's likeliest token as the sampler has it, or -1
        where a logit is not finite; None = that is no cheaper than the logits."""
        ...

    def idle_hidden(self, num_tokens: int) -> Tensor:
        """Zeros on the host, in the shape and dtype of so many tokens' hidden states."""
        ...
