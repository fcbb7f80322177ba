"""Instructions that choose by bounds, masks and places, and the shuffle of partitions."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, hbm, psum, refuses, tile

BF16 = ml_dtypes.bfloat16
FP32_MIN = np.finfo(np.float32).min
RESET_REDUCE = nisa.reduce_cmd.reset_reduce


@pytest.mark.parametrize(
    ("ops", "kept"),
    [
        ((nl.greater_equal, nl.less), [2, 3]),
        ((nl.greater, nl.less_equal), [3, 4]),
        ((nl.equal, nl.less), [2]),
    ],
)
def test_range_select_keeps_positions_between_two_bounds(trn2, ops, kept) -> None:
    """The numpy equivalent in the docstring, position by position; the second partition has bounds of its own."""
    data = np.array([[9, 8, 7, 6, 5, 4], [-1, -2, -3, -4, -5, -6]], np.float32)
    dst, largest = empty(2, 6), empty(2, 1)
    bounds = tile([[2], [11]]), tile([[4], [13]])
    for start, row in ((0, 0), (9, 1)):
        nisa.range_select(dst, tile(data), *ops, *bounds, reduce_res=largest, range_start=start)
        expected = [data[row, f] if f in kept else FP32_MIN for f in range(6)]
        assert dst.read()[row].tolist() == expected
        assert largest.read()[row, 0] == max(expected)


def test_range_select_reads_psum_and_rounds_the_fill_of_a_narrow_dst(trn2) -> None:
    scores, dst, largest = psum(1, 2), empty(1, 2, dtype=BF16), empty(1, 1)
    scores.write(np.array([[3.0, 5.0]], np.float32))
    bounds = tile([[0]]), tile([[1]])
    nisa.range_select(dst, scores, nl.greater_equal, nl.less, *bounds, reduce_res=largest)
    assert dst.read().astype(np.float32).tolist() == [[3, -np.inf]]
    assert largest.read().item() == 3


def test_what_is_not_selected_may_be_anything(trn2) -> None:
    dst = empty(1, 2)
    nisa.range_select(dst, tile([[np.nan, 5.0]]), nl.greater_equal, nl.less, tile([[1]]), tile([[2]]))
    assert dst.read().tolist() == [[FP32_MIN, 5]]


def ranging(**options) -> None:
    arguments = {"comp_op0": nl.greater_equal, "comp_op1": nl.less, "bound0": empty(2, 1), "bound1": empty(2, 1)}
    nisa.range_select(**{"dst": empty(2, 4), "on_true_tile": empty(2, 4), **arguments, **options})


RANGE_REFUSALS = [
    ("comp_op0 must be one of", lambda: ranging(comp_op0=nl.not_equal)),
    ("comp_op1 must be one of", lambda: ranging(comp_op1=nl.add)),
    ("reduce_op must be one of nl.maximum", lambda: ranging(reduce_op=nl.minimum)),
    ("reduce_cmd must be one of", lambda: ranging(reduce_cmd=nisa.reduce_cmd.load_reduce)),
    ("on_false_value must be", lambda: ranging(on_false_value=-1e30)),
    ("on_true_tile must be a float", lambda: ranging(on_true_tile=empty(2, 4, dtype=np.int32))),
    ("bound0 as a tile must be float32", lambda: ranging(bound0=empty(2, 1, dtype=np.int32))),
    ("bound1 must have one element per partition", lambda: ranging(bound1=empty(2, 2))),
    ("bound0 must be a tensor", lambda: ranging(bound0=0.0)),
    ("compile-time integer", lambda: ranging(range_start=nisa.register_alloc(0))),
    ("leave the 16777216", lambda: ranging(range_start=2**24 - 3)),
    ("so reduce_res must be float32", lambda: ranging(dst=empty(2, 4, dtype=BF16), reduce_res=empty(2, 1, dtype=BF16))),
    ("accumulates nothing", lambda: ranging(reduce_cmd=nisa.reduce_cmd.idle, reduce_res=empty(2, 1))),
    ("same number of elements", lambda: ranging(dst=empty(2, 3))),
    ("same number of partitions", lambda: ranging(bound0=empty(1, 1))),
]


def numbered(refusals: list) -> list[str]:
    return [f"{at}: {rule}" for at, (rule, _) in enumerate(refusals)]


@pytest.mark.parametrize(("rule", "instruction"), RANGE_REFUSALS, ids=numbered(RANGE_REFUSALS))
def test_range_select_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_the_last_position_that_float32_tells_apart_is_allowed(trn2) -> None:
    ranging(range_start=2**24 - 4)


def test_select_reduce_takes_a_column_for_what_is_false(trn2) -> None:
    dst, largest = empty(2, 3), empty(2, 1)
    predicate = tile([[1, 0, 7], [0, 0, 0]], np.int16)
    nisa.select_reduce(dst, predicate, tile([[1, 2, 3], [4, 5, 6]]), tile([[-9], [-8]]), largest, RESET_REDUCE)
    assert dst.read().tolist() == [[1, -9, 3], [-8, -8, -8]]
    assert largest.read().tolist() == [[3], [-8]]


def choosing(**options) -> None:
    arguments = {"predicate": empty(2, 4, dtype=np.uint8), "on_true": empty(2, 4), "on_false": 0.0}
    nisa.select_reduce(**{"dst": empty(2, 4), **arguments, **options})


def overwriting(**options) -> None:
    arguments = {"src": empty(2, 4), "predicate": empty(2, 4, dtype=np.uint8)}
    nisa.tensor_copy_predicated(**{"dst": empty(2, 4), **arguments, **options})


MASK_REFUSALS = [
    ("predicate must be int8, uint8, int16, uint16", lambda: choosing(predicate=empty(2, 4, dtype=np.int32))),
    ("both in PSUM", lambda: choosing(predicate=psum(2, 4, dtype=np.uint8), on_true=psum(2, 4))),
    ("on_true cannot be int32", lambda: choosing(on_true=empty(2, 4, dtype=np.int32))),
    ("on_false must have one element", lambda: choosing(on_false=empty(2, 4))),
    ("reduce_op must be one of nl.maximum", lambda: choosing(reduce_op=nl.add)),
    ("reduce_cmd must be one of", lambda: choosing(reduce_cmd=nisa.reduce_cmd.load_reduce)),
    ("accumulates nothing", lambda: choosing(reduce_res=empty(2, 1))),
    (
        "reduce_res must be a float",
        lambda: choosing(reduce_cmd=RESET_REDUCE, reduce_res=empty(2, 1, dtype=np.int32)),
    ),
    ("same number of elements", lambda: choosing(predicate=empty(2, 3, dtype=np.uint8))),
    ("predicate must be uint8, uint16, uint32", lambda: overwriting(predicate=empty(2, 4, dtype=np.int32))),
    ("it casts nothing", lambda: overwriting(src=empty(2, 4, dtype=BF16))),
    ("both in PSUM", lambda: overwriting(src=psum(2, 4), predicate=psum(2, 4, dtype=np.uint8))),
    ("same number of elements", lambda: overwriting(src=empty(2, 3))),
    ("dst is in hbm", lambda: overwriting(dst=hbm(2, 4))),
]


@pytest.mark.parametrize(("rule", "instruction"), MASK_REFUSALS, ids=numbered(MASK_REFUSALS))
def test_a_masked_instruction_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_a_predicated_copy_of_a_number_and_of_psum(trn2) -> None:
    dst, predicate, source = tile([[1, 2, 3]]), tile([[0, 5, 0]], np.uint32), psum(1, 3)
    nisa.tensor_copy_predicated(dst, 9.0, predicate)
    assert dst.read().tolist() == [[1, 9, 3]]
    source.write(np.array([[10, 20, 30]], np.float32))
    nisa.tensor_copy_predicated(dst, source, predicate, reverse_pred=True)
    assert dst.read().tolist() == [[10, 9, 30]]


def test_a_predicated_copy_does_not_read_what_it_leaves_out(trn2) -> None:
    dst = tile([[1, 2]])
    nisa.tensor_copy_predicated(dst, tile([[np.nan, 7]]), tile([[0, 1]], np.uint8))
    assert dst.read().tolist() == [[1, 7]]


def test_iota_counts_in_integers_and_then_casts(trn2) -> None:
    dst, narrow = empty(2, 3, dtype=np.int32), empty(2, 3, dtype=np.uint8)
    nisa.iota(dst, [[1, 3]], offset=2**24 + 1, channel_multiplier=-2)
    assert dst.read().tolist() == [[2**24 + 1 + f - 2 * p for f in range(3)] for p in range(2)]
    nisa.iota(narrow, [[200, 3]])
    assert narrow.read().tolist() == [[0, 200, 255]] * 2
    assert trn2.instructions[-1].engine == "gpsimd"


@pytest.mark.parametrize("comparison", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
def test_affine_select_compares_an_affine_value_with_zero(trn2, comparison) -> None:
    holds = getattr(np, comparison)
    dst = empty(2, 4)
    data = tile([[1, 2, 3, 4]] * 2)
    nisa.affine_select(dst, [[1, 4]], -1, data, -7.0, cmp_op=getattr(nl, comparison), offset=-2)
    assert dst.read().tolist() == [[f + 1 if holds(f - p - 2, 0) else -7 for f in range(4)] for p in range(2)]


def test_affine_select_keeps_the_bits_of_what_it_selects(trn2) -> None:
    dst = empty(1, 2, dtype=np.int32)
    nisa.affine_select(dst, [[1, 2]], 0, tile([[2**24 + 1, 5]], np.int32), 3.0)
    assert dst.read().tolist() == [[2**24 + 1, 3]]


PATTERN_REFUSALS = [
    ("counts 4 elements in a partition", lambda: nisa.iota(empty(2, 3), [[1, 4]])),
    ("1 to 4 pairs", lambda: nisa.iota(empty(2, 1), [[1, 1]] * 5)),
    ("leave 32-bit integers", lambda: nisa.iota(empty(2, 3), [[2**30, 3]])),
    ("dst is in psum", lambda: nisa.iota(psum(2, 3), [[1, 3]])),
    ("on_true_tile is in psum", lambda: nisa.affine_select(empty(2, 3), [[1, 3]], 0, psum(2, 3), 0.0)),
    ("cmp_op must be one of", lambda: nisa.affine_select(empty(2, 3), [[1, 3]], 0, empty(2, 3), 0.0, cmp_op=nl.add)),
    ("on_false_value must be a number", lambda: nisa.affine_select(empty(2, 3), [[1, 3]], 0, empty(2, 3), None)),
    ("same number of elements", lambda: nisa.affine_select(empty(2, 3), [[1, 3]], 0, empty(2, 4), 0.0)),
]


@pytest.mark.parametrize(("rule", "instruction"), PATTERN_REFUSALS, ids=numbered(PATTERN_REFUSALS))
def test_a_pattern_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_a_shuffle_in_place_reads_before_it_writes(trn2) -> None:
    data = tile(np.arange(64).reshape(64, 1))
    nisa.nc_stream_shuffle(data, data, [(i - 1) % 32 for i in range(32)])
    expected = [32 * (p // 32) + (p - 1) % 32 for p in range(64)]
    assert data.read().reshape(-1).tolist() == expected


def shuffling(dst, src, mask=(0,) * 32) -> None:
    nisa.nc_stream_shuffle(dst, src, mask)


SHUFFLE_REFUSALS = [
    ("must be 32 of 0..31 or 255", lambda: shuffling(empty(32, 1), empty(32, 1), (0,) * 31)),
    ("must be 32 of 0..31 or 255", lambda: shuffling(empty(32, 1), empty(32, 1), (32,) * 32)),
    ("it casts nothing", lambda: shuffling(empty(32, 1), empty(32, 1, dtype=BF16))),
    ("same number of elements", lambda: shuffling(empty(32, 1), empty(32, 2))),
    ("takes partition 32 of src, which spans 1", lambda: shuffling(empty(64, 1), empty(1, 1))),
    ("with 64 active partitions it must start", lambda: shuffling(empty(64, 1), empty(64, 1)[32:33])),
]


@pytest.mark.parametrize(("rule", "instruction"), SHUFFLE_REFUSALS, ids=numbered(SHUFFLE_REFUSALS))
def test_a_shuffle_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()
