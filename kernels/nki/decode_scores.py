"""Multiplies a piece's queries by its keys into banks of PSUM, and weights by values; knows no length and no softmax.

Keys arrive with positions on partitions and are needed with dimensions there: TensorE transposes them, 128 numbers of
each position's at a time, so two positions at once of a head of 64. As what is stationary they then give scores with
positions on partitions, where weights are to meet values.
"""

import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki.decode_plan import NUM_PARTITIONS, DecodePlan, Piece

TURNED_PER_BANK = 8
"""Transposed [128, 128] tiles of 2 bytes that one bank of PSUM holds."""


def num_query_copies(plan: DecodePlan) -> int:
    """How many positions are transposed at once, each against queries on partitions of their own."""
    return _turned_size(plan) // plan.part_size()


def multiply_keys(plan: DecodePlan, piece: Piece, keys: nl.NkiTensor, queries: nl.NkiTensor) -> list[nl.NkiTensor]:
    """Banks of scores, float32 [128, num_columns, num_tiles] in PSUM: of the piece's next `tiles_per_bank` tiles each.

    Args:
        keys: [128, num_items, num_gathers, positions_per_row, head_dim].
        queries: [num_copies * part_size, num_parts, num_columns], the piece's, of `num_query_copies` copies.
    """
    part_size, num_queries = plan.part_size(), plan.num_queries()
    turned_size = _turned_size(plan)
    banks = _new_banks(plan, piece)
    for item in range(piece.num_items):
        columns = nl.ds(item * num_queries, num_queries)
        for gather in range(piece.num_gathers):
            turned = _turned_rows(plan, keys[:, item, gather], gather)
            for offset in range(plan.positions_per_row):
                tile = gather * plan.positions_per_row + offset
                scores = banks[tile // plan.tiles_per_bank][:, columns, tile % plan.tiles_per_bank]
                for part in range(plan.num_parts()):
                    dim = offset * plan.head_dim + part * part_size
                    place = nl.ds(dim % turned_size, part_size)
                    nisa.nc_matmul(
                        scores,
                        stationary=turned[place, dim // turned_size],
                        moving=queries[place, part, columns],
                        accumulate=part > 0,
                    )
    return banks


def multiply_tail_keys(plan: DecodePlan, piece: Piece, keys: nl.NkiTensor, queries: nl.NkiTensor) -> nl.NkiTensor:
    """float32 [tail_size, num_columns, 1] in PSUM, from keys [tail_size, num_items, head_dim]."""
    part_size, num_parts, num_queries = plan.part_size(), plan.num_parts(), plan.num_queries()
    turned = nl.ndarray((part_size, piece.num_items, num_parts, plan.tail_size), dtype=keys.dtype, buffer=nl.psum)
    stationary = nl.ndarray(turned.shape, dtype=keys.dtype, buffer=nl.sbuf)
    for item in range(piece.num_items):
        for part in range(num_parts):
            of_part = keys[:, item, part * part_size : (part + 1) * part_size]
            nisa.nc_transpose(turned[:, item, part], of_part, engine=nisa.engine.tensor)
    nisa.tensor_copy(stationary, turned, engine=nisa.engine.scalar)
    shape = (plan.tail_size, piece.num_items * num_queries, 1)
    scores = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    for item in range(piece.num_items):
        columns = nl.ds(item * num_queries, num_queries)
        for part in range(num_parts):
            nisa.nc_matmul(
                scores[:, columns, 0],
                stationary=stationary[:, item, part],
                moving=queries[0:part_size, part, columns],
                accumulate=part > 0,
            )
    return scores


def multiply_values(
    plan: DecodePlan, piece: Piece, sums: nl.NkiTensor, weights: list[nl.NkiTensor], values: nl.NkiTensor
) -> None:
    """sums[:, part, columns] = the values by their weights, in PSUM.

    Args:
        weights: bfloat16, as the banks; one that is of the tails is left to `multiply_tail_values`.
        values: shaped as keys.
    """
    part_size, num_queries = plan.part_size(), plan.num_queries()
    for item in range(piece.num_items):
        columns = nl.ds(item * num_queries, num_queries)
        for tile in range(piece.num_gathers * plan.positions_per_row):
            of_tile = values[:, item, tile // plan.positions_per_row, tile % plan.positions_per_row]
            moving = weights[tile // plan.tiles_per_bank][:, columns, tile % plan.tiles_per_bank]
            for part in range(plan.num_parts()):
                nisa.nc_matmul(
                    sums[:, part, columns],
                    stationary=of_tile[:, part * part_size : (part + 1) * part_size],
                    moving=moving,
                    accumulate=tile > 0,
                )


def multiply_tail_values(
    plan: DecodePlan, piece: Piece, sums: nl.NkiTensor, weights: nl.NkiTensor, values: nl.NkiTensor
) -> None:
    """Add the tail's values, [tail_size, num_items, head_dim], by their weights, [tail_size, num_columns, 1]."""
    part_size, num_queries = plan.part_size(), plan.num_queries()
    for item in range(piece.num_items):
        columns = nl.ds(item * num_queries, num_queries)
        for part in range(plan.num_parts()):
            nisa.nc_matmul(
                sums[:, part, columns],
                stationary=values[:, item, part * part_size : (part + 1) * part_size],
                moving=weights[:, columns, 0],
                accumulate=True,
            )


def _new_banks(plan: DecodePlan, piece: Piece) -> list[nl.NkiTensor]:
    banks = []
    num_tiles = piece.num_gathers * plan.positions_per_row
    for first in range(0, num_tiles, plan.tiles_per_bank):
        count = min(plan.tiles_per_bank, num_tiles - first)
        shape = (NUM_PARTITIONS, piece.num_items * plan.num_queries(), count)
        banks.append(nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum))
    return banks


def _turned_size(plan: DecodePlan) -> int:
    """Numbers that are transposed at once: of several positions if the head is small and partitions allow."""
    if NUM_PARTITIONS % plan.part_size():
        return plan.part_size()
    return min(NUM_PARTITIONS, plan.positions_per_row * plan.part_size())


def _turned_rows(plan: DecodePlan, rows: nl.NkiTensor, gather: int) -> nl.NkiTensor:
    """[turned_size, positions_per_row * head_dim / turned_size, 128] of [128, positions_per_row, head_dim]."""
    size = _turned_size(plan)
    num_tiles = plan.positions_per_row * plan.head_dim // size
    flat = rows.reshape((NUM_PARTITIONS, num_tiles, size))
    result = nl.ndarray((size, num_tiles, NUM_PARTITIONS), dtype=rows.dtype, buffer=nl.sbuf)
    for first in range(0, num_tiles, TURNED_PER_BANK):
        count = min(TURNED_PER_BANK, num_tiles - first)
        turned = nl.ndarray((size, count, NUM_PARTITIONS), dtype=rows.dtype, buffer=nl.psum)
        for tile in range(count):
            nisa.nc_transpose(turned[:, tile], flat[:, first + tile], engine=nisa.engine.tensor)
        nisa.tensor_copy(
            result[:, first : first + count], turned, engine=_copier(plan, gather + first // TURNED_PER_BANK)
        )
    return result


def _copier(plan: DecodePlan, index: int) -> nisa.engine:
    """Of every four banks, those that ScalarE empties: the more, the more scores VectorE has to reduce per key."""
    return nisa.engine.scalar if index % 4 < 2 + plan.num_queries() // 32 else nisa.engine.vector
