"""Computing instructions against the documentation's own examples and pseudo-code, expected values written by hand.

Values are small integers and sums of few powers of two, so that every result is exact in every dtype that holds it.
"""

import math

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tile_io import loaded, sbuf, stored

FP32_MIN = -3.4028234663852886e38
"""The float32 of bits 0xFF7FFFFF, which stands for what was not selected."""


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32).reshape(-1, 1)


def rows(*values: tuple[float, ...], dtype: object = np.float32) -> np.ndarray:
    return np.array(values, np.float32).astype(dtype)


def listed(result: np.ndarray) -> list[list[float]]:
    return result.astype(np.float32).tolist()


@nki.jit
def iota(pattern, offset, channel_multiplier, shape, dtype):
    tile = sbuf(shape, dtype)
    nisa.iota(tile, pattern, offset, channel_multiplier)
    return stored(tile)


@pytest.mark.parametrize(
    ("pattern", "offset", "channel_multiplier", "shape", "value"),
    [
        (((1, 512),), 0, 0, (1, 512), lambda p, f: f),
        (((0, 1),), 0, 1, (128, 1), lambda p, f: p),
        (((-1, 512),), 0, 0, (1, 512), lambda p, f: -f),
        (((0, 1),), 5, 2, (128, 1), lambda p, f: 5 + 2 * p),
        (((1, 512),), 0, 1, (128, 512), lambda p, f: p + f),
    ],
)
def test_iota_counts_as_its_five_examples_do(pattern, offset, channel_multiplier, shape, value) -> None:
    """test_nki_isa_iota.py, Examples 1 to 5, in the terms of today's signature."""
    got = nki.simulate(iota)(pattern, offset, channel_multiplier, shape, nl.int32)
    for p in range(shape[0]):
        for f in range(shape[1]):
            assert got[p, f] == value(p, f)


def test_iota_is_four_nested_loops() -> None:
    """iota's pseudo-code, with steps 100, 10, -3, 1 over 2 x 2 x 3 x 4."""
    got = nki.simulate(iota)(((100, 2), (10, 2), (-3, 3), (1, 4)), 7, 1000, (3, 2, 2, 3, 4), nl.float32)
    for channel_id in range(3):
        for w in range(2):
            for z in range(2):
                for y in range(3):
                    for x in range(4):
                        value = 7 + (channel_id * 1000) + (w * 100) + (z * 10) + (y * -3) + (x * 1)
                        assert got[channel_id, w, z, y, x] == value


@nki.jit
def below_the_diagonal(a):
    tile, result = loaded(a), sbuf(a.shape, a.dtype)
    nisa.affine_select(
        dst=result,
        pattern=[[-1, a.shape[1]]],
        channel_multiplier=1,
        on_true_tile=tile,
        on_false_value=FP32_MIN,
        cmp_op=nl.greater,
    )
    return stored(result)


def test_affine_select_replaces_the_upper_triangle() -> None:
    """test_nki_isa_affine_select.py, Example 1: kept where the column is less than the row."""
    got = nki.simulate(below_the_diagonal)(np.ones((128, 128), np.float32))
    for p in range(128):
        for f in range(128):
            assert got[p, f] == (1.0 if f < p else FP32_MIN)


@nki.jit
def range_select(data, bound0, bound1, range_start, dtype):
    result, largest = sbuf(data.shape, dtype), sbuf((data.shape[0], 1), nl.float32)
    nisa.range_select(
        dst=result,
        on_true_tile=loaded(data),
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=loaded(bound0),
        bound1=loaded(bound1),
        reduce_res=largest,
        range_start=range_start,
        on_false_value=FP32_MIN,
    )
    return stored(result), stored(largest)


@pytest.mark.parametrize(("dtype", "fill"), [(nl.float32, FP32_MIN), (nl.bfloat16, -math.inf)])
def test_range_select_keeps_what_lies_between_its_bounds(dtype, fill: float) -> None:
    """test_nki_isa_range_select.py, Example 1: index + 32 in [0, 64); bfloat16 rounds what fills up to -inf."""
    data = rows(tuple(range(64)), tuple(range(64, 0, -1)))
    result, largest = nki.simulate(range_select)(data, column(0, 0), column(64, 64), 32, dtype)
    kept = [index + 32 < 64 for index in range(64)]
    assert listed(result)[0] == [float(f) if kept[f] else fill for f in range(64)]
    assert listed(largest) == [[31], [64]]


def test_range_select_of_an_empty_range_reduces_to_the_least_float() -> None:
    result, largest = nki.simulate(range_select)(rows((1, 2, 3)), column(2), column(2), 0, nl.float32)
    assert listed(result) == [[FP32_MIN] * 3]
    assert listed(largest) == [[FP32_MIN]]


