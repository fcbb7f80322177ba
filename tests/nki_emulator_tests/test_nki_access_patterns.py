"""`ap`, the raw access pattern: the loops of deep-dives/nki-aps.rst, and the patterns that no engine walks."""

import nki.language as nl
import numpy as np
import pytest
from on_core import empty, hbm, refuses, tile

from nki_machine.registers import VirtualRegister


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def column(*indices: int, dtype: type = np.int32):
    return tile(np.array(indices, dtype=dtype)[:, None], dtype=dtype)


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, nl.shared_hbm])
def test_a_pattern_is_a_loop_over_the_flat_storage(trn3, buffer) -> None:
    flat = numbered(8, 60)
    got = tile(flat, buffer=buffer).ap([[60, 5], [20, 2], [0, 3], [-2, 4]], offset=66).read()
    for w in range(5):
        for z in range(2):
            for y in range(3):
                for x in range(4):
                    assert got[w, z, y, x] == flat.reshape(-1)[66 + w * 60 + z * 20 + y * 0 - x * 2]


def test_a_pattern_without_offset_takes_the_views(trn3) -> None:
    flat = numbered(8, 16)
    got = tile(flat)[2:6, 4:8].ap([[16, 2], [1, 3]]).read()
    np.testing.assert_array_equal(got, flat[2:4, 4:7])


def test_hbm_takes_any_first_stride(trn3) -> None:
    flat = numbered(8, 16)
    got = tile(flat, buffer=nl.shared_hbm).ap([[1, 3], [32, 4]], offset=5).read()
    np.testing.assert_array_equal(got, flat[::2, 5:8].T)


def test_a_dtype_counts_in_its_own_elements(trn3) -> None:
    values = np.arange(24, dtype=np.int32).reshape(4, 6)
    got = tile(values, dtype=np.int32).ap([[12, 4], [1, 12]], offset=0, dtype=nl.uint16).read()
    np.testing.assert_array_equal(got, values.view(np.uint16))


REFUSED = {
    "every other partition": ("first stride", lambda t: t.ap([[64, 4], [1, 32]])),
    "beyond the last partition": ("reaches elements", lambda t: t.ap([[32, 16], [1, 32]], offset=32)),
    "into the next partition": ("leaves its partition", lambda t: t.ap([[32, 4], [1, 32]], offset=1)),
    "before the first element": ("leaves its partition|reaches", lambda t: t.ap([[32, 8], [-1, 2]])),
    "six dimensions": ("1 to 5 dimensions", lambda t: t.ap([[32, 2], *[[1, 1]] * 5])),
    "no dimension": ("1 to 5 dimensions", lambda t: t.ap([])),
    "nothing": ("empty", lambda t: t.ap([[32, 4], [1, 0]])),
    "an offset on an offset": ("offset already", lambda t: t[:, 4:8].ap([[32, 4], [1, 4]], offset=4)),
    "two dynamic offsets": (
        "at most one",
        lambda t: hbm(8, 4).ap([[4, 2], [1, 4]], scalar_offset=column(0), vector_offset=column(0, 1)),
    ),
    "a vector offset on chip": ("must be in HBM", lambda t: t.ap([[32, 2], [1, 32]], vector_offset=column(0, 1))),
    "a vector offset along dimension 1": (
        "must be 0",
        lambda t: hbm(8, 4).ap([[4, 2], [1, 4]], vector_offset=column(0, 1), indirect_dim=1),
    ),
    "a float index": (
        "int32 or uint32",
        lambda t: hbm(8, 4).ap([[4, 2], [1, 4]], vector_offset=tile([[0.0], [1.0]])),
    ),
    "a 16-bit index": (
        "int32 or uint32",
        lambda t: hbm(8, 4).ap([[4, 2], [1, 4]], scalar_offset=column(0, dtype=np.int16)),
    ),
    "an index in HBM": (
        "in SBUF",
        lambda t: hbm(8, 4).ap([[4, 2], [1, 4]], scalar_offset=hbm(1, 1, dtype=np.int32)),
    ),
    "two scalars": ("shape", lambda t: hbm(8, 4).ap([[4, 2], [1, 4]], scalar_offset=column(0, 1))),
    "more rows than indices": ("2 indices", lambda t: hbm(8, 4).ap([[4, 3], [1, 4]], vector_offset=column(0, 1))),
    "an index of a sliced tensor": (
        "contiguous",
        lambda t: hbm(8, 4)[:, 0:2].ap([[4, 2], [1, 2]], vector_offset=column(0, 1)),
    ),
    "a second index": (
        "at most one dynamic index",
        lambda t: hbm(8, 4).ap([[4, 1], [1, 4]], scalar_offset=column(0)).select(0, column(0)),
    ),
    "rows longer than the storage": (
        "reaches elements 0..33",
        lambda t: hbm(8, 4).ap([[4, 2], [1, 34]], vector_offset=column(0, 1)),
    ),
    "an index that moves nothing": (
        "no index moves on",
        lambda t: hbm(8, 1).broadcast(1, 4).select(1, column(0)),
    ),
    "one element too many": ("reaches elements 0..16", lambda t: hbm(4, 4).ap([[1, 17]])),
    "rows of dimension 1": ("must be 0", lambda t: hbm(8, 4).vector_select(1, column(0, 1))),
    "rows of an indexed tensor": (
        "at most one dynamic index",
        lambda t: hbm(8, 4).select(1, column(0)).vector_select(0, column(0, 1)),
    ),
    "a pattern with an index of an indexed tensor": (
        "at most one dynamic index",
        lambda t: hbm(8, 4).vector_select(0, column(0, 1)).ap([[4, 1], [1, 4]], scalar_offset=column(0)),
    ),
    "a slice of the indexed rows": ("run time", lambda t: hbm(8, 4).vector_select(0, column(0, 1))[0:1]),
    "a view of an indexed tensor": ("indirect", lambda t: hbm(8, 4).select(0, column(0)).view(nl.int32)),
    "a partition at run time": ("known before", lambda t: t.select(0, column(0))),
}


