"""Hides keys from queries in a piece's scores: rows not read, positions out of reach, absent tokens; knows no key."""

import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki.decode_plan import NUM_PARTITIONS, DecodePlan, Piece
from blockplane.kernels.nki.decode_rows import ContextRows, of_piece
from blockplane.kernels.nki.decode_tails import Tails
from blockplane.kernels.nki.psum_softmax import HIDDEN, Constants, add_mask


def hide(
    plan: DecodePlan, piece: Piece, banks: list[nl.NkiTensor], rows: ContextRows, tails: Tails, constants: Constants
) -> None:
    """Add the masks to `decode_scores.multiply_keys`' banks, and to the last one, the tails', if the piece has them."""
    for item in range(piece.num_items):
        request = plan.request_of(piece.first_item + item)
        columns = nl.ds(item * plan.num_queries(), plan.num_queries())
        _hide_rows(plan, piece, banks, columns, rows, request, constants)
        if plan.is_limited:
            _hide_before(plan, piece, banks, columns, rows, request, constants)
    if plan.has_tails(piece):
        hidden = tails.hidden[:, plan.request_columns_of(piece.first_item, piece.num_items)]
        add_mask(banks[len(banks) - 1], hidden, constants)


def _hide_rows(
    plan: DecodePlan,
    piece: Piece,
    banks: list[nl.NkiTensor],
    columns: nl.ds,
    rows: ContextRows,
    request: int,
    constants: Constants,
) -> None:
    """All positions of rows that were not read."""
    hidden = of_piece(plan, piece, rows.hidden[:, request])
    num_tiles = piece.num_gathers * plan.positions_per_row
    for first in range(0, num_tiles, plan.tiles_per_bank):
        # A bank holds whole gathers or a part of one.
        count = min(plan.tiles_per_bank, num_tiles - first)
        per_gather = min(count, plan.positions_per_row)
        gathers = hidden[:, nl.ds(first // plan.positions_per_row, count // per_gather)]
        of_columns = gathers.expand_dim(1).broadcast(1, plan.num_queries())
        scores = banks[first // plan.tiles_per_bank][:, columns]
        add_mask(scores, of_columns.expand_dim(3).broadcast(3, per_gather), constants)


def _hide_before(
    plan: DecodePlan,
    piece: Piece,
    banks: list[nl.NkiTensor],
    columns: nl.ds,
    rows: ContextRows,
    request: int,
    constants: Constants,
) -> None:
    """What lies before each new token's window or chunk."""
    shape = (NUM_PARTITIONS, plan.num_new_tokens, piece.num_gathers, plan.positions_per_row)
    hidden = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    positions = of_piece(plan, piece, rows.positions)
    for token in range(plan.num_new_tokens):
        least = rows.least[:, request, token]
        nisa.tensor_scalar(hidden[:, token], positions, op0=nl.less, operand0=least, op1=nl.multiply, operand1=HIDDEN)
    num_tiles = piece.num_gathers * plan.positions_per_row
    by_tile = hidden.reshape((NUM_PARTITIONS, plan.num_new_tokens, num_tiles))
    for first in range(0, num_tiles, plan.tiles_per_bank):
        tiles = nl.ds(first, min(plan.tiles_per_bank, num_tiles - first))
        scores = banks[first // plan.tiles_per_bank][:, columns]
        add_mask(scores, by_tile[:, :, tiles].expand_dim(2).broadcast(2, plan.group), constants)
