"""The tail of each request: its new tokens, and what its whole rows leave of its cache; knows no key and no value.

Token t of a tail stands on partition t: the new tokens first, then what is left, fewer than a row. A tail is read token
by token, since a whole row would read slots that the request does not own.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki.decode_plan import DecodePlan, log2
from blockplane.kernels.nki.decode_rows import Lengths
from blockplane.kernels.nki.psum_softmax import HIDDEN


@dataclass
class Tails(nl.NKIObject):
    """Of all requests.

    Attributes:
        ids: int32 [tail_size, num_kv_heads, num_requests], where each token stands in the flattened head-major cache;
            negative where there is none.
        hidden: bfloat16 [tail_size, num_columns], HIDDEN or less where a query does not see a token; a column for each
            query of each KV head of each of the share's requests.
    """

    ids: nl.NkiTensor
    hidden: nl.NkiTensor


def tails_of(plan: DecodePlan, lengths: Lengths, block_table: nl.NkiTensor, active_mask: nl.NkiTensor) -> Tails:
    """From the block table, int32 [batch, table_width], and the mask of the new tokens, both in HBM."""
    tokens = nl.ndarray((plan.tail_size, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(tokens, pattern=[[0, 1]], offset=0, channel_multiplier=1)
    is_left = nl.ndarray((plan.tail_size, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(is_left, tokens, op0=nl.greater_equal, operand0=float(plan.num_new_tokens))
    positions = _positions(plan, lengths, tokens, is_left)
    absent = _absent(plan, lengths, positions, is_left)
    whole_positions = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(whole_positions, positions)
    blocks = _blocks(plan, block_table, whole_positions, absent)
    hidden = _hidden(plan, active_mask, blocks)
    if plan.is_limited:
        _hide_before(plan, lengths, positions, hidden)
    return Tails(_ids(plan, blocks, whole_positions), hidden)


def _positions(plan: DecodePlan, lengths: Lengths, tokens: nl.NkiTensor, is_left: nl.NkiTensor) -> nl.NkiTensor:
    """float32 [tail_size, num_requests]: starts + t of the new tokens; then the end of the whole rows, and on."""
    shape = (plan.tail_size, plan.share.num_requests)
    starts = lengths.starts[0 : plan.tail_size]
    whole = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    per_row = float(plan.positions_per_row)
    nisa.tensor_scalar(whole, lengths.num_rows[0 : plan.tail_size], op0=nl.multiply, operand0=per_row)
    # starts + is_left * (whole - num_new_tokens - starts) + t
    shift = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        shift, whole, op0=nl.subtract, operand0=float(plan.num_new_tokens), op1=nl.subtract, operand1=starts
    )
    positions = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(positions, shift, op0=nl.multiply, operand0=is_left, op1=nl.add, operand1=starts)
    nisa.tensor_scalar(positions, positions, op0=nl.add, operand0=tokens)
    return positions


def _absent(plan: DecodePlan, lengths: Lengths, positions: nl.NkiTensor, is_left: nl.NkiTensor) -> nl.NkiTensor:
    """int32 [tail_size, num_requests], -1 where there is no token, else 0.

    None is at a negative position, where a request has fewer new tokens than others; nothing is left from `starts` on.
    """
    early = nl.ndarray(positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(early, positions, op0=nl.less, operand0=0.0)
    late = nl.ndarray(positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(late, positions, lengths.starts[0 : plan.tail_size], op=nl.greater_equal)
    either = nl.ndarray(positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(either, late, op0=nl.multiply, operand0=is_left, op1=nl.add, operand1=early)
    absent = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(absent, either, op0=nl.multiply, operand0=-1.0)
    return absent


def _blocks(plan: DecodePlan, block_table: nl.NkiTensor, positions: nl.NkiTensor, absent: nl.NkiTensor) -> nl.NkiTensor:
    """int32 [tail_size, num_requests], the block of each token; -1 where there is none."""
    entries = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(entries, positions, op0=nl.right_shift, operand0=log2(plan.block_size))
    table_rows = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(
        table_rows,
        pattern=[[plan.table_width, plan.share.num_requests]],
        offset=plan.share.first_request * plan.table_width,
        channel_multiplier=0,
    )
    nisa.tensor_tensor(entries, entries, table_rows, op=nl.add)
    # All bits of -1 are set: "or" leaves -1 where no token is.
    nisa.tensor_tensor(entries, entries, absent, op=nl.bitwise_or)
    blocks = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(blocks, -1)
    table = block_table.reshape((block_table.shape[0] * plan.table_width, 1))
    for request in range(plan.share.num_requests):
        nisa.dma_copy(
            dst=blocks[:, request : request + 1],
            src=table.ap(
                pattern=[[1, plan.tail_size], [1, 1]],
                vector_offset=entries[:, request : request + 1],
                indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )
    return blocks


def _ids(plan: DecodePlan, blocks: nl.NkiTensor, positions: nl.NkiTensor) -> nl.NkiTensor:
    """(block * num_kv_heads + head) * block_size + offset, in exact integers; negative for a block of -1."""
    offsets = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(offsets, positions, op0=nl.bitwise_and, operand0=plan.block_size - 1)
    slots_per_block = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(slots_per_block, plan.num_kv_heads * plan.block_size)
    slots = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(slots, blocks, slots_per_block, op=nl.multiply)
    nisa.tensor_tensor(slots, slots, offsets, op=nl.add)
    ids = nl.ndarray((plan.tail_size, plan.num_kv_heads, plan.share.num_requests), dtype=nl.int32, buffer=nl.sbuf)
    heads = [[plan.block_size, plan.num_kv_heads], [0, plan.share.num_requests]]
    nisa.iota(ids, pattern=heads, offset=0, channel_multiplier=0)
    nisa.tensor_tensor(ids, ids, slots.expand_dim(1).broadcast(1, plan.num_kv_heads), op=nl.add)
    return ids


def _hidden(plan: DecodePlan, active_mask: nl.NkiTensor, blocks: nl.NkiTensor) -> nl.NkiTensor:
    """bfloat16 [tail_size, num_columns]: what the mask of new tokens hides, and all that is in no block."""
    per_request = plan.num_kv_heads * plan.num_queries()
    first, num_columns = plan.share.first_request * per_request, plan.share.num_requests * per_request
    hidden = nl.ndarray((plan.tail_size, num_columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(hidden, 0.0)
    nisa.dma_copy(dst=hidden[0 : plan.num_new_tokens], src=active_mask[:, first : first + num_columns])
    absent = nl.ndarray(blocks.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(absent, blocks, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=HIDDEN)
    by_request = hidden.reshape((plan.tail_size, plan.share.num_requests, per_request))
    nisa.tensor_tensor(by_request, by_request, absent.expand_dim(2).broadcast(2, per_request), op=nl.add)
    return hidden


def _hide_before(plan: DecodePlan, lengths: Lengths, positions: nl.NkiTensor, hidden: nl.NkiTensor) -> None:
    """Hide from each query what lies before its window or chunk."""
    least = lengths.least[0 : plan.tail_size]
    before = nl.ndarray(least.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(before, positions.expand_dim(2).broadcast(2, plan.num_new_tokens), least, op=nl.less)
    num_requests, num_new_tokens = plan.share.num_requests, plan.num_new_tokens
    by_query = hidden.reshape((plan.tail_size, num_requests * plan.num_kv_heads, num_new_tokens, plan.group))
    for kv_head in range(plan.num_kv_heads):
        of_head = by_query[:, kv_head : num_requests * plan.num_kv_heads : plan.num_kv_heads]
        nisa.scalar_tensor_tensor(
            of_head,
            before.expand_dim(3).broadcast(3, plan.group),
            op0=nl.multiply,
            operand0=HIDDEN,
            op1=nl.add,
            operand1=of_head,
        )


def gather(tile: nl.NkiTensor, cache: nl.NkiTensor, ids: nl.NkiTensor) -> None:
    """Fill a tile [tail_size, head_dim] from a cache by one request's and head's ids; what they skip stays."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    nisa.dma_copy(
        dst=tile,
        src=cache.reshape((num_blocks * num_kv_heads * block_size, head_dim)).ap(
            pattern=[[head_dim, tile.shape[0]], [1, head_dim]], vector_offset=ids, indirect_dim=0
        ),
        oob_mode=nisa.oob_mode.skip,
    )
