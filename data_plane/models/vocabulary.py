"""A vocabulary divided among ranks: any token's embedding and all tokens' logits in each; knows no model."""

from torch import Tensor

from blockplane.data_plane.models.linear import Linear
from blockplane.data_plane.ranks.collectives import Ranks


def embed(token_ids: Tensor, embeddings: Linear, own: range, ranks: Ranks) -> Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden_size], of which each rank has looked up its own.

    Args:
        embeddings: rows of the tokens in `own`, and whatever comes behind them.
    """
    if ranks.world_size == 1:
        return embeddings.embed(token_ids)
    is_foreign = (token_ids < own.start) | (token_ids >= own.stop)
    rows = (token_ids - own.start).masked_fill(is_foreign, 0)
    # Sums of one number and zeros: exact in any dtype.
    return ranks.all_reduce(embeddings.embed(rows).masked_fill(is_foreign[:, None], 0))


def whole_logits(own: Tensor, vocab_size: int, ranks: Ranks) -> Tensor:
    """[num_sampled, rows per rank] -> [num_sampled, vocab_size]; rows behind the vocabulary's last are left out."""
    if ranks.world_size == 1:
        return own
    return ranks.all_gather(own).transpose(0, 1).flatten(1)[:, :vocab_size]
