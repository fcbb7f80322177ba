"""What the DMA instructions share: their sides, which rows are in bounds, what a trace tells of a move."""

from __future__ import annotations

import numpy as np

from nki.isa import enums
from nki.isa.arguments import require_member
from nki_machine import cores
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor
from nki_machine.trace import Instruction, Transfer

HBM_TO_HBM_PARTITIONS = 128


def check_request(opcode: str, dst: object, src: object, priority: int | None, oob_mode: enums.oob_mode) -> None:
    """RuleError unless both sides are tensors in HBM or SBUF, and this NeuronCore has the priority and the mode."""
    require_member(opcode, "oob_mode", oob_mode, *enums.oob_mode)
    for role, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, NkiTensor):
            raise RuleError(f"{opcode}: {role} must be a tensor, and is {tensor!r}.")
        if tensor.buffer.kind == "psum":
            raise RuleError(f"{opcode}: {role} is in PSUM, which DMA does not reach; go through SBUF by tensor_copy.")
    if priority is not None and (cores.current().generation < 4 or priority not in range(4)):
        raise RuleError(f"{opcode}: priority {priority}; it is 0 to 3, on NeuronCore-v4 and newer.")


def rows_in_bounds(opcode: str, dynamic: NkiTensor, oob_mode: enums.oob_mode) -> np.ndarray:
    """Whether each row of a dynamic view is in bounds, [rows]. RuleError if one is not and oob_mode is error."""
    assert dynamic.indirect is not None
    indices, in_bounds = dynamic.indirect.rows()
    if oob_mode is enums.oob_mode.error and not in_bounds.all():
        row = int(np.argmin(in_bounds))
        raise RuleError(
            f"{opcode}: index {indices[row]} of row {row} is out of bounds of {dynamic!r}; clamp it, or pass "
            "oob_mode=nisa.oob_mode.skip."
        )
    return in_bounds


def is_gathered(tensor: NkiTensor) -> bool:
    """Whether it has an index for each row (a vector_offset)."""
    return tensor.index is not None and tensor.index.is_vector


def write_in_bounds(dst: NkiTensor, values: np.ndarray, in_bounds: np.ndarray, row_axis: int = 0) -> None:
    """Writes values to dst, element after element, but keeps what dst holds where a row of theirs is out of bounds."""
    if in_bounds.all():
        dst.write(values.reshape(dst.shape))
    elif in_bounds.any():
        shape = [1] * values.ndim
        shape[row_axis] = len(in_bounds)
        kept = np.broadcast_to(in_bounds.reshape(shape), values.shape).reshape(dst.shape)
        held = dst.read()
        dst.write(np.where(kept, values.reshape(dst.shape), held))


def record(
    opcode: str, dst: NkiTensor, src: NkiTensor, dge: str, in_bounds: np.ndarray | None, is_transpose: bool = False
) -> None:
    """Adds a DMA to the trace.

    Args:
        dge: "hwdge", "swdge" or "none". in_bounds: of the dynamic side's rows; None where both sides are static.
    """
    core = cores.current()
    num_skipped = 0 if in_bounds is None else len(in_bounds) - int(np.count_nonzero(in_bounds))
    num_moved = src.size if in_bounds is None else src.size // len(in_bounds) * (len(in_bounds) - num_skipped)
    src_run = src.runs() // src.dtype.itemsize
    run = min(src_run, src.shape[-1]) if is_transpose else min(src_run, dst.runs() // dst.dtype.itemsize)
    on_chip = next((side for side in (dst, src) if side.buffer.is_on_chip), None)
    hbm_bytes = sum(num_moved * side.dtype.itemsize for side in (src, dst) if not side.buffer.is_on_chip)
    transfer = Transfer(
        num_bytes=num_moved * src.dtype.itemsize,
        hbm_bytes=hbm_bytes,
        element_bytes=run * src.dtype.itemsize,
        num_elements=-(-num_moved // run),
        num_partitions=HBM_TO_HBM_PARTITIONS if on_chip is None else on_chip.shape[0],
        num_skipped=num_skipped,
        dge=dge,
        is_transpose=is_transpose,
    )
    reads = [src.operand()]
    for side in (dst, src):
        if side.index is not None and isinstance(side.index.source, NkiTensor):
            reads.append(side.index.source.operand())
    core.emit(Instruction(core.program_id, opcode, "dma", (dst.operand(),), tuple(reads), core.loops, transfer))
