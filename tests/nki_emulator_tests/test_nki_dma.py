"""`dma_copy` and `dma_transpose`: static and chosen rows, what is skipped, what the trace tells, what is refused."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from on_core import empty, hbm, psum, refuses, tile

BF16 = ml_dtypes.bfloat16
SKIP = nisa.oob_mode.skip


def table(num_rows: int, width: int, dtype: object = np.float32):
    """In HBM; row r holds 100 r, 100 r + 1, ..."""
    values = 100 * np.arange(num_rows)[:, None] + np.arange(width)
    return tile(values.astype(dtype), dtype, nl.shared_hbm)


def column(*indices: int, dtype: object = np.int32):
    return tile(np.array(indices).astype(dtype).reshape(-1, 1), dtype)


def rows_of(source, indices, num_rows: int | None = None):
    """`source.ap` over whole rows."""
    width = source.shape[1]
    return source.ap([[width, num_rows or indices.shape[0]], [1, width]], vector_offset=indices)


def gathered(indices, oob_mode=nisa.oob_mode.error) -> list:
    dst = tile(np.full((indices.shape[0], 3), -1.0))
    nisa.dma_copy(dst, rows_of(table(5, 3), indices), oob_mode=oob_mode)
    return dst.read().tolist()


def test_a_copy_follows_each_views_own_order(trn2) -> None:
    dst = empty(2, 6)
    nisa.dma_copy(dst, table(3, 4))
    assert dst.read().reshape(-1).tolist() == [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]


def test_a_copy_casts_through_float32(trn2) -> None:
    dst = empty(1, 3, dtype=np.uint32)
    nisa.dma_copy(dst, tile([[-1, 5, 2**24 + 1]], np.int32))
    assert dst.read().tolist() == [[0, 5, 2**24]]


def test_a_copy_between_equal_dtypes_moves_bits(trn2) -> None:
    dst = empty(1, 2, dtype=np.int32)
    nisa.dma_copy(dst, tile([[-1, 2**24 + 1]], np.int32))
    assert dst.read().tolist() == [[-1, 2**24 + 1]]


def test_a_gather_reads_the_rows_that_it_is_told(trn2) -> None:
    assert gathered(column(4, 0, 4)) == [[400, 401, 402], [0, 1, 2], [400, 401, 402]]


@pytest.mark.parametrize(
    "indices", [lambda: column(4, -1, 5), lambda: column(4, 0xFFFFFFFF, 5, dtype=np.uint32)], ids=["int32", "uint32"]
)
def test_a_row_out_of_bounds_is_an_error_or_left_alone(trn2, indices) -> None:
    with refuses("of row 1 is out of bounds"):
        gathered(indices())
    assert gathered(indices(), SKIP) == [[400, 401, 402], [-1, -1, -1], [-1, -1, -1]]


def test_a_skipped_row_of_a_destination_of_another_shape_is_left_alone(trn2) -> None:
    dst = tile(np.full((1, 9), -1.0))
    nisa.dma_copy(dst, rows_of(table(5, 3), column(4, -1, 1)), oob_mode=SKIP)
    assert dst.read().tolist() == [[400, 401, 402, -1, -1, -1, 100, 101, 102]]


def test_a_scatter_writes_the_rows_that_it_is_told_and_no_other(trn2) -> None:
    dst = tile(np.zeros((5, 2)), buffer=nl.shared_hbm)
    nisa.dma_copy(rows_of(dst, column(3, -1, 0)), tile([[1, 2], [3, 4], [5, 6]]), oob_mode=SKIP)
    assert dst.read().tolist() == [[5, 6], [0, 0], [0, 0], [1, 2], [0, 0]]


def test_a_scatter_rounds_to_the_destinations_dtype(trn2) -> None:
    dst = tile(np.zeros((3, 1)), BF16, nl.shared_hbm)
    nisa.dma_copy(rows_of(dst, column(2)), tile([[1 + 2**-9]]))
    assert dst.read().astype(np.float32).tolist() == [[0], [0], [1]]


@pytest.mark.parametrize("as_register", [False, True])
def test_a_scalar_offset_moves_the_whole_view(trn2, as_register: bool) -> None:
    def at(index: int):
        offset = nisa.register_alloc(index) if as_register else column(index)
        return table(5, 3).ap([[3, 2], [1, 3]], scalar_offset=offset)

    dst = tile(np.full((2, 3), -1.0))
    nisa.dma_copy(dst, at(2))
    assert dst.read().tolist() == [[200, 201, 202], [300, 301, 302]]
    # Row 4 is the last, and the view needs two.
    with refuses("out of bounds"):
        nisa.dma_copy(dst, at(4))
    nisa.dma_copy(dst, at(4), oob_mode=SKIP)
    assert dst.read().tolist() == [[200, 201, 202], [300, 301, 302]]


def test_the_trace_counts_the_bytes_that_moved(trn2) -> None:
    source = table(5, 64, BF16)
    nisa.dma_copy(empty(3, 64, dtype=BF16), rows_of(source, column(4, -1, 0)), oob_mode=SKIP)
    transfer = trn2.instructions[-1].transfer
    assert (transfer.num_bytes, transfer.hbm_bytes, transfer.element_bytes, transfer.num_elements) == (256, 256, 128, 2)
    assert (transfer.num_partitions, transfer.num_skipped, transfer.dge) == (3, 1, "swdge")


def test_rows_that_are_all_skipped_move_nothing(trn2) -> None:
    nisa.dma_copy(empty(2, 3), rows_of(table(5, 3), column(-1, -1)), oob_mode=SKIP)
    transfer = trn2.instructions[-1].transfer
    assert (transfer.num_bytes, transfer.num_elements, transfer.num_skipped) == (0, 0, 2)


def test_the_shorter_run_of_both_sides_is_the_element(trn2) -> None:
    nisa.dma_copy(empty(4, 8), table(4, 16)[:, 0:8])
    nisa.dma_copy(hbm(4, 16)[:, 4:8], empty(4, 4))
    nisa.dma_copy(empty(4, 8)[:, 0:8:2], table(4, 4))
    nisa.dma_copy(hbm(4, 16), table(4, 16))
    transfers = [instruction.transfer for instruction in trn2.instructions]
    assert [(transfer.element_bytes, transfer.num_elements) for transfer in transfers] == [
        (32, 4),
        (16, 4),
        (4, 16),
        (256, 1),
    ]
    # From HBM to HBM both ways count.
    assert [transfer.hbm_bytes for transfer in transfers] == [128, 64, 64, 512]


def test_an_index_tile_is_read(trn2) -> None:
    indices = column(1, 2)
    nisa.dma_copy(empty(2, 3), rows_of(table(5, 3), indices))
    assert indices.storage.id in [operand.storage for operand in trn2.instructions[-1].reads]


@pytest.mark.parametrize(
    ("dtype", "mode", "dge"),
    [
        (np.float32, nisa.dge_mode.unknown, "hwdge"),
        (BF16, nisa.dge_mode.unknown, "swdge"),
        (np.float32, nisa.dge_mode.none, "none"),
        (np.float32, nisa.dge_mode.swdge, "swdge"),
        (np.float32, nisa.dge_mode.hwdge, "hwdge"),
    ],
)
def test_the_trace_tells_who_made_the_descriptors(trn2, dtype, mode, dge: str) -> None:
    nisa.dma_copy(empty(2, 3, dtype=dtype), table(2, 3), dge_mode=mode)
    assert trn2.instructions[-1].transfer.dge == dge


def in_a_loop(instruction) -> None:
    nl.fori_loop(0, nisa.register_alloc(1), lambda _: instruction())


COPY_REFUSALS = [
    ("src is in PSUM", lambda: nisa.dma_copy(hbm(2, 2), psum(2, 2))),
    ("dst is in PSUM", lambda: nisa.dma_copy(psum(2, 2), hbm(2, 2))),
    ("src must be a tensor", lambda: nisa.dma_copy(hbm(2, 2), 1.0)),
    ("same number of elements", lambda: nisa.dma_copy(empty(2, 2), hbm(2, 3))),
    ("priority 1", lambda: nisa.dma_copy(empty(2, 2), hbm(2, 2), priority=1)),
    ("oob_mode must be one of", lambda: nisa.dma_copy(empty(2, 2), hbm(2, 2), oob_mode=1)),
    ("dge_mode must be one of", lambda: nisa.dma_copy(empty(2, 2), hbm(2, 2), dge_mode=2)),
    ("engine must be one of", lambda: nisa.dma_copy(empty(2, 2), hbm(2, 2), engine=nisa.engine.vector)),
    ("is for dge_mode.hwdge", lambda: nisa.dma_copy(empty(2, 2), hbm(2, 2), engine=nisa.engine.sync)),
    (
        "hwdge moves raw bytes",
        lambda: nisa.dma_copy(empty(2, 2), hbm(2, 2, dtype=BF16), dge_mode=nisa.dge_mode.hwdge),
    ),
    (
        "dge_mode.none has its descriptors before the run",
        lambda: in_a_loop(lambda: nisa.dma_copy(empty(2, 2), hbm(2, 2), dge_mode=nisa.dge_mode.none)),
    ),
    (
        "dge_mode.none has its descriptors before the run",
        lambda: nisa.dma_copy(
            empty(2, 3), table(5, 3).ap([[3, 2], [1, 3]], scalar_offset=column(1)), dge_mode=nisa.dge_mode.none
        ),
    ),
    (
        "resolved by swdge alone",
        lambda: nisa.dma_copy(empty(2, 3), rows_of(table(5, 3), column(1, 2)), dge_mode=nisa.dge_mode.hwdge),
    ),
    (
        "one index for each of the 2 rows",
        lambda: nisa.dma_copy(empty(2, 3), rows_of(table(5, 3), column(1, 2, 3), num_rows=2)),
    ),
    (
        "both have an offset",
        lambda: nisa.dma_copy(rows_of(table(5, 3), column(1, 2)), rows_of(table(5, 3), column(1, 2))),
    ),
    (
        "two rows of a scatter go to one row",
        lambda: nisa.dma_copy(rows_of(table(5, 3), column(1, 1)), tile(np.zeros((2, 3)))),
    ),
]


@pytest.mark.parametrize(
    ("rule", "instruction"), COPY_REFUSALS, ids=[f"{at}: {rule}" for at, (rule, _) in enumerate(COPY_REFUSALS)]
)
def test_dma_copy_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()


def test_trn3_has_four_priorities(trn3) -> None:
    nisa.dma_copy(empty(2, 2), hbm(2, 2), priority=3)
    with refuses("priority 4"):
        nisa.dma_copy(empty(2, 2), hbm(2, 2), priority=4)


def test_a_transpose_reverses_the_outer_axes(trn2) -> None:
    values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    for shape, axes in (((24, 5), (1, 0)), ((6, 4, 5), (2, 1, 0)), ((2, 3, 4, 5), (3, 1, 2, 0))):
        source = values.reshape(shape)
        dst = empty(*(shape[axis] for axis in axes))
        nisa.dma_transpose(dst, tile(source, buffer=nl.shared_hbm), axes=axes)
        assert dst.read().tolist() == source.transpose(axes).tolist()
    assert trn2.instructions[-1].transfer.is_transpose


@pytest.mark.parametrize("shape", [(16, 128), (4, 4, 32), (1, 2, 16, 64)])
def test_hwdge_transposes_rows_in_sixteens(trn2, shape) -> None:
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    dst = empty(*(shape[axis] for axis in axes), dtype=BF16)
    nisa.dma_transpose(dst, tile(np.zeros(shape), BF16, nl.shared_hbm), dge_mode=nisa.dge_mode.hwdge)
    assert trn2.instructions[-1].transfer.dge == "hwdge"


def transposing(indices, num_rows: int, dst=None, shape=(40, 1, 2, 8), dtype=np.int16, **options):
    """A gathering transpose of [num_rows, ...] chosen from a tensor of `shape`; returns dst's values."""
    source = tile(np.arange(np.prod(shape)).reshape(shape).astype(dtype), dtype, nl.shared_hbm)
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    pattern = [[strides[0], num_rows], *([stride, size] for stride, size in zip(strides[1:], shape[1:], strict=True))]
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    chosen = (num_rows, *shape[1:])
    if dst is None:
        dst = tile(np.full([chosen[axis] for axis in axes], -1), dtype)
    nisa.dma_transpose(dst, source.ap(pattern, vector_offset=indices), **options)
    return dst.read()


