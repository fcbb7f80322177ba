"""`dma_transpose`: a move into SBUF that reverses the outermost and the innermost axis, with rows chosen or not."""

from __future__ import annotations

from nki.isa import enums
from nki.isa.arguments import require_member
from nki.isa.transfers import check_request, is_gathered, record, rows_in_bounds, write_in_bounds
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor

AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
ROWS = 16
MAX_LAST = 128
_OPCODE = "dma_transpose"


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: enums.dge_mode = enums.dge_mode.unknown,
    oob_mode: enums.oob_mode = enums.oob_mode.error,
    name: str | None = None,
) -> None:
    """dst = src transposed by (1, 0), (2, 1, 0) or (3, 1, 2, 0).

    With a vector_offset of indices [P, N], row j of src is row `indices.T.flatten()[j]` of the tensor that `ap` was
    called on. A skipped row leaves its column of dst as it was.
    """
    check_request(_OPCODE, dst, src, priority, oob_mode)
    permutation = _checked_axes(src, axes)
    _check_destination(dst, src, permutation)
    dge = _check_gather(src, dge_mode) if is_gathered(src) else _check_direct(src, dge_mode, oob_mode)
    in_bounds = None if src.index is None else rows_in_bounds(_OPCODE, src, oob_mode)
    if in_bounds is not None and is_gathered(src) and in_bounds.sum() % ROWS:
        raise RuleError(
            f"{_OPCODE}: {in_bounds.sum()} indices are in bounds, and their number must be a multiple of {ROWS}."
        )
    record(_OPCODE, dst, src, dge, in_bounds, is_transpose=True)
    if src.indirect is None:
        dst.write(src.read().transpose(permutation))
        return
    assert in_bounds is not None
    # The rows are dst's last axis, whatever the rank.
    write_in_bounds(dst, src.indirect.read_rows().transpose(permutation), in_bounds, row_axis=len(permutation) - 1)


def _checked_axes(src: NkiTensor, axes: tuple[int, ...] | None) -> tuple[int, ...]:
    permutation = AXES.get(len(src.shape))
    if permutation is None or (axes is not None and tuple(axes) != permutation):
        raise RuleError(f"{_OPCODE}: axes {axes} of src {src.shape}; they are (1, 0), (2, 1, 0) or (3, 1, 2, 0).")
    return permutation


def _check_destination(dst: NkiTensor, src: NkiTensor, permutation: tuple[int, ...]) -> None:
    if dst.buffer.kind != "sbuf" or dst.index is not None:
        raise RuleError(f"{_OPCODE}: dst must be a static tile in SBUF, and is {dst!r}.")
    if dst.dtype != src.dtype:
        raise RuleError(f"{_OPCODE}: src is {src.dtype.name} and dst {dst.dtype.name}; it casts nothing.")
    transposed = tuple(src.shape[axis] for axis in permutation)
    if dst.shape != transposed:
        raise RuleError(f"{_OPCODE}: src {src.shape} transposed is {transposed}, and dst is {dst.shape}.")
    if src.dtype.itemsize not in (2, 4):
        raise RuleError(f"{_OPCODE}: elements of 2 or 4 bytes are transposed, and {src.dtype.name} has other.")


def _check_direct(src: NkiTensor, mode: enums.dge_mode, oob_mode: enums.oob_mode) -> str:
    require_member(_OPCODE, "dge_mode", mode, enums.dge_mode.unknown, enums.dge_mode.hwdge)
    if oob_mode is enums.oob_mode.skip and src.index is None:
        raise RuleError(f"{_OPCODE}: oob_mode.skip is for a src that is chosen at run time.")
    if mode is enums.dge_mode.unknown:
        return "none"
    rows, columns, last = src.shape[0], src.shape[-2], src.shape[-1]
    allowed_rows = (16,) if len(src.shape) == 2 else (1, 2, 4, 8, 16)
    if rows not in allowed_rows or rows * columns % ROWS or last > MAX_LAST or src.dtype.itemsize != 2:
        raise RuleError(
            f"{_OPCODE}: hwdge cannot transpose {src.shape} of {src.dtype.name}: 2-d takes 16 rows, 3-d and 4-d 1, 2, "
            f"4, 8 or 16 with rows * shape[-2] a multiple of 16; the last axis is at most {MAX_LAST}, elements 2 bytes."
        )
    return "hwdge"


def _check_gather(src: NkiTensor, mode: enums.dge_mode) -> str:
    require_member(_OPCODE, "dge_mode", mode, enums.dge_mode.unknown, enums.dge_mode.swdge)
    if src.dtype.itemsize != 2 or src.shape[-1] > MAX_LAST or src.shape[0] % ROWS:
        raise RuleError(
            f"{_OPCODE}: a gathering transpose takes elements of 2 bytes, a last axis of at most {MAX_LAST} and rows "
            f"in multiples of {ROWS}, and src is {src.shape} of {src.dtype.name}."
        )
    if len(src.shape) == 4 and 1 not in src.shape[1:3]:
        raise RuleError(f"{_OPCODE}: of a gathered 4-d src, axis 1 or axis 2 must be 1, and it is {src.shape}.")
    _check_indices(src)
    return "swdge"


def _check_indices(src: NkiTensor) -> None:
    assert src.index is not None
    indices = src.index.source
    assert isinstance(indices, NkiTensor)
    num_rows, num_columns = indices.shape
    if indices.dtype.name != "uint32":
        raise RuleError(f"{_OPCODE}: the indices must be uint32, and are {indices.dtype.name}.")
    if num_rows % ROWS or (num_columns > 1 and num_rows != 128):
        raise RuleError(
            f"{_OPCODE}: indices {indices.shape} must have 16 to 128 rows in multiples of 16, and 128 with more than "
            "one column."
        )
