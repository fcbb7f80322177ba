"""Elementwise instructions and reductions: their arithmetic, the engine that runs them, and what is refused."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, hbm, psum, refuses, tile

BF16 = ml_dtypes.bfloat16


def engine_of(core) -> str:
    return core.instructions[-1].engine


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int32, np.uint8])
def test_memset_fills_with_a_value_of_the_tiles_dtype(trn2, dtype) -> None:
    dst = empty(2, 3, dtype=dtype)
    nisa.memset(dst, 3)
    assert dst.read().astype(np.float32).tolist() == [[3, 3, 3], [3, 3, 3]]
    assert engine_of(trn2) == "vector"


def test_a_copy_through_a_view_leaves_the_rest(trn2) -> None:
    dst = tile(np.zeros((2, 4)))
    nisa.tensor_copy(dst[:, 1:4:2], tile([[1, 2], [3, 4]]))
    assert dst.read().tolist() == [[0, 1, 0, 2], [0, 3, 0, 4]]


def test_shapes_may_differ_within_a_partition(trn2) -> None:
    dst = empty(2, 2, 3)
    nisa.tensor_copy(dst, tile(np.arange(12).reshape(2, 6)))
    assert dst.read().reshape(2, 6).tolist() == np.arange(12).reshape(2, 6).tolist()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (nl.add, [5, 1, -2]),
        (nl.subtract, [1, -5, 0]),
        (nl.multiply, [6, -6, 1]),
        (nl.maximum, [3, 3, -1]),
        (nl.minimum, [2, -2, -1]),
        (nl.equal, [0, 0, 1]),
        (nl.not_equal, [1, 1, 0]),
        (nl.less, [0, 1, 0]),
        (nl.less_equal, [0, 1, 1]),
        (nl.greater, [1, 0, 0]),
        (nl.greater_equal, [1, 0, 1]),
        (nl.logical_and, [1, 1, 1]),
        (nl.logical_xor, [0, 0, 0]),
    ],
)
def test_two_tiles_meet_element_by_element(trn2, op, expected) -> None:
    dst = empty(1, 3)
    nisa.tensor_tensor(dst, tile([[3, -2, -1]]), tile([[2, 3, -1]]), op)
    assert dst.read().tolist() == [expected]
    assert engine_of(trn2) == "vector"


def test_the_result_is_rounded_once_at_the_write(trn2) -> None:
    dst = empty(1, 1, dtype=BF16)
    nisa.tensor_scalar(dst, tile([[1.0]], BF16), nl.add, 2**-8, op1=nl.add, operand1=2**-8)
    # Between the two operators bfloat16 would have rounded 1 + 2^-8, a tie, down to 1.
    assert dst.read().astype(np.float32).item() == 1 + 2**-7


def test_abs_max_keeps_the_sign_and_a_tie_is_the_second(trn3) -> None:
    dst = empty(1, 3)
    nisa.tensor_tensor(dst, tile([[-5, 1, 1]]), tile([[3, -1, -2]]), nl.abs_max)
    assert dst.read().tolist() == [[-5, -1, -2]]
    nisa.tensor_tensor(dst, tile([[-5, 1, 1]]), tile([[3, -1, -2]]), nl.abs_min)
    assert dst.read().tolist() == [[3, -1, 1]]


def test_integers_of_32_bits_are_exact_on_gpsimd_and_float32_on_vector(trn2) -> None:
    a, b, dst = tile([[2**24 + 1]], np.int32), tile([[0]], np.int32), empty(1, 1, dtype=np.int32)
    nisa.tensor_tensor(dst, a, b, nl.add)
    assert (dst.read().item(), engine_of(trn2)) == (2**24 + 1, "gpsimd")
    nisa.tensor_tensor(dst, a, b, nl.add, engine=nisa.engine.vector)
    assert (dst.read().item(), engine_of(trn2)) == (2**24, "vector")


def test_integers_in_psum_fall_back_to_float32(trn2) -> None:
    dst = psum(1, 1, dtype=np.int32)
    nisa.tensor_tensor(dst, tile([[2**24 + 1]], np.int32), tile([[0]], np.int32), nl.add)
    assert (dst.read().item(), engine_of(trn2)) == (2**24, "vector")


def test_a_power_runs_on_gpsimd(trn2) -> None:
    dst = empty(1, 2)
    nisa.tensor_tensor(dst, tile([[2, 9]]), tile([[3, 0.5]]), nl.power)
    assert (dst.read().tolist(), engine_of(trn2)) == ([[8, 3]], "gpsimd")


def test_bits_are_not_cast(trn2) -> None:
    a, b = tile([[-1, 0b1100]], np.int32), tile([[2**31, 0b1010]], np.uint32)
    dst = empty(1, 2, dtype=np.uint32)
    nisa.tensor_tensor(dst, a, b, nl.bitwise_xor)
    assert dst.read().tolist() == [[2**31 - 1, 0b0110]]
    nisa.tensor_scalar(dst, a, nl.right_shift, 1, op1=nl.bitwise_and, operand1=0xFFFF0002)
    # The shift is logical, so the sign comes in as a bit like any other.
    assert dst.read().tolist() == [[0x7FFF0002, 2]]
    signed = empty(1, 2, dtype=np.int32)
    nisa.tensor_scalar(signed, a, nl.invert, None)
    assert signed.read().tolist() == [[0, ~0b1100]]
    nisa.tensor_scalar(signed, a, nl.bitwise_and, tile([[0b0100]], np.int32))
    assert signed.read().tolist() == [[0b0100, 0b0100]]
    nisa.tensor_scalar(signed, a, nl.left_shift, 1, reverse0=False)
    assert signed.read().tolist() == [[-2, 0b11000]]


def test_a_scalar_stage_takes_a_column_or_a_number_on_either_side(trn2) -> None:
    data, operand, dst = tile([[1, 2], [3, 4]]), tile([[10], [20]]), empty(2, 2)
    nisa.tensor_scalar(dst, data, nl.subtract, operand, reverse0=True, op1=nl.multiply, operand1=2.0)
    assert dst.read().tolist() == [[18, 16], [34, 32]]
    nisa.tensor_scalar(dst, data, nl.square, None, op1=nl.subtract, operand1=1.0, reverse1=True)
    assert dst.read().tolist() == [[0, -3], [-8, -15]]


def test_integers_go_through_float32_in_tensor_scalar(trn2) -> None:
    dst = empty(1, 1, dtype=np.int32)
    nisa.tensor_scalar(dst, tile([[2**24 + 1]], np.int32), nl.multiply, 1.0)
    assert dst.read().item() == 2**24


def test_rsqrt_of_tensor_scalar_runs_on_gpsimd(trn2) -> None:
    dst = empty(1, 2)
    nisa.tensor_scalar(dst, tile([[4, 16]]), nl.rsqrt, 0.0)
    assert (dst.read().tolist(), engine_of(trn2)) == ([[0.5, 0.25]], "gpsimd")


def test_the_scalar_engine_of_trn3_takes_what_trn2s_does_not(trn3) -> None:
    dst = empty(1, 1)
    nisa.tensor_scalar(dst, tile([[7]]), nl.subtract, 2.0, engine=nisa.engine.scalar)
    assert (dst.read().item(), engine_of(trn3)) == (5, "scalar")


def test_a_whole_tile_is_the_second_operand(trn2) -> None:
    data, second, dst = tile([[1, 2], [3, 4]]), tile([[100, 200], [300, 400]]), empty(2, 2)
    nisa.scalar_tensor_tensor(dst, data, nl.multiply, tile([[2], [3]], BF16), nl.subtract, second, reverse1=True)
    assert dst.read().tolist() == [[98, 196], [291, 388]]


def test_reciprocal_is_of_the_vector_engine(trn2) -> None:
    dst = empty(1, 3)
    nisa.reciprocal(dst, tile([[4, -0.5, 0]]))
    assert (dst.read().tolist(), engine_of(trn2)) == ([[0.25, -2, np.inf]], "vector")


ELEMENTWISE_REFUSALS = [
    ("src is in psum and runs on the GpSimd", lambda: nisa.tensor_copy(empty(2, 2), psum(2, 2), nisa.engine.gpsimd)),
    ("dst is in hbm", lambda: nisa.tensor_copy(hbm(2, 2), empty(2, 2))),
    ("src must be a tensor", lambda: nisa.tensor_copy(empty(2, 2), 1.0)),
    ("same number of partitions", lambda: nisa.tensor_copy(empty(2, 2), empty(4, 1))),
    ("same number of elements", lambda: nisa.tensor_copy(empty(2, 2), empty(2, 3))),
    ("engine must be one of", lambda: nisa.tensor_copy(empty(2, 2), empty(2, 2), engine=nisa.engine.tensor)),
    ("engine must be one of", lambda: nisa.memset(empty(2, 2), 0.0, engine=nisa.engine.scalar)),
    ("from one of .0, 32, 64, 96.", lambda: nisa.memset(empty(64, 2)[16:32], 0.0)),
    ("dst is in hbm", lambda: nisa.memset(hbm(2, 2), 0.0)),
    ("value 1.5 is not one of dst's dtype", lambda: nisa.memset(empty(2, 2, dtype=np.int32), 1.5)),
    ("value -1 is not one of dst's dtype", lambda: nisa.memset(empty(2, 2, dtype=np.uint32), -1)),
    ("value must be a number", lambda: nisa.memset(empty(2, 2), empty(2, 1))),
    ("same number of elements", lambda: nisa.reciprocal(empty(2, 2), empty(2, 3))),
    ("both in PSUM", lambda: nisa.tensor_tensor(empty(2, 2), psum(2, 2), psum(2, 2), nl.add)),
    ("same number of elements", lambda: nisa.tensor_tensor(empty(2, 2), empty(2, 2), empty(2, 1), nl.add)),
    (
        "op must be an operator of nki.language",
        lambda: nisa.tensor_tensor(empty(2, 2), empty(2, 2), empty(2, 2), "add"),
    ),
    (
        "nl.divide is computed by no engine",
        lambda: nisa.tensor_tensor(empty(2, 2), empty(2, 2), empty(2, 2), nl.divide),
    ),
    ("nl.exp is activation", lambda: nisa.tensor_tensor(empty(2, 2), empty(2, 2), empty(2, 2), nl.exp)),
    ("must take 2 inputs", lambda: nisa.tensor_tensor(empty(2, 2), empty(2, 2), empty(2, 2), nl.square)),
    ("nl.abs_max needs NeuronCore-v4", lambda: nisa.tensor_tensor(empty(2, 2), empty(2, 2), empty(2, 2), nl.abs_max)),
    (
        "dst is in psum and runs on the GpSimd",
        lambda: nisa.tensor_tensor(psum(2, 2), empty(2, 2), empty(2, 2), nl.power),
    ),
    (
        "tensor_tensor of nl.power: engine",
        lambda: nisa.tensor_tensor(empty(2, 2), empty(2, 2), empty(2, 2), nl.power, engine=nisa.engine.vector),
    ),
    (
        "tensor_tensor of nl.bitwise_and: engine",
        lambda: nisa.tensor_tensor(*_integers(3), nl.bitwise_and, engine=nisa.engine.gpsimd),
    ),
    (
        "a bitvec operator takes integers",
        lambda: nisa.tensor_tensor(_integers(1)[0], _integers(1)[0], empty(2, 2), nl.bitwise_and),
    ),
    (
        "both inputs must be of one width",
        lambda: nisa.tensor_tensor(*_integers(2), empty(2, 2, dtype=np.uint8), nl.bitwise_and),
    ),
    (
        "dst must be an integer of 32 bits",
        lambda: nisa.tensor_tensor(empty(2, 2, dtype=np.uint8), *_integers(2), nl.bitwise_and),
    ),
    ("dst must be an integer of 32 bits", lambda: nisa.tensor_tensor(empty(2, 2), *_integers(2), nl.bitwise_or)),
    ("operand0 as a tile must be float32", lambda: _scalar(nl.add, empty(2, 1, dtype=BF16))),
    ("operand0 must have one element per partition", lambda: _scalar(nl.add, empty(2, 2))),
    ("same number of partitions", lambda: _scalar(nl.add, empty(1, 1))),
    ("operand0 must be a number or a tile", lambda: _scalar(nl.add, None)),
    ("operand0 must be None or 0", lambda: _scalar(nl.square, 2.0)),
    ("operand1 needs an op1", lambda: _scalar(nl.add, 1.0, operand1=1.0)),
    ("op0 must be of the", lambda: _scalar(nl.power, 2.0)),
    ("op1 must be of the arithmetic operators", lambda: _scalar(nl.add, 1.0, op1=nl.bitwise_and, operand1=1)),
    ("tensor_scalar of nl.rsqrt: engine", lambda: _scalar(nl.rsqrt, 0, engine=nisa.engine.vector)),
    ("engine must be one of", lambda: _scalar(nl.add, 1.0, engine=nisa.engine.gpsimd)),
    ("the Scalar Engine of NeuronCore-v3", lambda: _scalar(nl.subtract, 1.0, engine=nisa.engine.scalar)),
    ("tensor_scalar of nl.bitwise_and: engine", lambda: _bits(nl.bitwise_and, 1, engine=nisa.engine.scalar)),
    ("operand0 is 1.5", lambda: _bits(nl.bitwise_and, 1.5)),
    ("operand0 must be .2, 1. of 32 bits", lambda: _bits(nl.bitwise_and, empty(2, 1, dtype=np.uint8))),
    ("operand0 must be .2, 1. of 32 bits", lambda: _bits(nl.bitwise_and, empty(2, 2, dtype=np.int32))),
    ("both in PSUM", lambda: _fused(nl.add, nl.add, psum(2, 2), psum(2, 2))),
    ("op0 must be of the arithmetic", lambda: _fused(nl.bitwise_and, nl.add, empty(2, 2), empty(2, 2))),
    ("op1 must be of the arithmetic", lambda: _fused(nl.add, nl.power, empty(2, 2), empty(2, 2))),
    ("op1 must take 2 inputs", lambda: _fused(nl.add, nl.square, empty(2, 2), empty(2, 2))),
    ("same number of elements", lambda: _fused(nl.add, nl.add, empty(2, 2), empty(2, 1))),
    ("is broadcast", lambda: nisa.memset(empty(2, 1).broadcast(1, 4), 0.0)),
]


def _integers(count: int) -> list:
    return [empty(2, 2, dtype=np.int32) for _ in range(count)]


def _scalar(op0, operand0, **options) -> None:
    nisa.tensor_scalar(empty(2, 2), empty(2, 2), op0, operand0, **options)


def _bits(op0, operand0, **options) -> None:
    nisa.tensor_scalar(*_integers(2), op0, operand0, **options)


def _fused(op0, op1, data, operand1) -> None:
    nisa.scalar_tensor_tensor(empty(2, 2), data, op0, 1.0, op1, operand1)


def test_an_operator_is_no_function_of_tiles() -> None:
    with refuses("nl.add on tiles is not emulated"):
        nl.add(1, 2)


def numbered(refusals: list) -> list[str]:
    return [f"{at}: {rule}" for at, (rule, _) in enumerate(refusals)]


@pytest.mark.parametrize(("rule", "instruction"), ELEMENTWISE_REFUSALS, ids=numbered(ELEMENTWISE_REFUSALS))
def test_an_elementwise_instruction_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


@pytest.mark.parametrize(
    ("op", "expected"), [(nl.add, [6, 3]), (nl.multiply, [-6, 0]), (nl.maximum, [6, 2]), (nl.minimum, [-1, 0])]
)
def test_a_reduction_folds_a_partition(trn2, op, expected) -> None:
    dst = empty(2, 1)
    nisa.tensor_reduce(dst, op, tile([[-1, 1, 6], [1, 2, 0]]), axis=1)
    assert dst.read().reshape(-1).tolist() == expected


def test_a_reduction_keeps_the_leading_free_axes(trn2) -> None:
    data = np.arange(24).reshape(2, 3, 4)
    for axis, shape in ((2, (2, 3)), ((1, 2), (2, 1))):
        dst = empty(*shape)
        nisa.tensor_reduce(dst, nl.add, tile(data), axis=axis, negate=True)
        assert dst.read().tolist() == (-data.sum(axis).reshape(shape)).tolist()


def test_a_reduction_of_bfloat16_is_in_float32(trn2) -> None:
    dst = empty(1, 1)
    nisa.tensor_reduce(dst, nl.add, tile(np.ones((1, 1000)), BF16), axis=1)
    assert dst.read().item() == 1000


def test_a_reduction_of_bits_is_of_bits(trn2) -> None:
    dst = empty(1, 1, dtype=np.uint32)
    nisa.tensor_reduce(dst, nl.bitwise_or, tile([[2**31, 1]], np.uint32), axis=1)
    assert dst.read().item() == 2**31 + 1


@pytest.mark.parametrize(("op", "expected"), [(nl.add, [4, 0]), (nl.average, [2, 0]), (nl.maximum, [3, 4])])
def test_partitions_are_reduced_on_gpsimd(trn2, op, expected) -> None:
    dst = empty(1, 2)
    nisa.tensor_partition_reduce(dst, op, tile([[1, 4], [3, -4]]))
    assert (dst.read().tolist(), engine_of(trn2)) == ([expected], "gpsimd")


def test_the_bits_of_partitions_are_reduced_as_bits(trn2) -> None:
    dst = empty(1, 1, dtype=np.int32)
    nisa.tensor_partition_reduce(dst, nl.bitwise_and, tile([[-1], [12]], np.int32))
    assert dst.read().item() == 12


def test_a_view_puts_other_elements_next_to_each_other(trn2) -> None:
    data, dst = np.arange(24).reshape(2, 3, 4), empty(2, 4)
    nisa.tensor_reduce(dst, nl.maximum, tile(data).permute((0, 2, 1)), axis=2)
    assert dst.read().tolist() == data.max(1).tolist()


REDUCTION_REFUSALS = [
    ("never the partitions", lambda: nisa.tensor_reduce(empty(2, 1), nl.add, empty(2, 3), axis=0)),
    ("only the last free axes", lambda: nisa.tensor_reduce(empty(2, 4), nl.add, empty(2, 3, 4), axis=1)),
    ("only the last free axes", lambda: nisa.tensor_reduce(empty(2, 1), nl.add, empty(2, 3), axis=-1)),
    ("only the last free axes", lambda: nisa.tensor_reduce(empty(2, 1), nl.add, empty(2, 3), axis=2)),
    ("as many elements as dst", lambda: nisa.tensor_reduce(empty(2, 2), nl.add, empty(2, 4), axis=1)),
    ("no legal reduction", lambda: nisa.tensor_reduce(empty(2, 1), nl.less, empty(2, 4), axis=1)),
    ("op must be of the", lambda: nisa.tensor_reduce(empty(2, 1), nl.average, empty(2, 4), axis=1)),
    (
        "negate is for arithmetic",
        lambda: nisa.tensor_reduce(
            empty(2, 1, dtype=np.int32), nl.bitwise_or, empty(2, 4, dtype=np.int32), axis=1, negate=True
        ),
    ),
    ("same number of partitions", lambda: nisa.tensor_reduce(empty(1, 2), nl.add, empty(2, 3), axis=1)),
    ("dst must span one partition", lambda: nisa.tensor_partition_reduce(empty(2, 3), nl.add, empty(2, 3))),
    ("op must be one of", lambda: nisa.tensor_partition_reduce(empty(1, 3), nl.multiply, empty(2, 3))),
    ("data is in psum", lambda: nisa.tensor_partition_reduce(empty(1, 3), nl.add, psum(2, 3))),
    ("same number of elements", lambda: nisa.tensor_partition_reduce(empty(1, 2), nl.add, empty(2, 3))),
]


@pytest.mark.parametrize(("rule", "instruction"), REDUCTION_REFUSALS, ids=numbered(REDUCTION_REFUSALS))
def test_a_reduction_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_a_reduction_by_subtraction_is_refused_as_not_emulated(trn2) -> None:
    with pytest.raises(NotImplementedError, match="no document says"):
        nisa.tensor_reduce(empty(2, 1), nl.subtract, empty(2, 4), axis=1)


def test_the_trace_tells_what_an_elementwise_instruction_costs(trn2) -> None:
    nisa.scalar_tensor_tensor(empty(2, 4), empty(2, 4), nl.multiply, empty(2, 1), nl.add, empty(2, 4))
    (instruction,) = trn2.instructions
    assert (instruction.opcode, instruction.engine) == ("scalar_tensor_tensor", "vector")
    assert (instruction.details["num_inputs"], instruction.details["ops"]) == (2, ("multiply", "add"))
    assert [operand.shape for operand in instruction.reads] == [(2, 4), (2, 4), (2, 1)]
    assert [operand.shape for operand in instruction.writes] == [(2, 4)]
