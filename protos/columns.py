"""Columns of numbers as they cross a wire: little-endian bytes. Knows no message.

`tobytes` on one side, `frombuffer` on the other, no Python loop.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Int32Array

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")


def column_to_bytes(column: Int32Array) -> bytes:
    return column.astype(_INT32, copy=False).tobytes() if column.size else b""


def column_from_bytes(data: bytes) -> Int32Array:
    """Read an int32 column; a read-only view of `data`. Raises ProtocolError if it ends inside a number."""
    return _column(data, _INT32)


def int64_column_to_bytes(column: NDArray[np.int64]) -> bytes:
    return column.astype(_INT64, copy=False).tobytes()


def int64_column_from_bytes(data: bytes) -> NDArray[np.int64]:
    """The same for int64."""
    return _column(data, _INT64)


def float_column_to_bytes(column: NDArray[np.float32]) -> bytes:
    return column.astype(_FLOAT32, copy=False).tobytes()


def float_column_from_bytes(data: bytes) -> NDArray[np.float32]:
    """The same for float32."""
    return _column(data, _FLOAT32)


def _column(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise ProtocolError(
            f"a column of {len(data)} bytes does not hold whole {dtype.name} numbers; check the peer's version."
        )
    return np.frombuffer(data, dtype)
