"""Requests with rows: they get rows, blocks and stops together, and lose them together. Decides nothing."""

import numpy as np

from blockplane.control_plane.engine.kv_blocks import KVBlocks, Prefix
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.rows import Rows
from blockplane.control_plane.engine.step import NO_ROW_SET, RowSet, Segment
from blockplane.control_plane.engine.stops import Stops
from blockplane.protos.plan import Configure, Int32Array, IntArray


class Running:
    """The rows of a worker group with the blocks behind them. `Planner` says who comes and who goes.

    Attributes:
        prefilling: rows inside their prompts, in the order of admission: one that a step left there, and those that are
            prefilled beside it.
        num_released: how many rows were ever released; as long as there are no more, every request has its row still.
        hands_over: whether rows stand once their prompts are computed, instead of decoding.
    """

    def __init__(self, configure: Configure, blocks: KVBlocks, stops: Stops) -> None:
        self.configure = configure
        self.blocks = blocks
        self.rows = Rows(configure.max_num_seqs, configure.max_model_len)
        self.prefilling: list[int] = []
        self.num_released = 0
        self.hands_over = False
        self._stops = stops
        self._released_rows: list[int] = []
        self._decodes: RowSet | None = NO_ROW_SET
        """The rows that decode; None = they have changed."""

    def admit(self, request: Request, prefix: Prefix) -> int:
        """Give a request a row of its own, behind blocks that others filled."""
        most_asked = request.num_prompt_tokens + request.params.max_tokens
        final_len = min(self.configure.max_model_len, most_asked, self.blocks.capacity + 1)
        row = self.rows.take(request, prefix.num_blocks * self.configure.block_size, final_len)
        self.blocks.take(row, prefix)
        self._stops.expect(request.params.stop_token_ids)
        self.prefilling.append(row)
        return row

    def grow(self, at: IntArray, num_new: IntArray) -> tuple[IntArray, Int32Array] | None:
        """Hold so many more logical blocks for each of these rows; answers as `KVBlocks.grow` does."""
        grown = self.blocks.grow(at, num_new)
        if grown is not None:
            room = self.blocks.num_blocks[at] * self.configure.block_size
            self.rows.grant_mark[at] = np.minimum(room, self.rows.final_len[at] - 1)
        return grown

    def vacate(self, row: int) -> Request:
        """Take a row from its request, with all that it holds."""
        self.blocks.vacate(row)
        if self.rows.decodes[row]:
            self._decodes = None
        if row in self.prefilling:
            self.prefilling.remove(row)
        request = self.rows.release(row)
        self._stops.forget(request.params.stop_token_ids)
        self._released_rows.append(row)
        self.num_released += 1
        return request

    def has_released(self) -> bool:
        """Whether there are rows that the worker does not know to be free."""
        return bool(self._released_rows)

    def take_released(self) -> list[int]:
        """Those rows; a plan tells of them now."""
        released_rows, self._released_rows = self._released_rows, []
        return released_rows

    def decode_set(self) -> RowSet:
        """The rows that decode and may go on; the same object as long as they are the same."""
        if self._decodes is None:
            may_go_on = self.rows.num_granted < self.rows.final_len - 1
            rows = np.flatnonzero(self.rows.decodes & may_go_on)
            self._decodes = RowSet(rows, tuple(self.rows.request(row) for row in rows.tolist()))
        return self._decodes

    def change_decodes(self) -> None:
        """Some row was granted all that it may get, or, where it was granted drafts, got less."""
        self._decodes = None

    def filled_by(self, segment: Segment) -> tuple[int, int]:
        """The first logical block that a segment fills, and the one behind the last."""
        return segment.start // self.configure.block_size, segment.stop // self.configure.block_size

    def complete(self, segment: Segment) -> None:
        """The plan is made: the next one may find the blocks that this segment fills, and decode where it ends."""
        rows, block_size, row = self.rows, self.configure.block_size, segment.row
        first, past = self.filled_by(segment)
        tokens = rows.token_ids[row, first * block_size : past * block_size].tobytes()
        self.blocks.publish(segment.request, row, first, past, tokens)
        rows.note_published(row, past, block_size)
        if segment.samples:
            self.prefilling.remove(row)
            if self.hands_over:
                rows.stands[row] = True
            else:
                self.decode(row)

    def decode(self, row: int) -> None:
        """Let a row decode from the next plan on."""
        self.rows.decodes[row], self.rows.stands[row] = True, False
        self._decodes = None

    def standing(self) -> list[Request]:
        """The requests whose rows stand and whose prompts' computation is answered."""
        rows = self.rows
        if not np.count_nonzero(rows.stands):
            return []
        is_answered = rows.stands & (rows.num_tokens > rows.num_granted)
        return [rows.request(row) for row in np.flatnonzero(is_answered).tolist()]
