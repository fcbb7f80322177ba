"""Activations, and the accumulator registers of two engines, which go on over several instructions."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, psum, refuses, tile

BF16 = ml_dtypes.bfloat16
IDLE, RESET, REDUCE = nisa.reduce_cmd.idle, nisa.reduce_cmd.reset, nisa.reduce_cmd.reduce
RESET_REDUCE, LOAD_REDUCE = nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.load_reduce


@pytest.mark.parametrize(
    ("op", "of"),
    [
        (nl.copy, lambda x: x),
        (nl.exp, np.exp),
        (nl.square, np.square),
        (nl.tanh, np.tanh),
        (nl.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
        (nl.silu, lambda x: x / (1 + np.exp(-x))),
        (nl.relu, lambda x: np.maximum(x, 0)),
        (nl.abs, np.abs),
        (nl.sign, np.sign),
        (nl.softplus, lambda x: np.log1p(np.exp(x))),
    ],
)
def test_an_activation_is_of_scaled_and_shifted_data(trn2, op, of) -> None:
    data, scale, bias, dst = np.array([[1.0, -2], [0.5, 3]]), [[2], [-1]], [[0.25], [1]], empty(2, 2)
    nisa.activation(dst, op, tile(data), bias=tile(bias, BF16), scale=tile(scale))
    np.testing.assert_allclose(dst.read(), of(data * scale + bias), rtol=1e-6)
    nisa.activation(dst, op, tile(data), bias=0.5, scale=2.0)
    np.testing.assert_allclose(dst.read(), of(data * 2 + 0.5), rtol=1e-6)
    assert trn2.instructions[-1].engine == "scalar"


@pytest.mark.parametrize(
    ("op", "inside", "outside"),
    [
        (nl.log, [1, 2], [0, -1]),
        (nl.sqrt, [1, 4], [0, 2.0**120]),
        (nl.rsqrt, [1, 4], [0, 2.0**100]),
        (nl.reciprocal, [1, -4], [0, -(2.0**50)]),
        (nl.sin, [1, -3], [4, -4]),
    ],
)
def test_outside_its_valid_range_an_activation_is_nothing(trn2, op, inside, outside) -> None:
    dst = empty(1, 4)
    nisa.activation(dst, op, tile([[*inside, *outside]]))
    assert np.isnan(dst.read()).tolist() == [[False, False, True, True]]


def test_an_activation_is_summed_before_it_is_rounded(trn2) -> None:
    dst, total = empty(1, 256, dtype=BF16), empty(1, 1)
    nisa.activation_reduce(dst, nl.copy, tile(np.full((1, 256), 1 + 2**-9)), nl.add, total)
    assert dst.read().astype(np.float32).max() == 1
    assert total.read().item() == 256.5


def test_a_sum_goes_on_over_activations_until_it_is_read(trn2) -> None:
    data, dst, total = tile([[1, 2], [3, 4]]), empty(2, 2), empty(2, 1)
    nisa.activation(dst, nl.copy, data, reduce_op=nl.add, reduce_cmd=RESET_REDUCE)
    nisa.activation(dst, nl.copy, data, scale=10.0, reduce_op=nl.add, reduce_cmd=REDUCE)
    # Of the Scalar Engine idle leaves the registers alone, and may read them.
    nisa.activation(dst, nl.copy, data, reduce_res=total)
    assert total.read().tolist() == [[33], [77]]
    nisa.activation(dst, nl.copy, data, reduce_cmd=RESET, reduce_res=total)
    assert total.read().tolist() == [[0], [0]]


def test_the_two_engines_have_registers_of_their_own(trn2) -> None:
    data, dst, total, largest = tile([[1, 2]]), empty(1, 2), empty(1, 1), empty(1, 1)
    nisa.activation(dst, nl.copy, data, reduce_op=nl.add, reduce_cmd=RESET_REDUCE)
    nisa.tensor_scalar_reduce(dst, data, nl.multiply, 5.0, nl.maximum, largest)
    nisa.activation(dst, nl.copy, data, reduce_op=nl.add, reduce_cmd=REDUCE, reduce_res=total)
    assert (total.read().item(), largest.read().item()) == (6, 10)


@pytest.mark.parametrize(("op", "expected"), [(nl.add, 14), (nl.multiply, 96), (nl.maximum, 6), (nl.minimum, 2)])
def test_tensor_scalar_reduce_goes_on(trn2, op, expected) -> None:
    dst, result = empty(1, 2), empty(1, 1)
    nisa.tensor_scalar_reduce(dst, tile([[2, 4]]), nl.multiply, 1.0, op)
    nisa.tensor_scalar_reduce(dst, tile([[1, 3]]), nl.multiply, 2.0, op, result, reduce_cmd=REDUCE)
    # 2, 4, then 2, 6.
    assert (dst.read().tolist(), result.read().item()) == ([[2, 6]], expected)


def test_tensor_scalar_reduce_starts_from_a_column_and_negates_what_it_reads_out(trn2) -> None:
    dst, result = empty(2, 2), empty(2, 1)
    first = {"reduce_cmd": LOAD_REDUCE, "reduce_init": tile([[100], [200]])}
    nisa.tensor_scalar_reduce(dst, tile([[1, 2], [3, 4]]), nl.add, 0.0, nl.add, result, reduce_res_negate=True, **first)
    assert result.read().tolist() == [[-103], [-207]]
    nisa.tensor_scalar_reduce(dst, tile([[1, 2], [3, 4]]), nl.add, 0.0, nl.add, result, reduce_cmd=REDUCE)
    assert result.read().tolist() == [[106], [214]]


def test_exponential_subtracts_and_keeps_a_sum(trn3) -> None:
    data, largest = np.array([[1.0, 2, 3], [4, 4, 4]]), np.array([[3.0], [4]])
    dst, total = empty(2, 3), empty(2, 1)
    nisa.exponential(dst, tile(data), tile(largest), reduce_cmd=RESET_REDUCE)
    nisa.exponential(dst, tile(data), tile(largest), total, REDUCE)
    np.testing.assert_allclose(dst.read(), np.exp(data - largest), rtol=1e-6)
    np.testing.assert_allclose(total.read(), 2 * np.exp(data - largest).sum(1, keepdims=True), rtol=1e-6)
    nisa.exponential(dst, tile(data), 4.0, total, LOAD_REDUCE, reduce_init=5.0)
    np.testing.assert_allclose(total.read()[1], 8, rtol=1e-6)
    assert trn3.instructions[-1].engine == "vector"


def reducing(**options) -> None:
    nisa.tensor_scalar_reduce(empty(2, 2), empty(2, 2), nl.add, 0.0, **{"reduce_op": nl.add, **options})


def selecting(**options) -> None:
    predicate = tile(np.ones((2, 2)), np.uint8)
    nisa.select_reduce(empty(2, 2), predicate, empty(2, 2), 0.0, **options)


def test_the_vector_engines_registers_are_unknown_before_a_reset(trn2) -> None:
    with refuses("hold nothing defined"):
        reducing(reduce_cmd=REDUCE)


def test_an_idle_select_loses_the_registers(trn2) -> None:
    reducing()
    selecting()
    with refuses("hold nothing defined"):
        reducing(reduce_cmd=REDUCE)


def test_an_idle_exponential_and_range_select_lose_the_registers(trn3) -> None:
    reducing()
    nisa.exponential(empty(2, 2), empty(2, 2))
    with refuses("hold nothing defined"):
        reducing(reduce_cmd=REDUCE)
    reducing()
    bound = tile([[0], [0]])
    nisa.range_select(empty(2, 2), empty(2, 2), nl.less, nl.less, bound, bound, reduce_cmd=IDLE)
    with refuses("hold nothing defined"):
        reducing(reduce_cmd=REDUCE)


def test_a_running_sum_is_no_running_maximum(trn2) -> None:
    reducing()
    with refuses("hold a running nl.add, and this instruction would go on with nl.maximum"):
        selecting(reduce_cmd=REDUCE)


def test_a_running_sum_belongs_to_its_partitions(trn2) -> None:
    reducing()
    with refuses("started over 2 partitions"):
        nisa.tensor_scalar_reduce(empty(3, 2), empty(3, 2), nl.add, 0.0, nl.add, reduce_cmd=REDUCE)


def activating(op=nl.copy, **options) -> None:
    nisa.activation(empty(2, 2), op, empty(2, 2), **options)


REFUSALS = [
    ("op must be of the", lambda: activating(nl.bitwise_and)),
    ("no activation function", lambda: activating(nl.add)),
    ("scale as a tile must be float32", lambda: activating(scale=empty(2, 1, dtype=BF16))),
    ("scale must have one element per partition", lambda: activating(scale=empty(2, 2))),
    ("same number of partitions", lambda: activating(bias=empty(1, 1))),
    ("reduce_op must be one of nl.add", lambda: activating(reduce_op=nl.maximum, reduce_cmd=RESET_REDUCE)),
    ("reduce_op must be one of nl.add", lambda: activating(reduce_cmd=RESET_REDUCE)),
    ("reduce_cmd must be one of", lambda: activating(reduce_op=nl.add, reduce_cmd=LOAD_REDUCE)),
    ("Scalar Engine's accumulator registers hold nothing", lambda: activating(reduce_res=empty(2, 1))),
    (
        "one element per partition",
        lambda: activating(reduce_op=nl.add, reduce_cmd=RESET_REDUCE, reduce_res=empty(2, 2)),
    ),
    ("same number of elements", lambda: nisa.activation(empty(2, 2), nl.copy, empty(2, 3))),
    (
        "reduce_op must be one of nl.add",
        lambda: nisa.activation_reduce(empty(2, 2), nl.copy, empty(2, 2), nl.maximum, empty(2, 1)),
    ),
    ("exponential: needs NeuronCore-v4", lambda: nisa.exponential(empty(2, 2), empty(2, 2))),
    ("reverse0 is not supported", lambda: reducing(reverse0=True)),
    ("reduce_op must be one of", lambda: reducing(reduce_op=nl.logical_or)),
    ("reduce_cmd must be one of", lambda: reducing(reduce_cmd=IDLE)),
    ("reduce_init goes with reduce_cmd.load_reduce", lambda: reducing(reduce_init=1.0)),
    ("reduce_init goes with reduce_cmd.load_reduce", lambda: reducing(reduce_cmd=LOAD_REDUCE)),
    ("reduce_init as a tile must be", lambda: reducing(reduce_cmd=LOAD_REDUCE, reduce_init=empty(2, 1, dtype=BF16))),
    (
        "op0 must be of the arithmetic",
        lambda: nisa.tensor_scalar_reduce(empty(2, 2), empty(2, 2), nl.bitwise_and, 1, nl.add),
    ),
    ("same number of elements", lambda: nisa.tensor_scalar_reduce(empty(2, 2), empty(2, 3), nl.add, 1.0, nl.add)),
]


@pytest.mark.parametrize(
    ("rule", "instruction"), REFUSALS, ids=[f"{at}: {rule}" for at, (rule, _) in enumerate(REFUSALS)]
)
def test_it_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_exponential_refuses(trn3) -> None:
    with refuses("reduce_init goes with"):
        nisa.exponential(empty(2, 2), empty(2, 2), reduce_cmd=RESET_REDUCE, reduce_init=1.0)
    with refuses("accumulates nothing to read out"):
        nisa.exponential(empty(2, 2), empty(2, 2), reduce_res=empty(2, 1))
    with refuses("reduce_res must be a float"):
        nisa.exponential(empty(2, 2), empty(2, 2), 0.0, empty(2, 1, dtype=np.int32), RESET_REDUCE)
    with refuses("reduce_cmd must be one of"):
        nisa.exponential(empty(2, 2), empty(2, 2), reduce_cmd=RESET)
    with refuses("same number of elements"):
        nisa.exponential(empty(2, 2), empty(2, 3))


def test_the_scalar_engine_reads_and_writes_psum(trn2) -> None:
    data, dst = psum(1, 2), psum(1, 2)
    data.write(np.array([[1.0, 2.0]], np.float32))
    nisa.activation(dst, nl.square, data)
    assert dst.read().tolist() == [[1, 4]]