@nki.jit
def chained_range_selects(first, second, third, bound0, bound1):
    tiles = (loaded(first), loaded(second), loaded(third))
    low, high = loaded(bound0), loaded(bound1)
    result, largest = sbuf(first.shape, nl.float32), sbuf((first.shape[0], 1), nl.float32)
    for i in range(3):
        nisa.range_select(
            dst=result,
            on_true_tile=tiles[i],
            comp_op0=nl.greater_equal,
            comp_op1=nl.less_equal,
            bound0=low,
            bound1=high,
            reduce_cmd=nisa.reduce_cmd.reset_reduce if i == 0 else nisa.reduce_cmd.reduce,
            reduce_res=largest if i == 2 else None,
            range_start=4 * i,
            on_false_value=FP32_MIN,
        )
    return stored(largest)


def test_range_selects_in_a_chain_keep_one_maximum() -> None:
    """test_nki_isa_range_select.py, Example 2: indices 0..11 in three calls, of which 2..8 count."""
    calls = rows((90, 80, 1, 2)), rows((3, 5, 4, 1)), rows((2, 70, 60, 50))
    assert listed(nki.simulate(chained_range_selects)(*calls, column(2), column(8))) == [[5]]


@nki.jit
def select(predicate, on_true, reverse_pred):
    result, largest = sbuf(on_true.shape, nl.float32), sbuf((on_true.shape[0], 1), nl.float32)
    nisa.select_reduce(
        dst=result,
        predicate=loaded(predicate),
        on_true=loaded(on_true),
        on_false=FP32_MIN,
        reduce_res=largest,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_op=nl.maximum,
        reverse_pred=reverse_pred,
    )
    return stored(result), stored(largest)


def test_select_reduce_selects_and_keeps_the_maximum() -> None:
    """test_nki_isa_select_reduce.py, Examples 1 to 3."""
    predicate, data = np.array([[1, 0, 1, 0], [0, 0, 0, 1]], np.uint8), rows((5, 9, -2, 7), (1, 2, 3, -4))
    result, largest = nki.simulate(select)(predicate, data, False)
    assert listed(result) == [[5, FP32_MIN, -2, FP32_MIN], [FP32_MIN, FP32_MIN, FP32_MIN, -4]]
    assert listed(largest) == [[5], [-4]]
    result, largest = nki.simulate(select)(predicate, data, True)
    assert listed(result) == [[FP32_MIN, 9, FP32_MIN, 7], [1, 2, 3, FP32_MIN]]
    assert listed(largest) == [[9], [3]]


@nki.jit
def copy_where(dst, src, predicate):
    tile = loaded(dst)
    nisa.tensor_copy_predicated(dst=tile, src=loaded(src), predicate=loaded(predicate))
    return stored(tile)


def test_a_predicated_copy_leaves_the_rest_alone() -> None:
    predicate = np.array([[1, 0, 1]], np.uint32)
    assert listed(nki.simulate(copy_where)(rows((1, 2, 3)), rows((7, 8, 9)), predicate)) == [[7, 2, 9]]


@nki.jit
def running_sums(data, scale, bias):
    tile, result, total = loaded(data), sbuf(data.shape, nl.float32), sbuf((data.shape[0], 1), nl.float32)
    commands = (nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce)
    for i in range(2):
        nisa.activation(
            dst=result,
            op=nl.relu,
            data=tile,
            bias=loaded(bias),
            scale=loaded(scale),
            reduce_op=nl.add,
            reduce_res=total if i == 1 else None,
            reduce_cmd=commands[i],
        )
    return stored(result), stored(total)


def test_an_activation_scales_shifts_and_keeps_a_running_sum() -> None:
    """activation's pseudo-code: relu(data * scale + bias), summed over two calls."""
    data, scale, bias = rows((1, 2, -3), (4, 0, 1)), column(2, -1), column(1, 3)
    result, total = nki.simulate(running_sums)(data, scale, bias)
    assert listed(result) == [[3, 5, 0], [0, 3, 2]]
    assert listed(total) == [[16], [10]]


@nki.jit
def exponential_of(data):
    result = sbuf(data.shape, nl.float32)
    nisa.activation(dst=result, op=nl.exp, data=loaded(data))
    return stored(result)


def test_exp_is_what_python_says() -> None:
    values = (0.0, 1.0, -1.0, -3.5, 4.25)
    assert nki.simulate(exponential_of)(rows(values)).tolist()[0] == pytest.approx([math.exp(x) for x in values])