@pytest.mark.parametrize(("rule", "use"), REFUSED.values(), ids=REFUSED)
def test_ap_refuses(trn3, rule, use) -> None:
    with refuses(rule):
        use(empty(8, 32))


def test_an_index_with_a_dtype_is_not_emulated(trn3) -> None:
    with pytest.raises(NotImplementedError):
        hbm(8, 4).ap([[8, 2], [1, 8]], vector_offset=column(0, 1), dtype=nl.bfloat16)


def test_a_stride_beyond_int16_does_not_fit_an_engine(trn3) -> None:
    wide = empty(1, 40000, dtype=np.int8)
    wide.ap([[40000, 1], [32767, 2]]).read()
    wide.ap([[40000, 1], [-32768, 2]], offset=32768).read()
    for stride, offset in ((32768, 0), (-32769, 32769)):
        with refuses("int16"):
            wide.ap([[40000, 1], [stride, 2]], offset=offset)


def test_a_stride_that_takes_no_step_does_not_count(trn3) -> None:
    wide = empty(1, 40000, dtype=np.int8)
    assert wide.ap([[7, 1], [40000, 1], [1, 2]]).read().shape == (1, 1, 2)


def test_a_count_beyond_uint16_does_not_fit_an_engine(trn3) -> None:
    wide = empty(1, 70000, dtype=np.int8)
    wide.ap([[70000, 1], [1, 65535]]).read()
    with refuses("uint16"):
        wide.ap([[70000, 1], [1, 65536]])


def test_a_vector_offset_steps_by_the_base_tensors_rows(trn3) -> None:
    flat = numbered(6, 2, 4)
    rows = tile(flat, buffer=nl.shared_hbm).ap([[1, 3], [1, 3]], offset=5, vector_offset=column(4, 0, 2))
    indices, in_bounds = rows.indirect.rows()
    assert indices.tolist() == [4, 0, 2]
    assert in_bounds.all()
    for got, index in zip(rows.indirect.read_rows(), (4, 0, 2), strict=True):
        np.testing.assert_array_equal(got, flat.reshape(-1)[5 + index * 8 :][:3])


def test_a_reshaped_base_has_the_rows_that_it_shows(trn3) -> None:
    flat = numbered(3, 8)
    rows = tile(flat, buffer=nl.shared_hbm).reshape((6, 4)).vector_select(0, column(5, 2))
    np.testing.assert_array_equal(rows.indirect.read_rows(), flat.reshape(6, 4)[[5, 2]])


def test_a_vector_offset_is_for_a_dma_alone(trn3) -> None:
    with refuses("DMA alone"):
        hbm(4, 2).vector_select(0, column(0, 1)).read()


def test_rows_that_are_broadcast_are_not_written(trn3) -> None:
    rows = hbm(4, 1).vector_select(0, column(0, 1)).broadcast(1, 3)
    with refuses("hit an element twice"):
        rows.indirect.write_rows(np.zeros((2, 3), np.float32))


