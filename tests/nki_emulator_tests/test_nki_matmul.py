"""`nc_matmul` and `nc_transpose`: products, groups in PSUM, and what the Tensor Engine refuses."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, hbm, psum, refuses, tile

BF16 = ml_dtypes.bfloat16


def drawn(seed: int, *shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(dtype)


def product(stationary: np.ndarray, moving: np.ndarray) -> np.ndarray:
    """The docstring's contraction over partitions, element by element."""
    (num_rows, num_out), num_moving = stationary.shape, moving.shape[1]
    result = np.zeros((num_out, num_moving), np.float32)
    for m in range(num_out):
        for n in range(num_moving):
            result[m, n] = sum(float(stationary[k, m]) * float(moving[k, n]) for k in range(num_rows))
    return result


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, ml_dtypes.float8_e4m3])
def test_partitions_are_contracted(trn2, dtype) -> None:
    stationary, moving = drawn(0, 5, 3, dtype=dtype), drawn(1, 5, 4, dtype=dtype)
    dst = psum(3, 4)
    nisa.nc_matmul(dst, tile(stationary, dtype), tile(moving, dtype))
    assert dst.read().tolist() == product(stationary, moving).tolist()


def test_free_axes_count_as_one(trn2) -> None:
    stationary, moving = drawn(0, 5, 2, 3), drawn(1, 5, 2, 2)
    dst = psum(6, 2, 2)
    nisa.nc_matmul(dst, tile(stationary), tile(moving))
    expected = product(stationary.reshape(5, 6), moving.reshape(5, 4))
    assert dst.read().reshape(6, 4).tolist() == expected.tolist()


def test_a_group_of_bfloat16_tiles_is_summed_in_float32(trn2) -> None:
    ones = tile(np.ones((128, 1)), BF16)
    dst = psum(1, 1)
    for _ in range(8):
        nisa.nc_matmul(dst, ones, ones)
    # In bfloat16 the sum would stay at 256.
    assert dst.read().item() == 8 * 128


def test_trn3_sums_into_bfloat16_and_trn2_does_not(trn3) -> None:
    ones, dst = tile(np.ones((128, 1)), BF16), psum(1, 1, dtype=BF16)
    nisa.nc_matmul(dst, ones, ones)
    assert dst.read().item() == 128


def test_accumulate_false_opens_a_group_anew(trn2) -> None:
    two, dst = tile([[2.0]]), psum(1, 1)
    for accumulate in (None, None, False, True):
        nisa.nc_matmul(dst, two, two, accumulate=accumulate)
    assert dst.read().item() == 8


def test_groups_stand_side_by_side_in_one_allocation(trn2) -> None:
    two, dst = tile([[2.0]]), psum(1, 4)
    nisa.nc_matmul(dst[:, 0:1], two, two)
    nisa.nc_matmul(dst[:, 1:2], two, two)
    nisa.nc_matmul(dst[:, 0:1], two, two)
    assert dst.read()[0, :2].tolist() == [8, 4]


@pytest.mark.parametrize("accumulate", [True, None])
def test_a_matmul_adds_to_nothing_that_no_matmul_wrote(trn2, accumulate) -> None:
    one, dst = tile([[1.0]]), psum(1, 2)
    nisa.memset(dst, 0.0)
    with refuses("written last by another instruction than a matmul"):
        nisa.nc_matmul(dst[:, 0:1], one, one, accumulate=accumulate)
    nisa.nc_matmul(dst[:, 0:1], one, one, accumulate=False)
    with refuses("not all were begun by a matmul"):
        nisa.nc_matmul(dst, one, tile([[1.0, 1.0]]), accumulate=accumulate)


def test_a_matmul_does_not_add_to_new_memory(trn2) -> None:
    one = tile([[1.0]])
    with refuses("not all were begun by a matmul"):
        nisa.nc_matmul(psum(1, 1), one, one, accumulate=True)


def test_trn3_adds_to_a_value_only_when_told(trn3) -> None:
    one, dst = tile([[1.0]]), psum(1, 1)
    nisa.memset(dst, 5.0)
    with refuses("written last by another instruction"):
        nisa.nc_matmul(dst, one, one)
    nisa.nc_matmul(dst, one, one, accumulate=True)
    assert dst.read().item() == 6


def test_a_second_bank_is_written_by_a_second_matmul(trn2) -> None:
    one, dst = tile([[1.0]]), psum(1, 1024)
    wide = tile(np.ones((1, 512)))
    nisa.nc_matmul(dst[:, 512:1024], one, wide)
    with refuses("PSUM banks 0 to 1"):
        nisa.nc_matmul(dst[:, 256:768], one, wide)


def test_trn3_writes_across_banks(trn3) -> None:
    dst = psum(1, 1024)
    nisa.nc_matmul(dst, tile([[1.0]]), tile(np.ones((1, 1024))))
    assert dst.read().sum() == 1024


