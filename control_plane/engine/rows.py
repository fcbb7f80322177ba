"""What the scheduler knows of admitted requests, one row each, in columns. Decides nothing."""

import numpy as np

from blockplane.control_plane.engine.request import EXPECTED_OUTPUT_TOKENS, Request
from blockplane.protos.plan import Int32Array, IntArray

NEVER = np.iinfo(np.int64).max


class Rows:
    """Rows 0 .. max_num_seqs - 1 of a worker group; written by the scheduler only.

    Attributes:
        requests: the request in each row, None = the row is free.
        token_ids: int32 [max_num_seqs, max_model_len], all answered tokens of each row.
        num_tokens: int64, how many of them: *confirmed*.
        num_granted: int64, tokens that are computed once the plans in flight land, at most: *granted*.
        final_len: int64, answered tokens at which the request ends at the latest; 0 = the row is free.
        grant_mark: int64; while no more is granted, neither blocks nor the final length are in the way.
        confirm_mark: int64; while fewer tokens are answered, no block has become full and no end is reached.
        num_published: int64, full blocks that the cache has been told of.
        decodes: bool, whether the row's whole prompt is granted and it decodes from the next plan on.
        stands: bool, whether the whole prompt is granted and it does not decode: others may take the request over.
        owners, stream_ids: int32, the request's.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.requests: list[Request | None] = [None] * max_num_seqs
        # Memory is taken from the system as rows grow, not here.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_granted = np.zeros(max_num_seqs, np.int64)
        self.final_len = np.zeros(max_num_seqs, np.int64)
        self.grant_mark = np.zeros(max_num_seqs, np.int64)
        self.confirm_mark = np.full(max_num_seqs, NEVER)
        self.num_published = np.zeros(max_num_seqs, np.int64)
        self.decodes = np.zeros(max_num_seqs, bool)
        self.stands = np.zeros(max_num_seqs, bool)
        self.owners = np.zeros(max_num_seqs, np.int32)
        self.stream_ids = np.zeros(max_num_seqs, np.int32)
        self._free = list(range(max_num_seqs))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.requests) - len(self._free)

    def num_to_compute(self) -> int:
        """Tokens that are left to grant, of outputs as many as are reckoned with."""
        ends = np.minimum(self.final_len, self.num_tokens + EXPECTED_OUTPUT_TOKENS)
        return int(np.maximum(ends - self.num_granted, 0).sum())

    def occupied(self) -> Int32Array:
        """int32, the rows that requests hold, ascending."""
        return np.array([row for row, request in enumerate(self.requests) if request is not None], np.int32)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def take(self, request: Request, num_computed_tokens: int, final_len: int) -> int:
        """Give a request a row, with so many of its tokens computed already."""
        row = request.row = self._free.pop()
        self.requests[row] = request
        self.token_ids[row, : request.num_tokens] = request.token_ids
        self.num_tokens[row] = request.num_tokens
        self.num_granted[row] = num_computed_tokens
        self.final_len[row] = final_len
        self.owners[row] = request.owner
        self.stream_ids[row] = request.stream_id
        return row

    def note_published(self, at: IntArray | int, num_blocks: IntArray | int, block_size: int) -> None:
        """So many full blocks of each row can be found; the next is full once the token after it is answered."""
        self.num_published[at] = num_blocks
        self.confirm_mark[at] = np.minimum((num_blocks + 1) * block_size + 1, self.final_len[at])

    def release(self, row: int) -> Request:
        """Take a request's row away; it keeps all its answered tokens."""
        request = self.request(row)
        request.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        request.row = None
        self.requests[row] = None
        self.decodes[row] = self.stands[row] = False
        self.final_len[row] = 0
        self._free.append(row)
        return request
