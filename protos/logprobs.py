"""Log-probabilities as they cross boundaries, columnar; knows neither tensors nor protobuf."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model thought of tokens in a row, each with entries of its own: itself, then the likeliest in order.

    Attributes:
        num_entries: int32 [num_tokens], one more than the likeliest that are told; 0 = nobody asked about this token.
        token_ids: int32 [sum of num_entries], token after token.
        logprobs: float32, as many: natural logarithms of the softmax of unchanged logits.
    """

    num_entries: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def take(self, tokens: NDArray[np.integer[Any]]) -> "Logprobs":
        """The same of some tokens, by index, in that order."""
        before = np.cumsum(self.num_entries) - self.num_entries
        num_entries = self.num_entries[tokens]
        shifts = before[tokens] - (np.cumsum(num_entries) - num_entries)
        entries = np.arange(num_entries.sum()) + np.repeat(shifts, num_entries)
        return Logprobs(num_entries, self.token_ids[entries], self.logprobs[entries])

    def by_token(self) -> Iterator[tuple[list[int], list[float]]]:
        """Of each token its entries' ids and their log-probabilities, its own first."""
        token_ids, logprobs = self.token_ids.tolist(), self.logprobs.tolist()
        for start, stop in _runs(self.num_entries.tolist()):
            yield token_ids[start:stop], logprobs[start:stop]

    def split(self, num_tokens: Sequence[int]) -> list["Logprobs"]:
        """The same in runs of so many tokens, which are all tokens together."""
        before = np.concatenate(([0], np.cumsum(self.num_entries)))
        runs = ((slice(start, stop), slice(before[start], before[stop])) for start, stop in _runs(num_tokens))
        return [
            Logprobs(self.num_entries[tokens], self.token_ids[entries], self.logprobs[entries])
            for tokens, entries in runs
        ]


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """Those of several runs of tokens, end to end; at least one."""
    return Logprobs(
        np.concatenate([part.num_entries for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
    )


def join_told(parts: Sequence[tuple[int, Logprobs | None]]) -> Logprobs | None:
    """The same where each run is its number of tokens and what is told of them, None = nothing; None = of no token."""
    if not any(logprobs is not None and logprobs.token_ids.size for _, logprobs in parts):
        return None
    return join([_untold(num_tokens) if logprobs is None else logprobs for num_tokens, logprobs in parts])


def _runs(num_tokens: Iterable[int]) -> Iterable[tuple[int, int]]:
    return pairwise(accumulate(num_tokens, initial=0))


def _untold(num_tokens: int) -> Logprobs:
    return Logprobs(np.zeros(num_tokens, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