MATMUL_REFUSALS = [
    ("dst is in sbuf", lambda: nisa.nc_matmul(empty(2, 2), empty(4, 2), empty(4, 2))),
    ("moving is in psum", lambda: nisa.nc_matmul(psum(2, 2), empty(4, 2), psum(4, 2))),
    ("stationary is in hbm", lambda: nisa.nc_matmul(psum(2, 2), hbm(4, 2), empty(4, 2))),
    ("are contracted and must agree", lambda: nisa.nc_matmul(psum(2, 2), empty(4, 2), empty(3, 2))),
    ("stationary has 129 columns", lambda: nisa.nc_matmul(psum(128, 2), empty(4, 129), empty(4, 2))),
    ("moving has 513 columns", lambda: nisa.nc_matmul(psum(2, 513), empty(4, 2), empty(4, 513))),
    ("dst must be .stationary's columns", lambda: nisa.nc_matmul(psum(2, 3), empty(4, 3), empty(4, 2))),
    ("stationary is int32", lambda: nisa.nc_matmul(psum(2, 2), empty(4, 2, dtype=np.int32), empty(4, 2))),
    ("float32 multiplies float32", lambda: nisa.nc_matmul(psum(2, 2), empty(4, 2), empty(4, 2, dtype=BF16))),
    ("dst must be float32 on", lambda: nisa.nc_matmul(psum(2, 2, dtype=BF16), empty(4, 2), empty(4, 2))),
    (
        "must both be given",
        lambda: nisa.nc_matmul(psum(2, 2), empty(4, 2), empty(4, 2), tile_size=(64, 128)),
    ),
    (
        "a position is a multiple",
        lambda: nisa.nc_matmul(psum(2, 2), empty(4, 2), empty(4, 2), tile_position=(32, 0), tile_size=(64, 128)),
    ),
    (
        "holds the tile",
        lambda: nisa.nc_matmul(psum(2, 2), empty(40, 2), empty(40, 2), tile_position=(0, 0), tile_size=(32, 128)),
    ),
    (
        "PSUM banks 0 to 1",
        lambda: nisa.nc_matmul(psum(2, 1024)[:, 510:514], empty(4, 2), tile(np.eye(4)), is_transpose=True),
    ),
    ("moving must be the identity", lambda: nisa.nc_matmul(psum(2, 2), empty(2, 2), empty(2, 2), is_transpose=True)),
]


@pytest.mark.parametrize(("rule", "instruction"), MATMUL_REFUSALS, ids=[rule for rule, _ in MATMUL_REFUSALS])
def test_nc_matmul_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_the_two_e4m3_formats_do_not_meet(trn3) -> None:
    legacy, ocp = empty(4, 2, dtype=nl.float8_e4m3), empty(4, 2, dtype=nl.float8_e4m3fn)
    nisa.nc_matmul(psum(2, 2), ocp, ocp)
    with refuses("cannot be mixed"):
        nisa.nc_matmul(psum(2, 2), legacy, ocp)


def test_a_performance_mode_is_refused_as_not_emulated(trn2) -> None:
    with pytest.raises(NotImplementedError, match="double_row"):
        nisa.nc_matmul(psum(2, 2), empty(4, 2), empty(4, 2), perf_mode=nisa.matmul_perf_mode.double_row)


def test_a_matmul_with_the_identity_transposes_bits(trn2) -> None:
    data = np.array([[1, np.nan, 3], [np.inf, 5, 6]], BF16)
    dst = psum(3, 2, dtype=BF16)
    nisa.nc_matmul(dst, tile(data, BF16), tile(np.eye(2), BF16), is_transpose=True)
    assert dst.read().view(np.uint16).tolist() == data.T.copy().view(np.uint16).tolist()


def test_a_transpose_keeps_the_bits_of_any_dtype(trn2) -> None:
    data = np.arange(40 * 6, dtype=np.int32).reshape(40, 2, 3) + 2**30
    dst = psum(6, 40, dtype=np.int32)
    nisa.nc_transpose(dst, tile(data, np.int32), engine=nisa.engine.tensor)
    assert dst.read().tolist() == data.reshape(40, 6).T.tolist()


def test_small_transposes_go_to_the_vector_engine_unless_told(trn2) -> None:
    nisa.nc_transpose(empty(32, 8), tile(np.zeros((8, 32))))
    nisa.nc_transpose(psum(33, 8), tile(np.zeros((8, 33))))
    nisa.nc_transpose(psum(32, 8), tile(np.zeros((8, 32))), engine=nisa.engine.tensor)
    assert [instruction.engine for instruction in trn2.instructions] == ["vector", "tensor", "tensor"]


TRANSPOSE_REFUSALS = [
    ("exceeds the 32 x 32", lambda: nisa.nc_transpose(empty(33, 8), empty(8, 33), engine=nisa.engine.vector)),
    ("exceeds the 128 x 128", lambda: nisa.nc_transpose(psum(128, 8), empty(8, 129), engine=nisa.engine.tensor)),
    ("dst is in sbuf", lambda: nisa.nc_transpose(empty(33, 8), empty(8, 33))),
    ("PSUM banks 0 to 1", lambda: nisa.nc_transpose(psum(64, 1024)[:, 448:576], empty(128, 64))),
    ("dst must be bfloat16", lambda: nisa.nc_transpose(empty(8, 8), empty(8, 8, dtype=BF16))),
    ("not the transposed shape", lambda: nisa.nc_transpose(empty(8, 4), empty(8, 4))),
    ("engine must be one of", lambda: nisa.nc_transpose(empty(8, 8), empty(8, 8), engine=nisa.engine.scalar)),
]


@pytest.mark.parametrize(("rule", "instruction"), TRANSPOSE_REFUSALS, ids=[rule for rule, _ in TRANSPOSE_REFUSALS])
def test_nc_transpose_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_the_trace_tells_what_a_matmul_costs(trn2) -> None:
    nisa.nc_matmul(psum(3, 7), empty(5, 3, dtype=BF16), empty(5, 7, dtype=BF16))
    (instruction,) = trn2.instructions
    assert instruction.engine == "tensor"
    details = instruction.details
    assert (details["rows"], details["stationary_columns"], details["columns"]) == (5, 3, 7)
    assert (details["dtype"], details["is_transpose"]) == ("bfloat16", False)
