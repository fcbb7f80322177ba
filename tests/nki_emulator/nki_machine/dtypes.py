"""How values become another dtype: the names, the rounding and what new memory holds; knows no tensor.

The documentation states round-to-nearest-even and, for integers, saturation (NKI 0.6.0's release notes). What it does
not state is ours: a float beyond a float dtype's range becomes what `ml_dtypes` says (an infinity, or NaN in
`float8_e4m3fn`), and a NaN that is cast to an integer becomes `poison_of` that integer.
"""

import math

import ml_dtypes
import numpy as np

from nki_machine.errors import RuleError

DTYPES: dict[str, np.dtype] = {
    "bool": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# `float8_e4m3fn` exists from Trn3 on.
FIRST_GENERATION = {"float8_e4m3fn": 4}


def as_dtype(dtype: object, generation: int) -> np.dtype:
    """The numpy dtype of an `nl` dtype or of its name.

    Raises:
        RuleError: NKI has no such dtype, or not on this generation.
    """
    try:
        numpy_dtype = np.dtype(dtype)
    except TypeError:
        numpy_dtype = None
    if numpy_dtype not in _NAMES:
        raise RuleError(f"{dtype} is no dtype of this emulator's NKI: take one of {', '.join(DTYPES)}.")
    if generation < FIRST_GENERATION.get(numpy_dtype.name, 0):
        raise RuleError(f"{numpy_dtype.name} exists from Trn3 on, and the target is generation {generation}.")
    return numpy_dtype


def name_of(dtype: np.dtype) -> str:
    """`dtype.name`, which numpy takes ten microseconds to spell."""
    return _NAMES[dtype]


def is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iub"


def poison_of(dtype: np.dtype, poison: float) -> np.ndarray:
    """What an element of new memory holds: `poison`, saturated to the dtype's range, and for a NaN in an integer
    two thirds of its largest value (which no index in bounds is, and no -1 looks like)."""
    if dtype.kind == "b":
        return np.array(True)
    if math.isnan(poison) and is_integer(dtype):
        return np.array(np.iinfo(dtype).max // 3 * 2, dtype=dtype)
    if is_integer(dtype):
        return _saturated(np.array(poison), dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.array(poison if math.isnan(poison) else min(max(poison, -largest), largest), dtype=np.float32).astype(
        dtype
    )


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values as `dtype`, rounded to nearest even; integers saturate. Of the same dtype they stay, bit for bit."""
    if values.dtype == dtype:
        return values
    if dtype.kind == "b":
        return values != 0
    if is_integer(dtype):
        return _to_integer(values, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(dtype)


def _to_integer(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if is_integer(values.dtype):
        return _saturated(values.astype(np.int64), dtype)
    # A float32 holds neither bound of 32-bit integers, a float64 both.
    exact = values.astype(np.float64)
    nan = np.isnan(exact)
    whole = _saturated(np.rint(np.where(nan, 0, exact)), dtype)
    return np.where(nan, poison_of(dtype, math.nan), whole)


def _saturated(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    bounds = np.iinfo(dtype)
    return np.clip(values, bounds.min, bounds.max).astype(dtype)
