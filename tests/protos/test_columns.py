"""Columns as bytes: little-endian whatever the array's layout, whole numbers or a protocol error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos.columns import column_from_bytes, column_to_bytes
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Int32Array


@given(data=st.binary(max_size=40))
def test_a_column_is_read_if_and_only_if_it_holds_whole_numbers(data: bytes) -> None:
    if len(data) % 4 == 0:
        column = column_from_bytes(data)
        assert column_to_bytes(column) == data
        assert len(column) == len(data) // 4
    else:
        with pytest.raises(ProtocolError):
            column_from_bytes(data)


def test_a_column_is_little_endian_int32_whatever_the_array_s_layout() -> None:
    numbers = [1, -1, 2**31 - 1, -(2**31)]
    expected = b"\1\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f\0\0\0\x80"
    strided: Int32Array = np.repeat(np.array(numbers, np.int32), 2)[::2]
    for column in (np.array(numbers, np.int32), np.array(numbers, ">i4"), strided):
        assert column_to_bytes(column) == expected
    assert column_from_bytes(expected).tolist() == numbers


def test_a_column_that_was_read_is_int32_and_cannot_be_written() -> None:
    for data in (b"", b"\1\0\0\0"):
        column = column_from_bytes(data)
        assert column.dtype == np.int32
        assert not column.flags.writeable
