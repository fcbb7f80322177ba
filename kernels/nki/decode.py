"""Block-KV decode attention on a NeuronCore: each request's few new tokens against its whole context.

Its twin is `reference.decode_attention`. All KV is read from head-major caches, also that of the new tokens, which is
written before. `decode_plan` defines the terms. While one piece is computed, the next one's rows are on their way. What
stands in a slot that a request does not own never takes part in a product: rows and tails are gathered by ids that are
negative there, so that the DMA skips them, into buffers that were cleared, since 0 * NaN is NaN.

Compute follows the width of the block table, which the caller cuts to a context bucket; DMA follows each request's own
length, and a padding request has none. A logical core's two cores share the items where their number is even; else each
core takes every second gather of every item, and the first merges both halves.

The other way to read keys in seed 000, an indirect `dma_transpose`, is left out. It turns the block -1 into block 0, so
that padding costs DMA, and what block 0 holds, NaN included, gets into the scores, where an added mask cannot hide it.
TensorE's transposes are predicted to take two fifths of its time, which the DMA of keys and values hides; and AWS marks
the indirect transpose as failing in its own tests (PBE-63 of aws-neuron-sdk/nki/test).

Written against the public NKI 0.6.0 documentation (SDK 2.32), and run on this repository's emulator alone: never
compiled by neuronx-cc, never run under AWS's simulator or on a device. Not known of hardware, besides: that VectorE may
read PSUM between two matrix products that add to one place, and that TensorE writes PSUM with a stride at full pace.
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki import (
    cache_rows,
    decode_masks,
    decode_plan,
    decode_queries,
    decode_rows,
    decode_scores,
    decode_tails,
    fp8,
    psum_softmax,
)
from blockplane.kernels.nki.decode_plan import NUM_PARTITIONS, DecodePlan, Piece


@dataclass
class Decode(nl.NKIObject):
    """What all pieces of one core share.

    Attributes:
        queries, sinks: of the share's columns, as `decode_queries.load_queries` and `_sink_scores` make them.
        outputs: [part_size, num_parts, num_columns] in SBUF, on their way to `output`.
        k_cache, v_cache, output: in HBM, as the kernel takes and returns them.
        scale, soft_cap: as the kernel's. factor: what makes a logit of a score, after a cap's tanh if there is one.
    """

    plan: DecodePlan
    queries: nl.NkiTensor
    sinks: nl.NkiTensor
    outputs: nl.NkiTensor
    k_cache: nl.NkiTensor
    v_cache: nl.NkiTensor
    output: nl.NkiTensor
    rows: decode_rows.ContextRows
    tails: decode_tails.Tails
    constants: psum_softmax.Constants
    scale: float
    soft_cap: float
    factor: float


@dataclass
class Loaded(nl.NKIObject):
    """One piece's KV in SBUF, in the queries' dtype; zero where nothing was read.

    Attributes:
        keys, values: [128, num_items, num_gathers, positions_per_row, head_dim].
        tails: keys and values of its tails, [tail_size, num_items, head_dim], if it has them; else nothing.
    """

    keys: nl.NkiTensor
    values: nl.NkiTensor
    tails: list[nl.NkiTensor]


@nki.jit
def decode_attention(
    query: nl.NkiTensor,
    k_cache: nl.NkiTensor,
    v_cache: nl.NkiTensor,
    block_table: nl.NkiTensor,
    seq_lens: nl.NkiTensor,
    sinks: nl.NkiTensor,
    active_mask: nl.NkiTensor,
    num_new_tokens: int,
    scale: float,
    sliding_window: int = 0,
    attention_chunk_size: int = 0,
    soft_cap: float = 0.0,
) -> nl.NkiTensor:
    """Attend from the last `num_new_tokens` tokens of each request to its context.

    Args:
        query: [num_items, num_queries, head_dim] of 2 bytes: items are requests by KV heads, queries new tokens by the
            query heads of a KV head, at most 128. What stands at negative positions may be NaN.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], block_size a power of two up to 128; FP8 as
            bytes (uint8).
        block_table: int32 [num_seqs, width], -1 = no block: not read, and hidden.
        seq_lens: int32 [num_seqs, 1], new tokens included; 0 = a padding row, whose output is zero.
        sinks: float32 [1, num_items * num_queries], `reference`'s; -1e34 for none.
        active_mask: bfloat16 [num_new_tokens, num_items * num_queries], 0 where a query sees a new token, -1e30 where
            not: what is after it, or in another chunk.
        scale: positive. sliding_window, attention_chunk_size, soft_cap: `reference`'s, 0 = none; a chunk is a power of
            two.

    Returns:
        As `query`.
    """
    k_cache, v_cache = fp8.as_numbers(k_cache), fp8.as_numbers(v_cache)
    plan = decode_plan.decode_plan(
        query.shape,
        k_cache.shape,
        block_table.shape[1],
        num_new_tokens,
        2 if k_cache.dtype == query.dtype else 1,
        sliding_window,
        attention_chunk_size,
        nl.num_programs(0),
        nl.program_id(0),
    )
    output = nl.ndarray(query.shape, dtype=query.dtype, buffer=nl.shared_hbm)
    lengths = decode_rows.lengths_of(plan, seq_lens)
    queries = decode_queries.load_queries(plan, lengths, query, decode_scores.num_query_copies(plan))
    factor = soft_cap if soft_cap else scale
    decode = Decode(
        plan=plan,
        queries=queries,
        sinks=_sink_scores(plan, sinks, factor),
        outputs=nl.ndarray((plan.part_size(), plan.num_parts(), queries.shape[2]), dtype=query.dtype, buffer=nl.sbuf),
        k_cache=k_cache,
        v_cache=v_cache,
        output=output,
        rows=decode_rows.context_rows(plan, lengths, block_table),
        tails=decode_tails.tails_of(plan, lengths, block_table, active_mask),
        constants=psum_softmax.constants(),
        scale=scale,
        soft_cap=soft_cap,
        factor=factor,
    )
    _attend(decode, decode_plan.pieces_of(plan))
    return output


def _attend(decode: Decode, pieces: list[Piece]) -> None:
    """All pieces, those of one item one after another."""
    loaded = [_load(decode, pieces[0])]
    folded: list[psum_softmax.Folded] = []
    for index in range(len(pieces)):
        piece = pieces[index]
        is_last = index + 1 == len(pieces)
        if not is_last:
            loaded.append(_load(decode, pieces[index + 1]))
        of_piece = _fold(decode, piece, loaded[index])
        if not piece.is_first():
            of_piece = psum_softmax.merge(folded[index - 1], of_piece, decode.factor, decode.constants)
        folded.append(of_piece)
        if is_last or pieces[index + 1].is_first():
            _finish(decode, piece, of_piece)


def _load(decode: Decode, piece: Piece) -> Loaded:
    plan = decode.plan
    dtype = decode.queries.dtype
    shape = (NUM_PARTITIONS, piece.num_items, piece.num_gathers, plan.positions_per_row, plan.head_dim)
    loaded = Loaded(_zeros(shape, dtype), _zeros(shape, dtype), [])
    if plan.has_tails(piece):
        tail_shape = (plan.tail_size, piece.num_items, plan.head_dim)
        loaded.tails.extend((_zeros(tail_shape, dtype), _zeros(tail_shape, dtype)))
    for item in range(piece.num_items):
        request = plan.request_of(piece.first_item + item)
        kv_head = plan.kv_head_of(piece.first_item + item)
        ids = decode_rows.of_piece(plan, piece, decode.rows.ids[kv_head][:, request])
        cache_rows.gather(loaded.keys[:, item], decode.k_cache, ids)
        cache_rows.gather(loaded.values[:, item], decode.v_cache, ids)
        if plan.has_tails(piece):
            slots = decode.tails.ids[:, kv_head, request : request + 1]
            decode_tails.gather(loaded.tails[0][:, item], decode.k_cache, slots)
            decode_tails.gather(loaded.tails[1][:, item], decode.v_cache, slots)
    return loaded


def _fold(decode: Decode, piece: Piece, loaded: Loaded) -> psum_softmax.Folded:
    """The softmax of a piece's items over its keys, its sums in PSUM."""
    plan, constants = decode.plan, decode.constants
    columns = plan.columns_of(piece)
    queries, sinks = decode.queries[:, :, columns], decode.sinks[:, columns]
    banks = decode_scores.multiply_keys(plan, piece, loaded.keys, queries)
    if plan.has_tails(piece):
        banks.append(decode_scores.multiply_tail_keys(plan, piece, loaded.tails[0], queries))
    if decode.soft_cap:
        banks = psum_softmax.capped(banks, decode.soft_cap, decode.scale, constants)
    decode_masks.hide(plan, piece, banks, decode.rows, decode.tails, constants)
    bias = psum_softmax.bias_of(banks, sinks)
    weights = psum_softmax.weights_of(banks, bias, decode.factor, constants)
    shape = (plan.part_size(), plan.num_parts() + 1, queries.shape[2])
    sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    total = sums[:, plan.num_parts()]
    psum_softmax.add_up(total, weights, constants)
    decode_scores.multiply_values(plan, piece, sums, weights, loaded.values)
    if plan.has_tails(piece):
        psum_softmax.add_sinks(total, sinks, bias, decode.factor, constants)
        decode_scores.multiply_tail_values(plan, piece, sums, weights[len(weights) - 1], loaded.tails[1])
    return psum_softmax.Folded(bias, sums)


