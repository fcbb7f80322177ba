"""Chooses the next token of every row at once; knows neither requests nor where logits come from.

Each row pays for what it asks: a batch of greedy rows is one arg max. C++ chooses where it is there, else torch does.
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
from blockplane.kernels.native import sampling as native
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

    @property
    def is_greedy(self) -> bool:
        """Whether nothing but each row's likeliest token is asked for."""
        is_plain = self.logit_changes is None and not self.temperature.any()
        return is_plain and bool((self.num_logprobs == NO_LOGPROBS).all())


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
    telling = np.flatnonzero(batch.num_logprobs != NO_LOGPROBS)
    unchanged = _part(logits, telling, copies=batch.logit_changes is not None)
    if batch.logit_changes is None:
        token_ids = _choose(logits, batch)
    else:
        is_finite = _find_finite_rows(logits)
        batch.logit_changes.apply(logits)
        token_ids = np.where(is_finite, _choose(logits, batch), np.int32(NOT_FINITE))
    if not telling.size:
        return Samples(token_ids)
    told = logprobs_of(unchanged, torch.from_numpy(token_ids[telling]), batch.num_logprobs[telling])
    num_entries = np.zeros(len(token_ids), np.int32)
    num_entries[telling] = told.num_entries
    return Samples(token_ids, replace(told, num_entries=num_entries))


def _find_finite_rows(logits: Tensor) -> NDArray[np.bool_]:
    """bool [num_rows]: whether all of a row's logits are finite."""
    if native.takes_logits(logits):
        return native.find_finite_rows(logits)
    # One sum over a row is finite only if every entry is, short of an overflow that no sane logits reach.
    is_finite: NDArray[np.bool_] = torch.isfinite(logits.sum(dim=-1)).cpu().numpy()
    return is_finite


def _choose(logits: Tensor, batch: SamplingBatch) -> Int32Array:
    """Each row's token, int32 [num_rows], or NOT_FINITE.

    Once something may have been banned, only a row to which nothing is left counts as not finite.
    """
    may_ban = batch.logit_changes is not None
    if native.takes_logits(logits):
        noise = uniform_noise(batch.seed, batch.positions) if batch.temperature.any() else batch.temperature
        columns = batch.temperature, noise, batch.top_k, batch.top_p, batch.min_p
        return native.sample_rows(logits, *columns, may_ban=may_ban)
    is_sound = logits.amax(dim=-1).cpu().numpy() > -np.inf if may_ban else _find_finite_rows(logits)
    token_ids: Int32Array = _choose_in_torch(logits, batch).cpu().numpy().astype(np.int32)
    token_ids[~is_sound] = NOT_FINITE
    return token_ids


def _choose_in_torch(logits: Tensor, batch: SamplingBatch) -> Tensor:
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


def _part(logits: Tensor, rows: NDArray[np.intp], *, copies: bool = False) -> Tensor:
    """Those rows, ascending; all of them are only copied where a copy is asked for."""
    return logits if len(rows) == len(logits) and not copies else logits[torch.from_numpy(rows)]


def _heat(batch: SamplingBatch, rows: NDArray[np.intp], device: torch.device) -> tuple[Tensor, Tensor]:
    """float64 [num_rows] each: temperature and noise of these rows."""
    noise = uniform_noise(batch.seed[rows], batch.positions[rows])
    return torch.from_numpy(batch.temperature[rows]).to(device), torch.from_numpy(noise).to(device)
