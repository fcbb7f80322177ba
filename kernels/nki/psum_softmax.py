"""Softmax over scores that never leave PSUM: masks and the greatest score are added there by TensorE; knows no cache.

Positions stand on partitions and queries in columns. What differs from column to column alone, as the greatest score
does, cannot be a bias of ScalarE, and VectorE would take two cycles a score to subtract it: a matrix product with a row
of it adds it to a whole bank of PSUM at a column a cycle. Scores are raw; `factor` times a score is a logit.

Two folded softmaxes merge as in Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

NUM_PARTITIONS = 128
HIDDEN = -1e30
"""What a mask adds to a score: finite, so that it can go through a matrix product, and far below any score."""
NOTHING_SEEN = 2.0**96
"""Minus the greatest score of a query that sees nothing: exact in bfloat16, so far from HIDDEN that this weighs 0."""


@dataclass
class Constants(nl.NKIObject):
    """bfloat16 [128, 128] `identity` and `ones`; float32 [128, 128] `wide_identity` and `wide_ones`."""

    identity: nl.NkiTensor
    ones: nl.NkiTensor
    wide_identity: nl.NkiTensor
    wide_ones: nl.NkiTensor


@dataclass
class Folded(nl.NKIObject):
    """A softmax over some keys, for each column.

    Attributes:
        bias: bfloat16 [1, num_columns], minus the greatest score, rounded, which does not matter as all use it alike.
        sums: float32 [part_size, num_parts + 1, num_columns]: the weighted sum of values, then the sum of weights, the
            latter on all partitions alike.
    """

    bias: nl.NkiTensor
    sums: nl.NkiTensor


def constants() -> Constants:
    ones, identity = _ones_and_identity(nl.bfloat16)
    wide_ones, wide_identity = _ones_and_identity(nl.float32)
    return Constants(identity, ones, wide_identity, wide_ones)


def add_mask(scores: nl.NkiTensor, mask: nl.NkiTensor, constants: Constants) -> None:
    """scores += mask, bfloat16 with as many elements in a partition; it may be broadcast."""
    size = scores.shape[0]
    nisa.nc_matmul(scores, stationary=constants.identity[0:size, 0:size], moving=mask, accumulate=True)


def capped(banks: list[nl.NkiTensor], soft_cap: float, scale: float, constants: Constants) -> list[nl.NkiTensor]:
    """tanh(score * scale / soft_cap), in banks as these; the logit is soft_cap times it."""
    result = []
    for scores in banks:
        size = scores.shape[0]
        tanh = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(tanh, op=nl.tanh, data=scores, scale=scale / soft_cap)
        # Only what a matrix product wrote can be added to by another.
        bank = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(bank, stationary=constants.wide_identity[0:size, 0:size], moving=tanh, accumulate=False)
        result.append(bank)
    return result


def bias_of(banks: list[nl.NkiTensor], sinks: nl.NkiTensor) -> nl.NkiTensor:
    """bfloat16 [1, num_columns], minus the greatest score of each column, the sink's among them.

    Args:
        banks: float32 [num_positions, num_columns, num_tiles] each; of the first, num_positions is the greatest.
        sinks: float32 [1, num_columns], minus the sinks' scores, NOTHING_SEEN for none.
    """
    num_positions, num_columns, _ = banks[0].shape
    greatest = nl.ndarray((num_positions, num_columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(greatest, op=nl.maximum, data=banks[0], axis=2)
    for scores in banks[1:]:
        size = scores.shape[0]
        of_bank = nl.ndarray((size, num_columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(of_bank, op=nl.maximum, data=scores, axis=2)
        nisa.tensor_tensor(greatest[0:size], greatest[0:size], of_bank, op=nl.maximum)
    turned = nl.ndarray((num_columns, num_positions), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(turned, greatest, engine=nisa.engine.tensor)
    of_column = nl.ndarray((num_columns, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(of_column, op=nl.maximum, data=turned, axis=1)
    row = nl.ndarray((1, num_columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(row, of_column, engine=nisa.engine.tensor)
    bias = nl.ndarray((1, num_columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(bias, row, op0=nl.multiply, operand0=-1.0, op1=nl.minimum, operand1=sinks)
    return bias


def weights_of(
    banks: list[nl.NkiTensor], bias: nl.NkiTensor, factor: float, constants: Constants
) -> list[nl.NkiTensor]:
    """bfloat16, exp(factor * (score + bias)), shaped as the banks; these hold score + bias afterwards."""
    weights = []
    for scores in banks:
        size, _, num_tiles = scores.shape
        biases = bias.expand_dim(2).broadcast(2, num_tiles)
        nisa.nc_matmul(scores, stationary=constants.ones[0:1, 0:size], moving=biases, accumulate=True)
        of_bank = nl.ndarray(scores.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.activation(of_bank, op=nl.exp, data=scores, scale=factor)
        weights.append(of_bank)
    return weights


def add_up(total: nl.NkiTensor, weights: list[nl.NkiTensor], constants: Constants) -> None:
    """The sum of each column's weights, on all partitions of `total`, float32 [part_size, num_columns] in PSUM."""
    for bank in range(len(weights)):
        size, num_columns, _ = weights[bank].shape
        of_partition = nl.ndarray((size, num_columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(of_partition, op=nl.add, data=weights[bank], axis=2)
        ones = constants.wide_ones[0:size, 0 : total.shape[0]]
        nisa.nc_matmul(total, stationary=ones, moving=of_partition, accumulate=bank > 0)


def add_sinks(
    total: nl.NkiTensor, sinks: nl.NkiTensor, bias: nl.NkiTensor, factor: float, constants: Constants
) -> None:
    """Add the sinks' weights to `add_up`'s total. One of NOTHING_SEEN weighs 0, or 1 where nothing else was seen."""
    weights = _shrinkage(sinks, bias, factor)
    nisa.nc_matmul(total, stationary=constants.wide_ones[0:1, 0 : total.shape[0]], moving=weights, accumulate=True)


def merge(one: Folded, other: Folded, factor: float, constants: Constants) -> Folded:
    """The softmax over the keys of both, its sums in SBUF."""
    bias = nl.ndarray(one.bias.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(bias, one.bias, other.bias, op=nl.minimum)
    sums = nl.ndarray(one.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    _shrink(sums, one, bias, factor, constants)
    added = nl.ndarray(one.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    _shrink(added, other, bias, factor, constants)
    nisa.tensor_tensor(sums, sums, added, op=nl.add)
    return Folded(bias, sums)


def write_outputs(folded: Folded, outputs: nl.NkiTensor) -> None:
    """Write the mean of the values to [part_size, num_parts, num_columns], in its dtype."""
    part_size, num_parts, num_columns = outputs.shape
    share = nl.ndarray((part_size, 1, num_columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(share, folded.sums[:, num_parts : num_parts + 1])
    nisa.tensor_tensor(outputs, folded.sums[:, 0:num_parts], share.broadcast(1, num_parts), op=nl.multiply)


def _ones_and_identity(dtype: nl.NkiTensor) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    square = (NUM_PARTITIONS, NUM_PARTITIONS)
    ones = nl.ndarray(square, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(ones, 1.0, engine=nisa.engine.gpsimd)
    identity = nl.ndarray(square, dtype=dtype, buffer=nl.sbuf)
    nisa.affine_select(
        identity,
        pattern=[[-1, NUM_PARTITIONS]],
        channel_multiplier=1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    return ones, identity


def _shrinkage(old_bias: nl.NkiTensor, bias: nl.NkiTensor, factor: float) -> nl.NkiTensor:
    """float32 [1, num_columns], what weights by an older bias are worth by a lower one: exp(factor * (bias - old))."""
    shrinkage = nl.ndarray(bias.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(shrinkage, bias, old_bias, op=nl.subtract)
    nisa.activation(shrinkage, op=nl.exp, data=shrinkage, scale=factor)
    return shrinkage


def _shrink(sums: nl.NkiTensor, folded: Folded, bias: nl.NkiTensor, factor: float, constants: Constants) -> None:
    part_size, num_sums, num_columns = folded.sums.shape
    shrinkage = _shrinkage(folded.bias, bias, factor)
    on_all = nl.ndarray((part_size, num_columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(on_all, stationary=constants.wide_ones[0:1, 0:part_size], moving=shrinkage, accumulate=False)
    copies = nl.ndarray((part_size, 1, num_columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(copies, on_all)
    nisa.tensor_tensor(sums, folded.sums, copies.broadcast(1, num_sums), op=nl.multiply)