@nki.jit
def matmuls(stationary, moving, accumulate):
    shape = (stationary.shape[1], moving.shape[1])
    left, right = loaded(stationary), loaded(moving)
    product, result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum), sbuf(shape, nl.float32)
    for i in range(len(accumulate)):
        nisa.nc_matmul(product, left, right, accumulate=accumulate[i])
    nisa.tensor_copy(result, product)
    return stored(result)


@pytest.mark.parametrize(
    ("accumulate", "times"), [((None,), 1), ((None, None, None), 3), ((False, True, True), 3), ((False, False), 1)]
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_matmul_contracts_partitions_and_accumulates_where_told(dtype, accumulate, times: int) -> None:
    """nc_matmul's docstring: dst (+)= stationary.T @ moving; None overwrites first and adds from then on."""
    stationary, moving = [[1, 2], [3, 4], [5, 6]], [[1, 0, 2], [0, 1, 1], [1, 1, 0]]
    got = nki.simulate(matmuls)(rows(*stationary, dtype=dtype), rows(*moving, dtype=dtype), accumulate)
    for m in range(2):
        for n in range(3):
            assert got[m, n] == times * sum(stationary[k][m] * moving[k][n] for k in range(3))


@nki.jit
def transposed(data):
    product = nl.ndarray((data.shape[1], data.shape[0]), dtype=data.dtype, buffer=nl.psum)
    nisa.nc_transpose(product, loaded(data), engine=nisa.engine.tensor)
    result = sbuf(product.shape, data.dtype)
    nisa.tensor_copy(result, product)
    return stored(result)


def test_a_transpose_on_tensore_swaps_partitions_and_keeps_nan_to_itself() -> None:
    """trainium2_arch.rst, "Built-in Transpose Support"."""
    got = nki.simulate(transposed)(rows((1, math.nan, 3), (4, 5, math.inf)))
    assert [repr(value) for value in got.flatten().tolist()] == ["1.0", "4.0", "nan", "5.0", "3.0", "inf"]


@nki.jit
def cast(data, dtype):
    result = sbuf(data.shape, dtype)
    nisa.tensor_copy(result, loaded(data))
    return stored(result)


@pytest.mark.parametrize(
    ("values", "source", "target", "expected"),
    [
        # Floats to integers round to nearest, ties to even, and saturate (release notes of 0.6.0).
        ((0.5, 1.5, 2.5, -0.5, -1.5, 2.49), np.float32, nl.int32, (0, 2, 2, 0, -2, 2)),
        ((300.0, -3.0, 255.4), np.float32, nl.uint8, (255, 0, 255)),
        ((130.0, -200.0), np.float32, nl.int8, (127, -128)),
        # Different dtypes go through float32, so -1 has no unsigned and 2**24 + 1 no exact image.
        ((-1, 5), np.int32, nl.uint32, (0, 5)),
        ((16_777_217,), np.int32, nl.float32, (16_777_216,)),
        # The same dtype is copied bit by bit.
        ((16_777_217, -1), np.int32, nl.int32, (16_777_217, -1)),
        # Bfloat16 keeps 8 bits: 1 + 1/256 is a tie that goes down to even, 1 + 3/256 one that goes up.
        ((1 + 1 / 256, 1 + 3 / 256, 1 + 1.5 / 256), np.float32, nl.bfloat16, (1.0, 1.015625, 1.0078125)),
        # E4M3 keeps 4 bits: 17 is a tie between 16 and 18, 19 one between 18 and 20.
        ((17.0, 19.0, 240.0, 0.3), np.float32, nl.float8_e4m3, (16.0, 20.0, 240.0, 0.3125)),
    ],
)
def test_a_copy_casts(values, source, target, expected) -> None:
    got = nki.simulate(cast)(np.array([values], source), target)
    assert got.astype(np.float64).tolist() == [list(expected)]


@nki.jit
def arithmetic(data, vector):
    tile, operand = loaded(data), loaded(vector)
    plain, reversed_, by_vector = (
        sbuf(data.shape, nl.float32),
        sbuf(data.shape, nl.float32),
        sbuf(data.shape, nl.float32),
    )
    nisa.tensor_scalar(plain, tile, nl.subtract, 1.0, op1=nl.multiply, operand1=2.0)
    nisa.tensor_scalar(reversed_, tile, nl.subtract, 1.0, reverse0=True, op1=nl.subtract, operand1=2.0, reverse1=True)
    nisa.tensor_scalar(by_vector, tile, nl.multiply, operand)
    fused = sbuf(data.shape, nl.float32)
    nisa.scalar_tensor_tensor(fused, tile, nl.multiply, operand, nl.subtract, plain)
    return stored(plain), stored(reversed_), stored(by_vector), stored(fused)


def test_two_operators_in_a_row_and_turned_round() -> None:
    """tensor_scalar's and scalar_tensor_tensor's docstrings: (data op0 operand0) op1 operand1."""
    plain, turned, by_vector, fused = nki.simulate(arithmetic)(rows((1, 4), (-2, 3)), column(10, 100))
    assert listed(plain) == [[0, 6], [-6, 4]]
    # 2 - (1 - data).
    assert listed(turned) == [[2, 5], [-1, 4]]
    assert listed(by_vector) == [[10, 40], [-200, 300]]
    assert listed(fused) == [[10 - 0, 40 - 6], [-200 + 6, 300 - 4]]


@nki.jit
def reduced(data, axis, shape, negate):
    result = sbuf(shape, nl.float32)
    nisa.tensor_reduce(result, nl.add, loaded(data), axis, negate=negate)
    return stored(result)


def test_a_reduction_takes_the_last_axes() -> None:
    """tensor_reduce's docstring: axis (3,), (2, 3) and (1, 2, 3) of a tile (P, D1, D2, D3)."""
    data = np.arange(2 * 2 * 3 * 4, dtype=np.float32).reshape(2, 2, 3, 4)
    one, two, three = (
        nki.simulate(reduced)(data, axis, shape, False)
        for axis, shape in (((3,), (2, 2, 3)), ((2, 3), (2, 2)), ((1, 2, 3), (2, 1)))
    )
    assert one.tolist() == [[[6, 22, 38], [54, 70, 86]], [[102, 118, 134], [150, 166, 182]]]
    assert two.tolist() == [[66, 210], [354, 498]]
    assert three.tolist() == [[276], [852]]
    assert nki.simulate(reduced)(data, (1, 2, 3), (2, 1), True).tolist() == [[-276], [-852]]


@nki.jit
def scaled_maximum(data):
    result, largest = sbuf(data.shape, nl.float32), sbuf((data.shape[0], 1), nl.float32)
    nisa.tensor_scalar_reduce(result, loaded(data), nl.multiply, -2.0, nl.maximum, largest)
    return stored(result), stored(largest)


def test_a_scaled_reduction_returns_both() -> None:
    """tensor_scalar_reduce's docstring."""
    result, largest = nki.simulate(scaled_maximum)(rows((1, -5, 3)))
    assert (listed(result), listed(largest)) == ([[-2, 10, -6]], [[10]])


@nki.jit
def integer_sum(a, b):
    result = sbuf(a.shape, nl.int32)
    nisa.tensor_tensor(result, loaded(a), loaded(b), nl.add)
    return stored(result)


def test_integers_add_exactly() -> None:
    """tensor_tensor's docstring: 32-bit integers run on GpSimd, which does not go through float32."""
    a, b = np.array([[16_777_217, -7]], np.int32), np.array([[1, 5]], np.int32)
    assert nki.simulate(integer_sum)(a, b).tolist() == [[16_777_218, -2]]


@nki.jit
def shuffled(data, shape, mask):
    tile, result = loaded(data), sbuf(shape, data.dtype)
    nisa.memset(result, -1.0)
    nisa.nc_stream_shuffle(dst=result, src=tile, shuffle_mask=mask)
    return stored(result)


def test_a_shuffle_moves_partitions_within_each_quadrant() -> None:
    """test_nki_isa_nc_stream_shuffle.py, Examples 1 to 3; 255 leaves a partition alone."""
    data = np.arange(128, dtype=np.float32).reshape(128, 1)
    rotate = tuple((i - 1) % 32 for i in range(32))
    assert listed(nki.simulate(shuffled)(data[:32], (32, 1), rotate)) == [[(i - 1) % 32] for i in range(32)]
    assert listed(nki.simulate(shuffled)(data[5:6], (32, 1), (0,) * 32)) == [[5]] * 32
    got = nki.simulate(shuffled)(data, (128, 1), (*rotate[:31], 255))
    assert listed(got) == [[-1 if p % 32 == 31 else 32 * (p // 32) + (p - 1) % 32] for p in range(128)]


@nki.jit
def reciprocals(data):
    result = sbuf(data.shape, nl.float32)
    nisa.reciprocal(result, loaded(data))
    return stored(result)


def test_reciprocals_are_exact_where_they_can_be() -> None:
    assert listed(nki.simulate(reciprocals)(rows((1, 2, -4, 0.125)))) == [[1, 0.5, -0.25, 8]]