def numbered_rows(*shape: int, dtype: object = np.uint32):
    """Index tile [P, N] with 0, 1, ... column by column."""
    return tile(np.arange(np.prod(shape)).reshape(shape[::-1]).T, dtype)


def test_a_gathering_transpose_goes_column_by_column_through_its_indices(trn2) -> None:
    indices = tile((np.arange(256).reshape(2, 128).T * 7) % 40, np.uint32)
    got = transposing(indices, 240)
    flat = indices.read().T.flatten()[:240]
    source = np.arange(40 * 16).reshape(40, 1, 2, 8)
    assert got.tolist() == source[flat].transpose(3, 1, 2, 0).tolist()
    transfer = trn2.instructions[-1].transfer
    assert (transfer.dge, transfer.is_transpose, transfer.element_bytes) == ("swdge", True, 16)


def test_a_skipped_row_leaves_its_column(trn2) -> None:
    indices = np.arange(32)
    indices[3::2] = 99
    indices[1] = 39
    indices[3] = 38
    # 18 are in bounds; the two that are taken out again make 16.
    indices[[0, 2]] = 2**32 - 1
    got = transposing(tile(indices[:, None], np.uint32), 32, shape=(40, 8), oob_mode=SKIP)
    source = np.arange(40 * 8).reshape(40, 8)
    for j, index in enumerate(indices):
        assert got[:, j].tolist() == (source[index].tolist() if index < 40 else [-1] * 8)


