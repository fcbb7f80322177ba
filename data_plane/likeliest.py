"""The k likeliest tokens of every row, in order, without sorting a vocabulary. Knows no temperatures and draws nothing.

Likelier is the larger logit, and among equal ones the lower id, so that there is one order and every way to it agrees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 64
"""Neighbouring ids whose largest logit stands for all of them; about the square root of vocabulary / k is best."""


_WIDE_BLOCK_SIZE = 512
"""The same where one token is sought: about the square root of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Each row's likeliest tokens, likeliest first: logits float32 and token_ids int64, both [num_rows, k]."""

    logits: Tensor
    token_ids: Tensor


def likeliest(logits: Tensor, k: int) -> Candidates:
    """The first k of each row of float32 [num_rows, vocab_size]; all of them where the vocabulary has no more.

    One pass finds the largest logit of each block of ids. The k likeliest tokens lie in the k blocks whose largest are
    likeliest: of a token outside them, each of those k blocks holds a likelier one. The ids behind the last whole block
    are looked at in any case.
    """
    num_rows, vocab_size = logits.shape
    k, num_blocks = min(k, vocab_size), vocab_size // BLOCK_SIZE
    token_ids = torch.arange(vocab_size, device=logits.device)
    if k == vocab_size:
        return Candidates(*logits.sort(dim=1, descending=True, stable=True))
    if num_blocks > k:
        num_in_blocks = num_blocks * BLOCK_SIZE
        by_block = logits[:, :num_in_blocks].view(num_rows, num_blocks, BLOCK_SIZE)
        blocks = _order(by_block.amax(-1), token_ids[:num_blocks]).topk(k, sorted=False).indices[..., None]
        in_blocks = by_block.gather(1, blocks.expand(-1, -1, BLOCK_SIZE)).flatten(1)
        ids_in_blocks = (blocks * BLOCK_SIZE + token_ids[:BLOCK_SIZE]).flatten(1)
        logits = torch.cat((in_blocks, logits[:, num_in_blocks:]), dim=1)
        token_ids = torch.cat((ids_in_blocks, token_ids[num_in_blocks:].expand(num_rows, -1)), dim=1)
    first = _order(logits, token_ids).topk(k).indices
    return Candidates(logits.gather(1, first), token_ids.expand_as(logits).gather(1, first))


def likeliest_one(logits: Tensor) -> Tensor:
    """The first of each row of float32 [num_rows, vocab_size]: int64 [num_rows].

    What `argmax` answers, in a fifth of its time: that of torch compares indices too, entry by entry, where `amax` has
    vector instructions. A row with a NaN gets any id.
    """
    num_rows, vocab_size = logits.shape
    num_in_blocks = vocab_size - vocab_size % _WIDE_BLOCK_SIZE
    largest = logits[:, :num_in_blocks].view(num_rows, -1, _WIDE_BLOCK_SIZE).amax(-1)
    if num_in_blocks < vocab_size:
        largest = torch.cat((largest, logits[:, num_in_blocks:].amax(-1, keepdim=True)), dim=1)
    first = largest.argmax(1, keepdim=True) * _WIDE_BLOCK_SIZE
    # Behind the vocabulary its last id is repeated, which is found where it stands first.
    token_ids = (first + torch.arange(_WIDE_BLOCK_SIZE, device=logits.device)).clamp_max(vocab_size - 1)
    return first.squeeze(1) + logits.gather(1, token_ids).argmax(1)


def _order(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64, larger = likelier, no two alike in a row: the bits of a float32 in numeric order, then those of the id."""
    # The sum makes the two zeros one. Below zero, bits grow away from it.
    bits = (logits + 0.0).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    order = bits.long()
    order <<= 32
    order -= token_ids
    return order
