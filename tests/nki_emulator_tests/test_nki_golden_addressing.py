"""Access patterns, views, gathers, scatters, transposes and loops against the documentation's own examples.

What is expected is written out by hand: the loops that deep-dives/nki-aps.rst and the docstrings of the 0.6.0 stubs
print as pseudo-code, and literals. It shares no line with the emulator, which is what it is for.
"""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tile_io import loaded, sbuf, stored


def numbered(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """0, 1, 2, ... in row-major order, so that a value says where it came from."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@nki.jit
def access(t, pattern, offset):
    view = loaded(t).ap(pattern=pattern, offset=offset)
    copy = sbuf(view.shape, view.dtype)
    nisa.tensor_copy(copy, view)
    return stored(copy)


def test_the_concrete_example_of_an_access_pattern() -> None:
    """nki-aps.rst, "A Concrete Example": t[0:16, 8:16] of a (16, 16) tensor."""
    t = numbered(16, 16)
    got = nki.simulate(access)(t, ((16, 16), (1, 8)), 8)
    for w in range(16):
        for z in range(8):
            assert got[w, z] == 8 + (w * 16) + (1 * z)


def test_an_access_pattern_is_four_nested_loops() -> None:
    """nki-aps.rst, "Semantics of the Access Pattern", with p_size 5, z, y, x = 2, 3, 4 and steps 30, 8, 2."""
    n = 64
    t = numbered(8, n)
    got = nki.simulate(access)(t, ((n, 5), (30, 2), (8, 3), (2, 4)), 3)
    for w in range(5):
        for z in range(2):
            for y in range(3):
                for x in range(4):
                    assert got[w, z, y, x] == 3 + (w * n) + (z * 30) + (y * 8) + (x * 2)


@nki.jit
def outer_pattern(t):
    inner = loaded(t).ap(pattern=[[256, 128], [2, 128]])
    outer = inner.ap(pattern=[[256, 128], [1, 64]])
    copy = sbuf((128, 64), t.dtype)
    nisa.tensor_copy(copy, outer)
    return stored(copy)


def test_an_outer_pattern_overrides_the_inner_one() -> None:
    """nki-aps.rst, "Composition and .ap on a view"."""
    got = nki.simulate(outer_pattern)(numbered(128, 256))
    assert [got[p, f] for p in (0, 1, 127) for f in (0, 1, 63)] == [0, 1, 63, 256, 257, 319, 32_512, 32_513, 32_575]


@nki.jit
def as_bf16(t):
    cast = loaded(t).ap(pattern=[[2 * t.shape[1], t.shape[0]], [1, 2 * t.shape[1]]], offset=0, dtype=nl.bfloat16)
    assert cast.shape == (t.shape[0], 2 * t.shape[1])
    copy = sbuf(cast.shape, nl.bfloat16)
    nisa.tensor_copy(copy, cast)
    return stored(copy)


def test_a_pattern_with_a_dtype_reinterprets_the_bits() -> None:
    """nki-aps.rst, "Reinterpret Cast with ap": bfloat16 is float32's upper half, and 0x3F80 is 1 and 0x4000 is 2."""
    got = nki.simulate(as_bf16)(np.array([[0x40003F80, 0x3F804000]], np.int32))
    assert got.astype(np.float32).tolist() == [[1, 2, 2, 1]]


@nki.jit
def from_a_runtime_row(a, row):
    result = nl.ndarray((4, 6), a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(
        dst=result[...],
        src=a.ap(pattern=[[8, 4], [1, 6]], offset=0, scalar_offset=loaded(row), indirect_dim=0),
    )
    return result


def test_a_scalar_offset_counts_in_what_lies_right_of_its_dimension() -> None:
    """nki-aps.rst, scalar_dynamic_dma with 4 * 4 rows of 8: the access starts at element 12 * 8."""
    got = nki.simulate(from_a_runtime_row)(numbered(16, 8), np.array([[12]], np.int32))
    for x in range(4):
        for y in range(6):
            assert got[x, y] == 0 + 12 * 8 + x * 8 + y * 1


@nki.jit
def a_runtime_batch(a, index):
    result = nl.ndarray((3, 5), a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(src=a.select(0, loaded(index)), dst=result[...])
    return result


def test_select_takes_a_runtime_index() -> None:
    """nki-aps.rst, scalar_dynamic_select."""
    got = nki.simulate(a_runtime_batch)(numbered(4, 3, 5), np.array([[3]], np.int32))
    assert got.tolist() == [[45, 46, 47, 48, 49], [50, 51, 52, 53, 54], [55, 56, 57, 58, 59]]


@nki.jit
def gather_every_second(a, first_stride):
    rows = sbuf((8, 1), nl.int32)
    nisa.iota(rows, [[1, 1]], 0, 2)
    result = sbuf((8, 4), a.dtype)
    nisa.dma_copy(
        src=a.ap([[first_stride, 8], [1, 4]], 0, vector_offset=rows, indirect_dim=0), dst=result, name="gather"
    )
    return stored(result)


@pytest.mark.parametrize("first_stride", [4, 7])
def test_a_vector_offset_reads_its_row_length_from_the_base_tensor(first_stride: int) -> None:
    """nki-aps.rst, indirect_vector_dynamic_dma: the first stride of the pattern is ignored."""
    got = nki.simulate(gather_every_second)(numbered(16, 4), first_stride)
    for w in range(8):
        for z in range(4):
            dynamic_idx = 2 * w
            assert got[w, z] == 0 + 1 * z + 4 * dynamic_idx


@nki.jit
def gather_planes(a, index):
    result = sbuf((2, 3, 2), a.dtype)
    nisa.dma_copy(dst=result, src=a.ap([[12, 2], [4, 3], [1, 2]], 1, vector_offset=loaded(index), indirect_dim=0))
    return stored(result)


def test_a_vector_offset_of_a_tensor_of_three_dimensions_steps_over_both_inner_ones() -> None:
    got = nki.simulate(gather_planes)(numbered(5, 3, 4), np.array([[4], [1]], np.int32))
    for w, row in enumerate((4, 1)):
        for y in range(3):
            for x in range(2):
                assert got[w, y, x] == 1 + row * 3 * 4 + y * 4 + x


@nki.jit
def gather_with_skips(a, index):
    result = sbuf((index.shape[0], a.shape[1]), a.dtype)
    nisa.memset(result, -1.0)
    nisa.dma_copy(
        src=a.ap([[a.shape[1], index.shape[0]], [1, a.shape[1]]], 0, vector_offset=loaded(index), indirect_dim=0),
        dst=result,
        oob_mode=nisa.oob_mode.skip,
    )
    return stored(result)


def test_a_gather_leaves_rows_that_are_out_of_bounds_alone() -> None:
    """test_nki_isa_dma_copy.py, Example 4: rows 0, 3, 6, ... of 128, of which 43 exist, over a tile of -1."""
    got = nki.simulate(gather_with_skips)(numbered(128, 2), np.arange(0, 192, 3, dtype=np.int32).reshape(64, 1))
    for row in range(64):
        assert got[row].tolist() == ([6 * row, 6 * row + 1] if row < 43 else [-1, -1])


@pytest.mark.parametrize("index", [np.array([[-1], [1]], np.int32), np.array([[0xFFFFFFFF], [1]], np.uint32)])
def test_minus_one_is_out_of_bounds_in_either_dtype(index: np.ndarray) -> None:
    assert nki.simulate(gather_with_skips)(numbered(4, 2), index).tolist() == [[-1, -1], [2, 3]]


@nki.jit
def scatter_with_skips(a, index, num_rows):
    background = sbuf((num_rows, a.shape[1]), a.dtype)
    nisa.memset(background, -1.0)
    result = stored(background)
    nisa.dma_copy(
        dst=result.ap([[a.shape[1], a.shape[0]], [1, a.shape[1]]], 0, vector_offset=loaded(index), indirect_dim=0),
        src=loaded(a),
        oob_mode=nisa.oob_mode.skip,
    )
    return result


def test_a_scatter_drops_rows_that_are_out_of_bounds() -> None:
    """test_nki_isa_dma_copy.py, Example 8: 64 rows to rows 0, 3, 6, ... of 128."""
    index = np.arange(0, 192, 3, dtype=np.int32).reshape(64, 1)
    got = nki.simulate(scatter_with_skips)(numbered(64, 2), index, 128)
    for row in range(128):
        assert got[row].tolist() == ([2 * (row // 3), 2 * (row // 3) + 1] if row % 3 == 0 else [-1, -1])


@nki.jit
def transpose(a, axes, shape):
    result = sbuf(shape, a.dtype)
    nisa.dma_transpose(dst=result, src=a, axes=axes)
    return stored(result)


def test_dma_transposes_two_three_and_four_dimensions() -> None:
    """The permutations of dma_transpose's docstring."""
    half = np.float16
    flat = nki.simulate(transpose)(numbered(16, 8, dtype=half), (1, 0), (8, 16))
    cube = nki.simulate(transpose)(numbered(16, 2, 8, dtype=half), (2, 1, 0), (8, 2, 16))
    four = nki.simulate(transpose)(numbered(16, 2, 3, 8, dtype=half), (3, 1, 2, 0), (8, 2, 3, 16))
    for i in range(16):
        for j in range(8):
            assert flat[j, i] == 8 * i + j
            for k in range(2):
                assert cube[j, k, i] == 16 * i + 8 * k + j
                for m in range(3):
                    assert four[j, k, m, i] == 48 * i + 24 * k + 8 * m + j


@nki.jit
def gather_transpose(src, index, num_rows):
    width = src.shape[1]
    result = sbuf((width, num_rows), src.dtype)
    nisa.memset(dst=result, value=0)
    view = src.ap(pattern=[[width, num_rows], [1, width]], vector_offset=loaded(index), indirect_dim=0)
    nisa.dma_transpose(dst=result, src=view, axes=(1, 0))
    return stored(result)


def test_an_indirect_transpose_turns_gathered_rows_into_columns() -> None:
    """dma_transpose's docstring, indices of one column."""
    order = [(7 * i) % 128 for i in range(128)]
    src = numbered(128, 4, dtype=np.int16)
    got = nki.simulate(gather_transpose)(src, np.array(order, np.uint32).reshape(128, 1), 128)
    for i, row in enumerate(order):
        for j in range(4):
            assert got[j, i] == 4 * row + j


def test_an_indirect_transpose_takes_its_indices_column_by_column() -> None:
    """dma_transpose's docstring, indices [128, 2]: flat_indices = indices.T.flatten()."""
    index = [[2 * p, 255 - p] for p in range(128)]
    got = nki.simulate(gather_transpose)(numbered(256, 4, dtype=np.int16), np.array(index, np.uint32), 256)
    flat_indices = [index[p][column] for column in range(2) for p in range(128)]
    for i, row in enumerate(flat_indices):
        for j in range(4):
            assert got[j, i] == 4 * row + j


@nki.jit
def gather_transpose_4d(src, index):
    _, d1, d2, d3 = src.shape
    num_rows = index.shape[0] * index.shape[1]
    result = sbuf((d3, d1, d2, num_rows), src.dtype)
    nisa.memset(dst=result, value=0)
    view = src.ap(
        pattern=[[d1 * d2 * d3, num_rows], [d2 * d3, d1], [d3, d2], [1, d3]],
        vector_offset=loaded(index),
        indirect_dim=0,
    )
    nisa.dma_transpose(dst=result, src=view, axes=(3, 1, 2, 0))
    return stored(result)


def test_an_indirect_transpose_of_four_dimensions() -> None:
    """dma_transpose's docstring, gather_transpose_4d_kernel."""
    order = [(5 * i) % 32 for i in range(16)]
    src = numbered(32, 3, 1, 8, dtype=np.int16)
    got = nki.simulate(gather_transpose_4d)(src, np.array(order, np.uint32).reshape(16, 1))
    for i, row in enumerate(order):
        for k in range(3):
            for j in range(8):
                assert got[j, k, 0, i] == 24 * row + 8 * k + j


@nki.jit
def view_shapes(a):
    t = nl.ndarray((64, 64, 64), dtype=nl.float32, buffer=nl.sbuf)
    assert t[0, 0, 10].shape == (1, 1)
    assert t[:, 0].shape == (64, 64)
    assert t[:, 0, 10].shape == (64, 1)
    assert t[0:64, 0, 0:64].shape == (64, 64)
    assert t[:, :, ::2].shape == (64, 64, 32)
    assert t[...].shape == (64, 64, 64)
    assert t[0, ..., :].shape == (1, 64, 64)
    assert t[0, ...][:, 0:32, :].shape == (1, 32, 64)
    flat = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    assert (flat.strides, flat.offset, flat.ndim, flat.size) == ((64, 1), 0, 2, 128 * 64)
    sliced = flat.slice(dim=1, start=8, end=24)
    assert (sliced.get_pattern(), sliced.offset) == ([[64, 128], [1, 16]], 8)
    assert nl.ndarray((128, 4, 16), dtype=nl.float32, buffer=nl.sbuf)[0:64].permute((0, 2, 1))[:, 0, :].shape == (64, 4)
    assert a[0, :, :].shape == (128, 32)
    shared = loaded(a.reshape((4 * 128, 32))[0:128, :])
    nisa.memset(dst=shared.reshape((128, 4, 8))[:, 2, :], value=1.0)
    return stored(shared)


def test_views_have_the_shapes_of_the_language_guide_and_share_their_storage() -> None:
    """nki-language-guide.rst, "Tensor Values", "Tensor Indexing"; one view reads what was written through another."""
    got = nki.simulate(view_shapes)(np.zeros((4, 128, 32), np.float32))
    for f in range(32):
        assert got[5, f] == (1 if 16 <= f < 24 else 0)


@nki.jit
def counted_loop(data, count):
    n = data.shape[1]
    upper = nisa.register_alloc()
    nisa.register_load(upper, loaded(count))
    zeros = sbuf((1, n), nl.float32)
    nisa.memset(zeros, 0.0)
    output = stored(zeros)
    temp = sbuf((1, 1), nl.float32)

    def body(i):
        nisa.dma_copy(dst=temp, src=data.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
        nisa.dma_copy(dst=output.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1), src=temp)

    nl.fori_loop(0, upper, body)
    return output


@pytest.mark.parametrize(("count", "expected"), [(0, [0, 0, 0, 0]), (3, [5, 6, 7, 0]), (4, [5, 6, 7, 8])])
def test_a_counted_loop_runs_as_often_as_its_register_says(count: int, expected: list[int]) -> None:
    """nl.fori_loop's docstring."""
    data = np.array([[5, 6, 7, 8]], np.float32)
    assert nki.simulate(counted_loop)(data, np.array([[count]], np.int32)).tolist() == [expected]


@nki.jit
def flag_driven_loop(data, count):
    val, count_sb = loaded(data), loaded(count)
    acc, one_sb = sbuf((1, 1), nl.float32), sbuf((1, 1), nl.int32)
    nisa.memset(acc, 0.0)
    nisa.memset(dst=one_sb, value=1)
    reg = nisa.register_alloc()
    nisa.register_load(reg, count_sb)

    def body(r):
        nisa.tensor_tensor(dst=acc, data1=acc, data2=val, op=nl.add)
        nisa.tensor_tensor(dst=count_sb, data1=count_sb, data2=one_sb, op=nl.subtract)
        nisa.register_load(r, count_sb)
        return r

    nl.while_loop(reg, body)
    return stored(acc)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 2.5), (4, 10)])
def test_a_while_loop_runs_until_its_register_is_zero(count: int, expected: float) -> None:
    """nl.while_loop's docstring."""
    got = nki.simulate(flag_driven_loop)(np.array([[2.5]], np.float32), np.array([[count]], np.int32))
    assert got.tolist() == [[expected]]


def test_bfloat16_goes_in_and_comes_out() -> None:
    data = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    got = nki.simulate(access)(data, ((2, 1), (1, 2)), 0)
    assert got.dtype == ml_dtypes.bfloat16
    assert got.astype(np.float32).tolist() == [[1.5, -2.0]]
