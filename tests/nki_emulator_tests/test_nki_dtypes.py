"""Rounding at a write: to nearest even, integers saturating, equal dtypes bit for bit."""

import ml_dtypes
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from on_core import empty, refuses

from nki_machine.dtypes import DTYPES, as_dtype, cast, name_of, poison_of

INTEGERS = [nl.int8, nl.int16, nl.int32, nl.uint8, nl.uint16, nl.uint32]
FLOATS = [nl.float16, nl.bfloat16, nl.float32, nl.float8_e4m3, nl.float8_e4m3fn, nl.float8_e5m2]


@pytest.mark.parametrize("dtype", INTEGERS)
@given(value=st.floats(width=32, allow_nan=False))
def test_a_float_becomes_the_nearest_even_integer_in_range(dtype, value: float) -> None:
    bounds = np.iinfo(dtype)
    # Python rounds to nearest even, and exactly.
    expected = round(value) if abs(value) < 2**40 else int(np.sign(value)) * 2**40
    assert cast(np.array([value], np.float32), dtype)[0] == min(max(expected, bounds.min), bounds.max)


@pytest.mark.parametrize("dtype", INTEGERS)
@given(value=st.integers(-(2**31), 2**32 - 1))
def test_an_integer_saturates_exactly(dtype, value: int) -> None:
    bounds = np.iinfo(dtype)
    assert cast(np.array([value], np.int64), dtype)[0] == min(max(value, bounds.min), bounds.max)


def test_a_bool_is_whatever_is_not_zero() -> None:
    assert cast(np.array([0, 2, -1], np.float32), nl.bool_).tolist() == [False, True, True]


def test_halves_go_to_the_even_neighbour() -> None:
    assert cast(np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32), nl.int32).tolist() == [0, 2, 2, 0, -2]
    # 1 + 2**-8 lies between two bfloat16, 1 and 1 + 2**-7; 1 + 3 * 2**-8 between 1 + 2**-7 and 1 + 2**-6.
    halves = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    assert cast(halves, nl.bfloat16).astype(np.float32).tolist() == [1, 1 + 2**-6]


def test_minus_one_becomes_zero_unsigned_and_all_ones_reinterpreted(trn3) -> None:
    minus_one = empty(1, 1, dtype=np.int32)
    minus_one.write(-1)
    unsigned = empty(1, 1, dtype=np.uint32)
    unsigned.write(minus_one.read())
    assert unsigned.read()[0, 0] == 0
    assert minus_one.view(nl.uint32).read()[0, 0] == 0xFFFFFFFF


def test_the_two_float8_e4m3_end_at_240_and_448() -> None:
    values = np.array([240, 248, 448, 500], np.float32)
    assert cast(values, nl.float8_e4m3).astype(np.float32).tolist() == [240, np.inf, np.inf, np.inf]
    fn = cast(values, nl.float8_e4m3fn).astype(np.float32)
    assert fn[:3].tolist() == [240, 256, 448]
    assert np.isnan(fn[3])


def test_equal_dtypes_keep_the_bits_of_a_nan(trn3) -> None:
    payload = np.array([[0x7FC1, 0xFF81]], np.uint16).view(ml_dtypes.bfloat16)
    tile = empty(1, 2, dtype=ml_dtypes.bfloat16)
    tile.write(payload)
    assert tile.read().view(np.uint16).tolist() == [[0x7FC1, 0xFF81]]


def test_a_nan_becomes_an_integer_that_is_no_index() -> None:
    for dtype in INTEGERS:
        cast_nan = cast(np.array([np.nan], np.float32), dtype)[0]
        assert np.iinfo(dtype).max // 2 < cast_nan < np.iinfo(dtype).max


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_poison_is_nan_or_what_the_dtype_holds_of_it(dtype) -> None:
    assert np.isnan(poison_of(dtype, np.nan).astype(np.float32))
    for poison in (1e4, -3e4):
        held = poison_of(dtype, poison).astype(np.float32)
        assert np.isfinite(held)
        assert np.sign(held) == np.sign(poison)


def test_integer_poison_is_huge_or_the_poison_saturated() -> None:
    assert poison_of(nl.int32, np.nan) == 2**31 // 3 * 2
    assert poison_of(nl.int32, -3e4) == -30000
    assert poison_of(nl.uint8, 1e4) == 255
    assert poison_of(nl.uint32, -3e4) == 0


def test_float8_e4m3fn_begins_with_trn3() -> None:
    assert as_dtype(nl.float8_e4m3fn, 4) == nl.float8_e4m3fn
    with refuses("from Trn3 on"):
        as_dtype(nl.float8_e4m3fn, 3)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, "tfloat32", None])
def test_a_dtype_that_nki_lacks_is_refused(dtype) -> None:
    with refuses("no dtype"):
        as_dtype(dtype, 4)


def test_a_dtype_has_numpys_name() -> None:
    assert all(name_of(dtype) == dtype.name == name for name, dtype in DTYPES.items())