def test_a_base_of_one_row_has_no_stride_to_disagree_about(trn3) -> None:
    base = tile(numbered(4, 6), buffer=nl.shared_hbm)
    np.testing.assert_array_equal(base[2:3, 1:3].vector_select(0, column(0)).indirect.read_rows(), [[13, 14]])


def test_rows_out_of_bounds_are_told_and_left_alone(trn3) -> None:
    base = tile(numbered(4, 2), buffer=nl.shared_hbm)
    rows = base.ap([[2, 4], [1, 2]], vector_offset=column(3, 4, -1, 0))
    assert rows.indirect.rows()[1].tolist() == [True, False, False, True]
    rows.indirect.write_rows(np.full((4, 2), -9, np.float32))
    np.testing.assert_array_equal(base.read(), [[-9, -9], [2, 3], [4, 5], [-9, -9]])


def test_all_ones_are_out_of_bounds_whether_signed_or_not(trn3) -> None:
    base = hbm(4, 2)
    unsigned = base.vector_select(0, column(0xFFFFFFFF, dtype=np.uint32))
    signed = base.vector_select(0, column(-1))
    assert not unsigned.indirect.rows()[1].any()
    assert not signed.indirect.rows()[1].any()


def test_a_row_that_reaches_past_the_storage_is_out_of_bounds(trn3) -> None:
    rows = hbm(4, 2).ap([[2, 2], [1, 3]], vector_offset=column(2, 3))
    assert rows.indirect.rows()[1].tolist() == [True, False]


@pytest.mark.parametrize("source", [lambda: VirtualRegister(2), lambda: column(2)])
def test_a_scalar_offset_moves_the_whole_view(trn3, source) -> None:
    flat = numbered(4, 3, 5)
    base = tile(flat, buffer=nl.shared_hbm)
    moved = base.ap([[15, 2], [1, 5]], scalar_offset=source(), indirect_dim=1)
    np.testing.assert_array_equal(moved.indirect.read_rows(), flat[0:2, 2])
    np.testing.assert_array_equal(base.select(1, source()).read(), flat[:, 2])
    np.testing.assert_array_equal(base.select(2, source()).read(), flat[:, :, 2])


def test_a_scalar_offset_out_of_bounds_moves_nothing(trn3) -> None:
    base = tile(numbered(4, 3), buffer=nl.shared_hbm)
    moved = base.ap([[3, 2], [1, 3]], scalar_offset=column(3))
    assert moved.indirect.rows()[1].tolist() == [False, False]
    moved.indirect.write_rows(np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(base.read(), numbered(4, 3))
    with refuses("index 3 is not within 0..2"):
        moved.read()


def test_an_index_is_read_when_the_view_is_used(trn3) -> None:
    index = column(0)
    base = tile(numbered(4, 3), buffer=nl.shared_hbm)
    row = base.select(0, index)
    index.write(np.array([[2]], np.int32))
    np.testing.assert_array_equal(row.read(), numbered(4, 3)[2])


def test_a_dma_meets_runs_as_long_as_memory_allows(trn3) -> None:
    assert hbm(4, 3, 5).runs() == 4 * 3 * 5 * 4
    assert hbm(4, 3, 5)[:, 0:2].runs() == 2 * 5 * 4
    assert hbm(4, 3, 5)[:, :, ::2].runs() == 4
    assert hbm(4, 3, 5).permute((0, 2, 1))[:, :, 0:1].runs() == 5 * 4
    assert hbm(8, 3, 5).vector_select(0, column(0, 1)).runs() == 3 * 5 * 4
    assert empty(4, 3, 5).runs() == 3 * 5 * 4
    assert empty(4, 3, 5, dtype=np.int8)[:, 1].runs() == 5


def test_an_operand_tells_where_a_view_lies(trn3) -> None:
    operand = empty(128, 4, 6)[32:64, 1:3, ::2].operand()
    assert (operand.buffer, operand.shape, operand.dtype) == ("sbuf", (32, 2, 3), "float32")
    assert (operand.start_partition, operand.num_partitions) == (32, 32)
    assert (operand.free_bytes, operand.free_stride, operand.offset) == (96, 2, 32 * 24 + 6)
    assert hbm(4, 6).operand()[4:7] == (0, 0, 0)
    assert empty(128, 4, 6)[:, :, 0:1].operand().free_stride == 6
    assert empty(128, 4, 6)[:, 0, 0].operand().free_stride == 1


def test_a_tile_spans_bytes_of_its_partition(trn3) -> None:
    assert empty(8, 4, 6)[2:4, 1, 0:3].free_span == (24, 35)
