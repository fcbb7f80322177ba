"""Attention of tiles of 128 queries over spans of keys, folded by an online softmax; knows no cache and no request.

The recurrence is that of Milakov and Gimelshein 2018 (arXiv 1805.02867). A tile's queries stand on partitions. What is
masked is the matter of two bounds per query; a query that has seen nothing yet has weight 0.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

NUM_PARTITIONS = 128
CHUNKS_PER_BANK = 8
"""Transposed [128, 128] tiles of 2 bytes that one bank of PSUM holds."""
MATMUL_WIDTH, PIECE_WIDTH = 512, 1024
"""Keys of one matmul, a bank of float32; and of one pass of VectorE, two banks."""
NOTHING_SEEN = 1e20
"""Minus the greatest logit of a query that has seen nothing: finite, so that the logit of what is masked
(-3.4e38 * scale) stays far below it, and far beyond any logit, so that no query that has seen something has it."""

LEAST_WEIGHT = 0.5


@dataclass
class Span(nl.NKIObject):
    """Keys and values of neighbouring positions, for one KV head.

    Chunk (c, j), of 128 positions, holds what stands on the partitions of values[:, c, j]: partition p's position is
    (c * 128 + p) * positions_per_row + j.

    Attributes:
        keys: [min(128, head_dim), head_dim / 128 rounded up, num_positions], transposed and in order of positions.
        values: [128, num_gathers, positions_per_row, head_dim].
    """

    keys: nl.NkiTensor
    values: nl.NkiTensor


@dataclass
class OnlineSoftmax(nl.NKIObject):
    """Of some units, each 128 queries of one head; float32.

    Attributes:
        bias: [128, num_units], minus the greatest logit seen.
        weight: [128, num_units], the sum of exp(logit + bias).
        value: [128, num_units, head_dim], the sum of exp(logit + bias) * value.
    """

    bias: nl.NkiTensor
    weight: nl.NkiTensor
    value: nl.NkiTensor


def new_softmax(num_units: int, head_dim: int) -> OnlineSoftmax:
    """With values of zero; `begin` gives each unit its sink."""
    softmax = OnlineSoftmax(
        bias=nl.ndarray((NUM_PARTITIONS, num_units), dtype=nl.float32, buffer=nl.sbuf),
        weight=nl.ndarray((NUM_PARTITIONS, num_units), dtype=nl.float32, buffer=nl.sbuf),
        value=nl.ndarray((NUM_PARTITIONS, num_units, head_dim), dtype=nl.float32, buffer=nl.sbuf),
    )
    nisa.memset(softmax.value, 0.0, engine=nisa.engine.gpsimd)
    return softmax


def begin(softmax: OnlineSoftmax, unit: int, sink: nl.NkiTensor) -> None:
    """A sink is a first key of no value; its logit is float32 [128, 1], far below -1e20 for none."""
    bias = softmax.bias[:, unit : unit + 1]
    nisa.tensor_scalar(bias, sink, op0=nl.multiply, operand0=-1.0, op1=nl.minimum, operand1=NOTHING_SEEN)
    nisa.activation(softmax.weight[:, unit : unit + 1], op=nl.exp, data=sink, bias=bias)


def fold(
    softmax: OnlineSoftmax,
    unit: int,
    query: nl.NkiTensor,
    span: Span,
    first: int,
    end: int,
    bounds: tuple[nl.NkiTensor, nl.NkiTensor],
    scale: float,
    soft_cap: float,
) -> None:
    """Add the keys at first, ..., end - 1 of a span, of which query p sees those between bounds[0] and bounds[1].

    Args:
        query: [min(128, head_dim), head_dim / 128 rounded up, 128], transposed.
        first: a multiple of the span's positions per gather, and so is end - first.
        bounds: float32 [128, 1] each, positions within the span, both excluded: what is before, what is behind.
        soft_cap: 0 for none.
    """
    logits, greatest = _masked_logits(query, span.keys[:, :, first:end], first, bounds, scale, soft_cap)
    # What exp multiplies by: a cap's tanh has taken the scale already.
    factor = soft_cap if soft_cap else scale
    old_bias = softmax.bias[:, unit : unit + 1]
    bias = nl.ndarray((NUM_PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(bias, greatest, op0=nl.multiply, operand0=-factor, op1=nl.minimum, operand1=old_bias)
    shrink = nl.ndarray((NUM_PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(shrink, op=nl.exp, data=old_bias, scale=-1.0, bias=bias)
    nisa.tensor_copy(old_bias, bias, engine=nisa.engine.gpsimd)
    weights = nl.ndarray((NUM_PARTITIONS, end - first), dtype=query.dtype, buffer=nl.sbuf)
    added = nl.ndarray((NUM_PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        weights,
        op=nl.exp,
        data=logits,
        scale=factor,
        bias=bias,
        reduce_op=nl.add,
        reduce_res=added,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    total = softmax.weight[:, unit : unit + 1]
    nisa.scalar_tensor_tensor(total, data=total, op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=added)
    seen = _weighted_values(weights, span, first)
    value = softmax.value[:, unit, :]
    nisa.scalar_tensor_tensor(value, data=value, op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=seen)


def shares_of(softmax: OnlineSoftmax) -> nl.NkiTensor:
    """float32 [128, num_units], what each value is multiplied by to be a mean; finite where nothing was seen."""
    shares = nl.ndarray(softmax.weight.shape, dtype=nl.float32, buffer=nl.sbuf)
    # A query that has seen anything, a sink alone included, weighs at least 1: its greatest logit's exp(0).
    nisa.tensor_scalar(shares, softmax.weight, op0=nl.maximum, operand0=LEAST_WEIGHT)
    nisa.reciprocal(shares, shares)
    return shares


def mean(output: nl.NkiTensor, softmax: OnlineSoftmax, unit: int, shares: nl.NkiTensor, is_token: nl.NkiTensor) -> None:
    """Write the weighted mean [128, head_dim], 2 bytes each; zero where nothing was seen and where `is_token` is 0.

    Args:
        shares: of `shares_of`.
        is_token: int32 [128, 1], -1 or 0.
    """
    share = shares[:, unit : unit + 1]
    nisa.tensor_scalar(output, softmax.value[:, unit, :], op0=nl.multiply, operand0=share)
    # As bits: padding that was computed from NaN becomes zero too.
    words = output.view(nl.int32)
    nisa.tensor_scalar(words, words, op0=nl.bitwise_and, operand0=is_token)


def _masked_logits(
    query: nl.NkiTensor,
    keys: nl.NkiTensor,
    first: int,
    bounds: tuple[nl.NkiTensor, nl.NkiTensor],
    scale: float,
    soft_cap: float,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """float32 [128, num_keys], unscaled, the least float32 where masked; and the greatest of each query, [128, 1].

    With a soft cap: tanh(logit / soft_cap), which is yet to be multiplied by it.
    """
    num_keys = keys.shape[2]
    num_pieces = (num_keys + PIECE_WIDTH - 1) // PIECE_WIDTH
    masked = nl.ndarray((NUM_PARTITIONS, num_keys), dtype=nl.float32, buffer=nl.sbuf)
    tops = nl.ndarray((NUM_PARTITIONS, num_pieces), dtype=nl.float32, buffer=nl.sbuf)
    for piece in range(num_pieces):
        start = piece * PIECE_WIDTH
        end = min(start + PIECE_WIDTH, num_keys)
        logits = _logits(query, keys[:, :, start:end])
        if soft_cap:
            capped = nl.ndarray((NUM_PARTITIONS, end - start), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(capped, op=nl.tanh, data=logits, scale=scale / soft_cap)
            logits = capped
        nisa.range_select(
            masked[:, start:end],
            on_true_tile=logits,
            comp_op0=nl.greater,
            comp_op1=nl.less,
            bound0=bounds[0],
            bound1=bounds[1],
            range_start=first + start,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reduce_res=tops[:, piece : piece + 1],
            reduce_op=nl.maximum,
        )
    if num_pieces == 1:
        return masked, tops
    greatest = nl.ndarray((NUM_PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(greatest, op=nl.maximum, data=tops, axis=1)
    return masked, greatest


def _logits(query: nl.NkiTensor, keys: nl.NkiTensor) -> nl.NkiTensor:
    """float32 [128, num_keys <= 1024] in PSUM, the products of all queries with all keys."""
    num_keys = keys.shape[2]
    logits = nl.ndarray((NUM_PARTITIONS, PIECE_WIDTH), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, num_keys, MATMUL_WIDTH):
        end = min(start + MATMUL_WIDTH, num_keys)
        for dims in range(keys.shape[1]):
            nisa.nc_matmul(
                logits[:, start:end],
                stationary=query[:, dims, :],
                moving=keys[:, dims, start:end],
                accumulate=dims > 0,
            )
    return logits[:, 0:num_keys]


def _weighted_values(weights: nl.NkiTensor, span: Span, first: int) -> nl.NkiTensor:
    """float32 [128, head_dim] in PSUM, the values from position `first` on by their weights [128, num_keys].

    The weights of a chunk are transposed, so that its positions stand on partitions as its values do.
    """
    _, _, positions_per_row, head_dim = span.values.shape
    num_chunks = weights.shape[1] // NUM_PARTITIONS
    first_gather = first // (NUM_PARTITIONS * positions_per_row)
    # [128, num_gathers, positions_per_row, 128]
    by_chunk = weights.reshape_dim(1, (num_chunks // positions_per_row, NUM_PARTITIONS, positions_per_row))
    by_chunk = by_chunk.permute((0, 1, 3, 2))
    total = nl.ndarray((NUM_PARTITIONS, head_dim), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, num_chunks, CHUNKS_PER_BANK):
        end = min(start + CHUNKS_PER_BANK, num_chunks)
        shape = (NUM_PARTITIONS, end - start, NUM_PARTITIONS)
        turned = nl.ndarray(shape, dtype=weights.dtype, buffer=nl.psum)
        for chunk in range(start, end):
            nisa.nc_transpose(
                turned[:, chunk - start, :],
                by_chunk[:, chunk // positions_per_row, chunk % positions_per_row, :],
                engine=nisa.engine.tensor,
            )
        stationary = nl.ndarray(shape, dtype=weights.dtype, buffer=nl.sbuf)
        # VectorE has the masks and ScalarE the exponentials, which leave as much time on both.
        is_even = start // CHUNKS_PER_BANK % 2 == 0
        nisa.tensor_copy(stationary, turned, engine=nisa.engine.scalar if is_even else nisa.engine.vector)
        for chunk in range(start, end):
            nisa.nc_matmul(
                total,
                stationary=stationary[:, chunk - start, :],
                moving=span.values[:, first_gather + chunk // positions_per_row, chunk % positions_per_row, :],
                accumulate=chunk > 0,
            )
    return total
