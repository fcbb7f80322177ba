"""Drafts from a row's own text: what followed the last time that its newest tokens stood there. Knows no model."""

import numpy as np

from blockplane.data_plane.inputs import StepInputs
from blockplane.data_plane.rows import Rows
from blockplane.protos.plan import Int32Array, IntArray, StepPlan

MAX_RUN = 3
"""Tokens; longer runs are rare enough that the last place of a shorter one says as much."""

_NOWHERE = 0
"""Stands for the place behind a run that has not been there before: no run ends in front of token 0."""
_NO_TOKEN = -1
"""Stands in front of a text."""


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the longest run of tokens that ends a row.

    Rows keep an index each, some 300 bytes for each token of theirs: a small part of what its KV takes.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._indexes: dict[int, RunIndex] = {}

    def build(self) -> None:
        """There is nothing to build."""

    def apply(self, plan: StepPlan) -> None:
        for row in plan.released_rows.tolist():
            self._indexes.pop(row, None)
        for admission in plan.admissions:
            self._indexes[admission.row] = RunIndex()

    def propose(self, decode_rows: IntArray, most: Int32Array) -> Int32Array:
        """Where the text ends before enough tokens have followed, it is taken to repeat itself."""
        rows, num_known = self._rows, self._rows.num_tokens[decode_rows]
        texts = zip(decode_rows.tolist(), num_known.tolist(), strict=True)
        starts = np.array([self._find(row, num) for row, num in texts])
        num_drafts = np.where(starts == _NOWHERE, np.int32(0), most)
        offsets = np.arange(most.max(initial=0)) % (num_known - starts)[:, None]
        rows.propose(decode_rows, rows.token_ids[decode_rows[:, None], starts[:, None] + offsets], num_drafts)
        return num_drafts

    def follow(self, prefill: StepInputs) -> None:
        """Index prompts as they are computed, lest a long one be indexed at once in a step that others wait for."""
        num_computed = self._rows.num_computed_tokens[prefill.rows] + prefill.num_scheduled_tokens
        for row, num in zip(prefill.rows.tolist(), num_computed.tolist(), strict=True):
            self._indexes[row].catch_up(self._rows.token_ids[row, :num])

    def _find(self, row: int, num_known: int) -> int:
        token_ids, index = self._rows.token_ids[row, :num_known], self._indexes[row]
        index.catch_up(token_ids)
        return index.find(token_ids)


class RunIndex:
    """For each run of 1 to MAX_RUN tokens, where one text goes on behind the latest of its occurrences."""

    def __init__(self) -> None:
        self._behind: dict[int | tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._newest = _NO_TOKEN, _NO_TOKEN
        """The last two that are indexed."""

    def catch_up(self, token_ids: Int32Array) -> None:
        """Take in what the text has gained, but for the runs that end with its last token: nothing follows them yet.

        `token_ids`: int32, all that are known of the text.
        """
        behind, (first, second) = self._behind, self._newest
        gained = token_ids[self._num_indexed : -1].tolist()
        for place, third in enumerate(gained, self._num_indexed + 1):
            behind[third] = behind[second, third] = behind[first, second, third] = place
            first, second = second, third
        self._newest = first, second
        self._num_indexed += len(gained)

    def find(self, token_ids: Int32Array) -> int:
        """The place behind the latest earlier occurrence of the longest run that ends the text, or _NOWHERE."""
        behind, newest = self._behind, tuple(token_ids[-MAX_RUN:].tolist())
        return behind.get(newest) or behind.get(newest[-2:]) or behind.get(newest[-1], _NOWHERE)
