"""Brings queries from HBM to columns that TensorE multiplies, and outputs back to rows of HBM; knows no cache."""

import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki.decode_plan import NUM_PARTITIONS, DecodePlan
from blockplane.kernels.nki.decode_rows import Lengths


def load_queries(plan: DecodePlan, lengths: Lengths, query: nl.NkiTensor, num_copies: int) -> nl.NkiTensor:
    """[num_copies * part_size, num_parts, num_columns], the queries of the share's items, transposed.

    What stands at a negative position is zero whatever it was, NaN included: a padding request's queries, and the first
    of a request with fewer new tokens than others. Of several copies each has partitions of its own, those of the keys
    that it meets.
    """
    num_columns = plan.share.num_items * plan.num_queries()
    part_size, num_parts = plan.part_size(), plan.num_parts()
    first_row = plan.share.first_item * plan.num_queries()
    rows = query.reshape((query.shape[0] * query.shape[1], num_parts, part_size))
    queries = nl.ndarray((num_copies * part_size, num_parts, num_columns), dtype=query.dtype, buffer=nl.sbuf)
    for first in range(0, num_columns, NUM_PARTITIONS):
        count = min(NUM_PARTITIONS, num_columns - first)
        loaded = nl.ndarray((count, num_parts, num_copies, part_size), dtype=query.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded[:, :, 0], src=rows[first_row + first : first_row + first + count])
        for copy in range(1, num_copies):
            nisa.tensor_copy(loaded[:, :, copy], loaded[:, :, 0])
        turned = nl.ndarray((num_copies * part_size, num_parts, count), dtype=query.dtype, buffer=nl.psum)
        for part in range(num_parts):
            nisa.nc_transpose(turned[:, part], loaded[:, part], engine=nisa.engine.tensor)
        nisa.tensor_copy(queries[:, :, first : first + count], turned, engine=nisa.engine.vector)
    absent = _absent(plan, lengths)[0 : num_copies * part_size, plan.request_columns_of(0, plan.share.num_items)]
    nisa.tensor_copy_predicated(queries, 0.0, absent.expand_dim(1).broadcast(1, num_parts))
    return queries


def store_outputs(
    plan: DecodePlan, first_item: int, end_item: int, outputs: nl.NkiTensor, output: nl.NkiTensor
) -> None:
    """Write the columns of some of the share's items, at most 128, of [part_size, num_parts, num_columns] to HBM."""
    first, end = first_item * plan.num_queries(), end_item * plan.num_queries()
    turned = nl.ndarray((end - first, plan.num_parts(), plan.part_size()), dtype=outputs.dtype, buffer=nl.psum)
    rows = nl.ndarray(turned.shape, dtype=outputs.dtype, buffer=nl.sbuf)
    for part in range(plan.num_parts()):
        nisa.nc_transpose(turned[:, part], outputs[:, part, first:end], engine=nisa.engine.tensor)
    nisa.tensor_copy(rows, turned, engine=nisa.engine.vector)
    all_rows = output.reshape((output.shape[0] * output.shape[1], plan.head_dim))
    first_row = plan.share.first_item * plan.num_queries()
    nisa.dma_copy(dst=all_rows[first_row + first : first_row + end], src=rows)


def _absent(plan: DecodePlan, lengths: Lengths) -> nl.NkiTensor:
    """uint8 [128, num_columns], 1 for each query of the share's requests that stands at a negative position."""
    per_request = plan.num_kv_heads * plan.num_queries()
    before = nl.ndarray((NUM_PARTITIONS, per_request), dtype=nl.float32, buffer=nl.sbuf)
    tokens = [[0, plan.num_kv_heads], [-1, plan.num_new_tokens], [0, plan.group]]
    nisa.iota(before, pattern=tokens, offset=0, channel_multiplier=0)
    absent = nl.ndarray((NUM_PARTITIONS, plan.share.num_requests, per_request), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(
        absent,
        lengths.starts.expand_dim(2).broadcast(2, per_request),
        before.expand_dim(1).broadcast(1, plan.share.num_requests),
        op=nl.less,
    )
    return absent.reshape((NUM_PARTITIONS, plan.share.num_requests * per_request))