def _finish(decode: Decode, piece: Piece, folded: psum_softmax.Folded) -> None:
    """Write the outputs of a piece's items, and of others that wait, to HBM once they are many or no more come.

    If the cores share every item, both merge what both folded, and the first writes it.
    """
    plan = decode.plan
    if plan.share.num_shards > 1:
        folded = psum_softmax.merge(folded, _of_other_core(plan, folded), decode.factor, decode.constants)
    psum_softmax.write_outputs(folded, decode.outputs[:, :, plan.columns_of(piece)])
    end = piece.first_item + piece.num_items
    if plan.share.shard == 0 and (end == plan.share.num_items or end % plan.items_per_store() == 0):
        first = (end - 1) // plan.items_per_store() * plan.items_per_store()
        decode_queries.store_outputs(plan, first, end, decode.outputs, decode.output)


def _of_other_core(plan: DecodePlan, folded: psum_softmax.Folded) -> psum_softmax.Folded:
    """What the other core folded; each sends its own."""
    sums = nl.ndarray(folded.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(sums, folded.sums)
    other = psum_softmax.Folded(
        bias=nl.ndarray(folded.bias.shape, dtype=folded.bias.dtype, buffer=nl.sbuf),
        sums=nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf),
    )
    core = 1 - plan.share.shard
    nisa.sendrecv(src=sums, dst=other.sums, send_to_rank=core, recv_from_rank=core, pipe_id=0)
    nisa.sendrecv(src=folded.bias, dst=other.bias, send_to_rank=core, recv_from_rank=core, pipe_id=1)
    return other


def _zeros(shape: tuple[int, ...], dtype: nl.NkiTensor) -> nl.NkiTensor:
    """By GpSimd, which has nothing else to do but to describe DMAs; two numbers at a time."""
    zeros = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(zeros.view(nl.float32), 0.0, engine=nisa.engine.gpsimd)
    return zeros


def _sink_scores(plan: DecodePlan, sinks: nl.NkiTensor, factor: float) -> nl.NkiTensor:
    """float32 [1, num_columns], minus the sink of each column as a score; `psum_softmax.NOTHING_SEEN` for none."""
    num_columns = plan.share.num_items * plan.num_queries()
    first = plan.share.first_item * plan.num_queries()
    scores = nl.ndarray((1, num_columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=scores, src=sinks[:, first : first + num_columns])
    nisa.tensor_scalar(
        scores,
        scores,
        op0=nl.multiply,
        operand0=-1.0 / factor,
        op1=nl.minimum,
        operand1=psum_softmax.NOTHING_SEEN,
    )
    return scores
