"""`dma_copy`: a copy between HBM and SBUF, with rows chosen at run time on one of its sides."""

from __future__ import annotations

import numpy as np

from nki.isa import enums
from nki.isa.arguments import require_member
from nki.isa.transfers import check_request, is_gathered, record, rows_in_bounds, write_in_bounds
from nki_machine import cores
from nki_machine.dtypes import cast
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: enums.oob_mode = enums.oob_mode.error,
    dge_mode: enums.dge_mode = enums.dge_mode.unknown,
    engine: enums.engine = enums.engine.unknown,
    name: str | None = None,
) -> None:
    """dst = src, element after element in row-major order of each view; between unequal dtypes through float32.

    A row whose index is out of bounds is an error, or with oob_mode.skip moves no byte and leaves dst as it was.
    """
    check_request("dma_copy", dst, src, priority, oob_mode)
    if dst.size != src.size:
        raise RuleError(f"dma_copy: src {src.shape} and dst {dst.shape} must have the same number of elements.")
    dge = _descriptors(dst, src, dge_mode, engine)
    in_bounds = _in_bounds(dst, src, oob_mode)
    record("dma_copy", dst, src, dge, in_bounds)
    if dst.index is not None:
        values = _through_float32(src.read(), dst)
        assert dst.indirect is not None
        dst.indirect.write_rows(cast(values.reshape(dst.shape), dst.dtype))
    elif src.indirect is not None:
        assert in_bounds is not None
        write_in_bounds(dst, _through_float32(src.indirect.read_rows(), dst), in_bounds)
    else:
        dst.write(_through_float32(src.read(), dst).reshape(dst.shape))


def _through_float32(values: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """Bits where the dtypes agree; a large integer loses its low bits where they do not."""
    return cast(values if values.dtype == dst.dtype else values.astype(np.float32), dst.dtype)


def _in_bounds(dst: NkiTensor, src: NkiTensor, oob_mode: enums.oob_mode) -> np.ndarray | None:
    """Of the dynamic side's rows; None where both sides are static."""
    if dst.index is not None and src.index is not None:
        raise RuleError("dma_copy: src and dst both have an offset known only at run time, and one of them may.")
    dynamic = dst if dst.index is not None else src
    if dynamic.index is None:
        return None
    if is_gathered(dynamic):
        _check_index_per_row(dynamic)
    in_bounds = rows_in_bounds("dma_copy", dynamic, oob_mode)
    if dynamic is dst and is_gathered(dst):
        _forbid_colliding_rows(dst, in_bounds)
    return in_bounds


def _check_index_per_row(dynamic: NkiTensor) -> None:
    assert dynamic.index is not None
    indices = dynamic.index.source
    assert isinstance(indices, NkiTensor)
    if indices.shape != (dynamic.shape[0], 1):
        raise RuleError(
            f"dma_copy: vector_offset must have one index for each of the {dynamic.shape[0]} rows, and is "
            f"{indices.shape}."
        )


def _forbid_colliding_rows(dst: NkiTensor, in_bounds: np.ndarray) -> None:
    """No document orders the writes of one DMA, so two rows for one place would be a race (our reading)."""
    assert dst.indirect is not None
    written = dst.indirect.rows()[0][in_bounds]
    if len(np.unique(written)) != len(written):
        raise RuleError(f"dma_copy: two rows of a scatter go to one row of {dst!r}, and their order is undefined.")


def _descriptors(dst: NkiTensor, src: NkiTensor, mode: enums.dge_mode, engine: enums.engine) -> str:
    """Who generates the descriptors. RuleError where the requested mode cannot."""
    modes = enums.dge_mode
    require_member("dma_copy", "dge_mode", mode, *modes)
    _check_trigger(mode, engine)
    is_dynamic = dst.index is not None or src.index is not None
    if is_gathered(dst) or is_gathered(src):
        return _of_gather(mode)
    if mode is modes.none:
        if is_dynamic or cores.current().loops:
            raise RuleError(
                "dma_copy: dge_mode.none has its descriptors before the run, so it takes neither an offset known only "
                "at run time nor a place in a runtime loop."
            )
        return "none"
    casts = dst.dtype != src.dtype
    if mode is modes.hwdge and casts:
        raise RuleError(
            f"dma_copy: hwdge moves raw bytes, so src and dst must have one dtype, and are {src.dtype.name} and "
            f"{dst.dtype.name}; use dge_mode.swdge, or reinterpret with view."
        )
    # What the compiler makes of unknown is its own affair: we take hardware where hardware can.
    return "swdge" if mode is modes.swdge or casts else "hwdge"


def _of_gather(mode: enums.dge_mode) -> str:
    if mode not in (enums.dge_mode.unknown, enums.dge_mode.swdge):
        raise RuleError(f"dma_copy: a vector_offset is resolved by swdge alone, and dge_mode is {mode}.")
    return "swdge"


def _check_trigger(mode: enums.dge_mode, engine: enums.engine) -> None:
    engines = enums.engine
    require_member("dma_copy", "engine", engine, engines.unknown, engines.sync, engines.scalar)
    if engine is not engines.unknown and mode is not enums.dge_mode.hwdge:
        raise RuleError(f"dma_copy: engine={engine} is for dge_mode.hwdge, and dge_mode is {mode}.")
