"""What one row's sampling depends on of its own tokens: ids that it has seen, bad words that it has begun.

Derived from the tokens alone, so that a request which loses its row and gets another goes on as if nothing had been.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockplane.protos.plan import Int32Array


class SeenTokens:
    """The ids in a row's prompt and output, each once, and how often it stands in the output."""

    def __init__(self, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        """`token_ids`: int32, all that are known of the row, of which the first are the prompt."""
        distinct, places = np.unique(token_ids, return_inverse=True)
        self._num_tokens, self._num_distinct = len(token_ids), len(distinct)
        self._token_ids = distinct.astype(np.int64)
        self._counts = np.bincount(places[num_prompt_tokens:], minlength=len(distinct)).astype(np.int64)
        self._place_of = {token_id: place for place, token_id in enumerate(distinct.tolist())}

    def catch_up(self, token_ids: Int32Array) -> None:
        """Count what the row's output has gained; `token_ids` are all of the row's."""
        for token_id in token_ids[self._num_tokens :].tolist():
            place = self._place_of.setdefault(token_id, self._num_distinct)
            if place == self._num_distinct:
                self._add(token_id)
            self._counts[place] += 1
        self._num_tokens = len(token_ids)

    def _add(self, token_id: int) -> None:
        if self._num_distinct == len(self._token_ids):
            room = np.zeros(len(self._token_ids), np.int64)
            self._token_ids, self._counts = (np.append(column, room) for column in (self._token_ids, self._counts))
        self._token_ids[self._num_distinct] = token_id
        self._num_distinct += 1

    def counts(self, draft_token_ids: Int32Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids and their numbers in the output, 0 = only in the prompt, were these drafts there too.

        Returns: int64 [num_distinct] twice.
        """
        token_ids, counts = self._token_ids[: self._num_distinct], self._counts[: self._num_distinct]
        if not draft_token_ids.size:
            return token_ids, counts
        drafted, num_drafted = np.unique(draft_token_ids, return_counts=True)
        places = np.array([self._place_of.get(token_id, -1) for token_id in drafted.tolist()])
        counts = counts.copy()
        counts[places[places >= 0]] += num_drafted[places >= 0]
        is_new = places < 0
        return np.append(token_ids, drafted[is_new]), np.append(counts, num_drafted[is_new])


class BadWords:
    """Sequences of ids that may not be completed."""

    def __init__(self, bad_words: Sequence[Sequence[int]]) -> None:
        self._always = [word[0] for word in bad_words if len(word) == 1]
        # By the last id before the one that would complete the word.
        self._after: dict[int, list[Int32Array]] = defaultdict(list)
        for word in bad_words:
            if len(word) > 1:
                self._after[word[-2]].append(np.array(word, np.int32))

    def banned_after(self, token_ids: Int32Array) -> list[int]:
        """The ids, maybe twice, that would complete a word behind these int32 tokens; there is at least one."""
        words = self._after.get(int(token_ids[-1]), ())
        return self._always + [int(word[-1]) for word in words if np.array_equal(token_ids[1 - len(word) :], word[:-1])]