def test_a_gathering_transpose_skips_in_sixteens(trn2) -> None:
    indices = np.arange(32)
    indices[5] = 99
    with refuses("31 indices are in bounds"):
        transposing(tile(indices[:, None], np.uint32), 32, shape=(40, 8), oob_mode=SKIP)
    with refuses("of row 5 is out of bounds"):
        transposing(tile(indices[:, None], np.uint32), 32, shape=(40, 8))


TRANSPOSE_REFUSALS = [
    ("axes .0, 1. of src", lambda: nisa.dma_transpose(empty(4, 2), hbm(2, 4), axes=(0, 1))),
    ("axes None of src", lambda: nisa.dma_transpose(empty(4, 2), hbm(8))),
    ("dst must be a static tile in SBUF", lambda: nisa.dma_transpose(hbm(4, 2), hbm(2, 4))),
    ("it casts nothing", lambda: nisa.dma_transpose(empty(4, 2), hbm(2, 4, dtype=BF16))),
    ("transposed is .4, 2., and dst is .2, 4.", lambda: nisa.dma_transpose(empty(2, 4), hbm(2, 4))),
    ("transposed is .4, 1, 2., and dst is", lambda: nisa.dma_transpose(empty(4, 2), hbm(2, 1, 4))),
    ("2 or 4 bytes", lambda: nisa.dma_transpose(empty(4, 2, dtype=np.int8), hbm(2, 4, dtype=np.int8))),
    ("dge_mode must be one of", lambda: nisa.dma_transpose(empty(4, 2), hbm(2, 4), dge_mode=nisa.dge_mode.none)),
    ("oob_mode.skip is for a src", lambda: nisa.dma_transpose(empty(4, 2), hbm(2, 4), oob_mode=SKIP)),
    ("hwdge cannot transpose", lambda: _by_hardware((32, 64), BF16)),
    ("hwdge cannot transpose", lambda: _by_hardware((16, 64), np.float32)),
    ("hwdge cannot transpose", lambda: _by_hardware((3, 16, 64), BF16)),
    ("hwdge cannot transpose", lambda: _by_hardware((4, 3, 64), BF16)),
    ("elements of 2 bytes", lambda: transposing(numbered_rows(16, 1), 16, shape=(40, 8), dtype=np.int32)),
    ("rows in multiples of 16", lambda: transposing(numbered_rows(32, 1), 24)),
    ("axis 1 or axis 2 must be 1", lambda: transposing(numbered_rows(16, 1), 16, shape=(40, 2, 2, 8))),
    ("must be uint32", lambda: transposing(numbered_rows(16, 1, dtype=np.int32), 16)),
    ("16 to 128 rows", lambda: transposing(numbered_rows(24, 1), 16)),
    ("128 with more than one column", lambda: transposing(numbered_rows(16, 2), 16)),
    ("has 32 rows for 16 indices", lambda: transposing(numbered_rows(16, 1), 32)),
    (
        "dge_mode must be one of",
        lambda: transposing(numbered_rows(16, 1), 16, dge_mode=nisa.dge_mode.hwdge),
    ),
]


def _by_hardware(shape: tuple[int, ...], dtype: object) -> None:
    axes = {2: (1, 0), 3: (2, 1, 0)}[len(shape)]
    dst = empty(*(shape[axis] for axis in axes), dtype=dtype)
    nisa.dma_transpose(dst, hbm(*shape, dtype=dtype), dge_mode=nisa.dge_mode.hwdge)


@pytest.mark.parametrize(
    ("rule", "instruction"),
    TRANSPOSE_REFUSALS,
    ids=[f"{at}: {rule}" for at, (rule, _) in enumerate(TRANSPOSE_REFUSALS)],
)
def test_dma_transpose_refuses(trn2, rule, instruction) -> None:
    with refuses(rule):
        instruction()
