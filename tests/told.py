"""Log-probabilities as plain lists: per token its (id, logarithm) entries. Knows no columns' arithmetic."""

import numpy as np

from blockplane.protos.logprobs import Logprobs

Entries = list[tuple[int, float]]


def columns_of(tokens: list[Entries]) -> Logprobs:
    return Logprobs(
        np.array([len(entries) for entries in tokens], np.int32),
        np.array([token_id for entries in tokens for token_id, _ in entries], np.int32),
        np.array([logprob for entries in tokens for _, logprob in entries], np.float32),
    )


def lists_of(logprobs: Logprobs | None) -> list[Entries]:
    """Nothing told is the same as no token."""
    if logprobs is None:
        return []
    entries = iter(zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), strict=True))
    tokens = [[next(entries) for _ in range(count)] for count in logprobs.num_entries.tolist()]
    assert next(entries, None) is None, "every entry belongs to a token"
    return tokens
