"""Log-probabilities of tokens and of their likeliest rivals, as the model gives them. Knows no sampling parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockplane.data_plane.likeliest import likeliest


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural logarithms of the softmax of unchanged logits, float32; token ids are int64.

    Attributes:
        logprobs: [num_tokens], of the tokens themselves; NaN where a row has none.
        top_token_ids, top_logprobs: [num_tokens, num_top], the likeliest first.
    """

    logprobs: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: int) -> LogProbs:
    """Of one token, and of the `num_top` likeliest, in each row.

    Args:
        logits: float32 [num_tokens, vocab_size], as the model gave them.
        token_ids: int64 [num_tokens]; below 0 = none.
    """
    normalizer = logits.logsumexp(1, keepdim=True)
    chosen = logits.gather(1, token_ids.clamp_min(0)[:, None]) - normalizer
    top = likeliest(logits, num_top)
    return LogProbs(torch.where(token_ids < 0, torch.nan, chosen.squeeze(1)), top.token_ids, top.logits - normalizer)


def prompt_logprobs(
    hidden: Tensor, token_ids: Tensor, project: Callable[[Tensor], Tensor], num_top: int, num_at_once: int = 128
) -> LogProbs:
    """Of every token of a prompt that follows another, `num_at_once` tokens' logits at a time.

    Args:
        hidden: [num_tokens - 1, hidden_size], hidden states of all tokens but the last.
        token_ids: int64 [num_tokens - 1], the tokens that follow them.
        project: hidden states to float32 logits [num_hidden, vocab_size].
    """
    pieces = [
        logprobs_of(project(states), following, num_top)
        for states, following in zip(torch.split(hidden, num_at_once), torch.split(token_ids, num_at_once), strict=True)
    ]
    return LogProbs(
        torch.cat([piece.logprobs for piece in pieces]),
        torch.cat([piece.top_token_ids for piece in pieces]),
        torch.cat([piece.top_logprobs for piece in pieces]),
    )
