"""Chooses the next token of every row at once; knows neither requests nor where logits come from.

Each row pays for what it asks: a batch of greedy rows is one arg max.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.data_plane.drawing import Truncation, draw_from_all, draw_from_likeliest, uniform_noise
from blockplane.data_plane.likeliest import likeliest_one
from blockplane.data_plane.logit_changes import LogitChanges
from blockplane.data_plane.logprobs import logprobs_of
from blockplane.protos.logprobs import Logprobs
from blockplane.protos.plan import Int32Array, IntArray

NOT_FINITE = -1
"""Stands for the token of a row whose logits hold a NaN or an infinity, or to which no token is left."""
NO_LOGPROBS = -1
"""Stands for the number of log-probabilities of a row that asks for none, not even its own token's."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What a batch's rows ask for; columns [num_rows], and what `SamplingParams` says of each.

    Attributes:
        seed: uint64.
        positions: the position that the new token takes in its sequence.
        temperature, top_p, min_p: float64.
        top_k: int64, 0 .. vocab_size.
        num_logprobs: int32, or NO_LOGPROBS.
        logit_changes: None = nobody changes logits.
    """

    seed: NDArray[np.uint64]
    positions: IntArray
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    num_logprobs: NDArray[np.int32]
    logit_changes: LogitChanges | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """int32 [num_rows] token ids, or NOT_FINITE, and what is told of them, as much as each row asks for: of the model's
    distribution, before any change to it. None = nobody asks.
    """

    token_ids: Int32Array
    logprobs: Logprobs | None = None

    def take(self, samples: IntArray) -> "Samples":
        """Some of them, by index."""
        return Samples(self.token_ids[samples], None if self.logprobs is None else self.logprobs.take(samples))


def sample(logits: Tensor, batch: SamplingBatch) -> Samples:
    """Choose one token per row.

    Args:
        logits: float32 [num_rows, vocab_size]; changed in place where the batch asks for changes.
    """
    # One sum over a row is finite only if every entry is, short of an overflow that no sane logits reach.
    is_sound = torch.isfinite(logits.sum(dim=-1))
    telling = np.flatnonzero(batch.num_logprobs != NO_LOGPROBS)
    unchanged = logits[torch.from_numpy(telling)] if telling.size else None
    if batch.logit_changes is not None:
        batch.logit_changes.apply(logits)
        is_sound &= logits.amax(dim=-1) > -torch.inf
    token_ids = _choose(logits, batch)
    token_ids[~is_sound] = NOT_FINITE
    samples: Int32Array = token_ids.cpu().numpy().astype(np.int32)
    if unchanged is None:
        return Samples(samples)
    told = logprobs_of(unchanged, token_ids[torch.from_numpy(telling)], batch.num_logprobs[telling])
    num_entries = np.zeros(len(samples), np.int32)
    num_entries[telling] = told.num_entries
    return Samples(samples, replace(told, num_entries=num_entries))


def _choose(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Each row's token by its own way: int64 [num_rows]."""
    is_random = batch.temperature > 0
    if not is_random.any():
        return likeliest_one(logits)
    is_truncated = is_random & ((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0))
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if (rows := np.flatnonzero(~is_random)).size:
        token_ids[torch.from_numpy(rows)] = likeliest_one(_part(logits, rows))
    if (rows := np.flatnonzero(is_random & ~is_truncated)).size:
        heat = _heat(batch, rows, logits.device)
        token_ids[torch.from_numpy(rows)] = draw_from_all(_part(logits, rows), *heat)
    if (rows := np.flatnonzero(is_truncated)).size:
        heat, columns = _heat(batch, rows, logits.device), (batch.top_k, batch.top_p, batch.min_p)
        truncation = Truncation(*(torch.from_numpy(column[rows]).to(logits.device) for column in columns))
        token_ids[torch.from_numpy(rows)] = draw_from_likeliest(_part(logits, rows), *heat, truncation)
    return token_ids


def _part(logits: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """Those rows, ascending; all of them are not copied."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]


def _heat(batch: SamplingBatch, rows: NDArray[np.intp], device: torch.device) -> tuple[Tensor, Tensor]:
    """float64 [num_rows] each: temperature and noise of these rows."""
    noise = uniform_noise(batch.seed[rows], batch.positions[rows])
    return torch.from_numpy(batch.temperature[rows]).to(device), torch.from_numpy(noise).to(device)
