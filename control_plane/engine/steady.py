"""Steps that bring one token to each decoding row and nothing else: kept aside, and written into the rows later.

Knows neither blocks nor requests: it is told how far the marks are.
"""

import numpy as np

from blockplane.control_plane.engine.rows import Rows
from blockplane.control_plane.engine.step import RowSet
from blockplane.protos.plan import Int32Array


class SteadyDecode:
    """A decode set until the first of its rows reaches a mark. Until then a step costs a count and a reference.

    The one other writer of the rows' `num_granted`, `num_tokens` and `token_ids`, whenever the scheduler folds it.
    """

    def __init__(self, rows: Rows, decodes: RowSet) -> None:
        at = decodes.rows
        self.decodes = decodes
        self.owners, self.stream_ids = rows.owners[at], rows.stream_ids[at]
        self._rows = rows
        self._num_grants_left = int((rows.grant_mark[at] - rows.num_granted[at]).min())
        # The answer that reaches a mark has work behind it.
        self._num_answers_left = int((rows.confirm_mark[at] - rows.num_tokens[at]).min()) - 1
        self._num_grants = 0
        self._answers: list[Int32Array] = []

    def grant(self) -> bool:
        """Grant each row a token more; False = some row is at its mark, and nothing has changed."""
        if self._num_grants_left <= 0:
            return False
        self._num_grants_left -= 1
        self._num_grants += 1
        return True

    def answer(self, token_ids: Int32Array) -> bool:
        """Give each row its token, int32 [num_rows]; False = some row reaches its mark, and nothing has changed."""
        if self._num_answers_left <= 0:
            return False
        self._num_answers_left -= 1
        self._answers.append(token_ids)
        return True

    def fold(self) -> None:
        """Write into the rows what was kept aside."""
        rows, at = self._rows, self.decodes.rows
        rows.num_granted[at] += self._num_grants
        self._num_grants = 0
        if self._answers:
            news = np.stack(self._answers, axis=1)
            positions = rows.num_tokens[at][:, None] + np.arange(news.shape[1])
            rows.token_ids[at[:, None], positions] = news
            rows.num_tokens[at] += news.shape[1]
            self._answers = []
