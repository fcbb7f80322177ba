"""Log-probabilities of tokens and of their likeliest rivals, as the model gives them. Knows no sampling parameters."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.data_plane.likeliest import likeliest
from blockplane.kernels.native import sampling as native
from blockplane.protos.logprobs import Logprobs, join

NUM_AT_ONCE = 128
"""Tokens of a prompt whose logits are there at a time."""


def logprobs_of(logits: Tensor, token_ids: Tensor, num_likeliest: NDArray[np.int32]) -> Logprobs:
    """Of one token in each row, and of the likeliest: natural logarithms of the softmax.

    Args:
        logits: float32 [num_tokens, vocab_size], as the model gave them.
        token_ids: [num_tokens], integers; below 0 = none, of which nothing is told.
        num_likeliest: int32 [num_tokens], how many are told beside each token; all where the vocabulary has no more.
    """
    num_likeliest = np.minimum(num_likeliest, logits.shape[1])
    if native.takes_logits(logits):
        entry_ids, logprobs = native.tell_rows(logits, np.maximum(token_ids.numpy(), 0), num_likeliest)
    else:
        entry_ids, logprobs = _tell_in_torch(logits, token_ids.clamp_min(0), int(num_likeliest.max()))
    num_entries = np.where(token_ids.cpu().numpy() < 0, 0, 1 + num_likeliest).astype(np.int32)
    is_told = np.arange(entry_ids.shape[1]) < num_entries[:, None]
    return Logprobs(num_entries, entry_ids[is_told], logprobs[is_told])


def _tell_in_torch(
    logits: Tensor, token_ids: Tensor, num_likeliest: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and log-probabilities, [num_tokens, 1 + num_likeliest] each: those of a row's own token first."""
    top = likeliest(logits, num_likeliest)
    chosen = logits.gather(1, token_ids[:, None].long())
    logprobs = torch.cat((chosen, top.logits), dim=1) - logits.logsumexp(1, keepdim=True)
    entry_ids = torch.cat((token_ids[:, None], top.token_ids), dim=1)
    return entry_ids.cpu().numpy().astype(np.int32), logprobs.cpu().numpy()


def prompt_logprobs(
    hidden: Tensor, token_ids: Tensor, project: Callable[[Tensor], Tensor], num_likeliest: int
) -> Logprobs:
    """Of prompt tokens that follow others, NUM_AT_ONCE tokens' logits at a time.

    Args:
        hidden: [num_tokens, hidden_size], hidden states of the tokens before them; at least one.
        token_ids: int64 [num_tokens], the tokens that follow, on the host.
        project: hidden states to float32 logits [num_hidden, vocab_size].
        num_likeliest: how many are told beside each token.
    """
    parts = []
    for states, following in zip(torch.split(hidden, NUM_AT_ONCE), torch.split(token_ids, NUM_AT_ONCE), strict=True):
        logits = project(states)
        asked = np.full(len(following), num_likeliest, np.int32)
        parts.append(logprobs_of(logits, following.to(logits.device), asked))
    return join(parts)
