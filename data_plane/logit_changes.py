"""What requests change about their logits before a token is drawn, for a whole batch. Knows no rows and no history."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.protos.plan import IntArray


@dataclass(frozen=True, slots=True)
class Entries:
    """Single logits of a batch, each once: int64 columns of batch indices and token ids."""

    batch_indices: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.batch_indices).to(device), torch.from_numpy(self.token_ids).to(device)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What alone may come, for some batch indices, ascending: int64 [num_masked], and the ids as bits, int32
    [num_masked, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is that of id i.
    """

    batch_indices: NDArray[np.int64]
    bits: NDArray[np.int32]

    def apply(self, logits: Tensor) -> None:
        """Make -inf what may not come, in float32 [num_rows, vocab_size]."""
        unpacked = np.unpackbits(~self.bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        is_banned = torch.from_numpy(unpacked).view(torch.bool).to(logits.device)
        if len(self.batch_indices) == len(logits):
            logits.masked_fill_(is_banned, -torch.inf)
            return
        # Row after row where it lies: all of them at once would be copied out and back.
        for index, row in zip(self.batch_indices.tolist(), is_banned, strict=True):
            logits[index].masked_fill_(row, -torch.inf)


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes to a batch's logits, in the order in which they are made; None = of this kind there are none.

    Attributes:
        allowed: all that may come, for each batch index that is named at all.
        banned: what may not come.
        biased: what gets `biases`, float64 [num_biased], added.
        penalized: ids of prompts and outputs.
        output_counts: int64 [num_penalized], how often each stands in the output.
        penalties: float64 [num_penalized, 3]: repetition, frequency and presence penalty of each.
        masks: what structured outputs let come; changed together with `allowed`.
    """

    allowed: Entries | None
    banned: Entries | None
    biased: Entries | None
    biases: NDArray[np.float64]
    penalized: Entries | None
    output_counts: NDArray[np.int64]
    penalties: NDArray[np.float64]
    masks: TokenMasks | None = None

    @property
    def changed(self) -> NDArray[np.int64]:
        """Batch indices of the rows that change anything, some of them more than once."""
        kinds = (self.allowed, self.banned, self.biased, self.penalized)
        return np.concatenate([np.empty(0, np.int64), *(kind.batch_indices for kind in kinds if kind is not None)])

    def apply(self, logits: Tensor) -> None:
        """Change float32 [num_rows, vocab_size] in place. What may not come is -inf from here on."""
        device = logits.device
        if self.allowed is not None:
            places = self.allowed.on(device)
            allowed = logits[places]
            logits[places[0]] = -torch.inf
            logits[places] = allowed
        if self.masks is not None:
            self.masks.apply(logits)
        if self.banned is not None:
            logits[self.banned.on(device)] = -torch.inf
        if self.biased is not None:
            logits[self.biased.on(device)] += torch.from_numpy(self.biases).to(logits)
        if self.penalized is not None:
            self._penalize(logits, self.penalized.on(device))

    def _penalize(self, logits: Tensor, places: tuple[Tensor, Tensor]) -> None:
        """Repetition first (Keskar et al. 2019), then what is taken away for each time and for any."""
        counts = torch.from_numpy(self.output_counts).to(logits.device)
        repetition, frequency, presence = torch.from_numpy(self.penalties).to(logits.device).unbind(1)
        before = logits[places].double()
        after = torch.where(before > 0, before / repetition, before * repetition)
        after -= frequency * counts + presence * (counts > 0)
        # A quotient beyond float32 is still a number.
        logits[places] = after.clamp_max(torch.finfo(logits.dtype).max).to(logits.dtype)


def entries(parts: Sequence[tuple[int, IntArray]]) -> Entries | None:
    """Join (batch index, token ids) pairs; None if they hold nothing."""
    if not any(len(token_ids) for _, token_ids in parts):
        return None
    batch_indices = np.repeat([index for index, _ in parts], [len(token_ids) for _, token_ids in parts])
    token_ids = np.concatenate([token_ids for _, token_ids in parts])
    return Entries(batch_indices.astype(np.int64), token_ids.astype(np.int64))
