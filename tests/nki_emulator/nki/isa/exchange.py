"""What the two cores of a logical core do together: swap tiles, wait for each other."""

from __future__ import annotations

import numpy as np

from nki.isa import enums
from nki.isa.arguments import require_member
from nki_machine import cores
from nki_machine.errors import RuleError
from nki_machine.memory import MemoryRegion
from nki_machine.tensor import NkiTensor
from nki_machine.trace import Instruction, Transfer

# Per partition, by the bytes of an element, over the GpSimd Engine's own DMA.
GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: enums.dma_engine = enums.dma_engine.dma,
    name: str | None = None,
) -> None:
    """Sends src to the other core's dst, and receives the other core's src into dst; both in SBUF and alike."""
    opcode = "sendrecv"
    core = cores.current()
    require_member(opcode, "dma_engine", dma_engine, *enums.dma_engine)
    if core.num_programs != 2 or (send_to_rank, recv_from_rank) != (1 - core.program_id, 1 - core.program_id):
        raise RuleError(
            f"{opcode}: core {core.program_id} of {core.num_programs} sends to {send_to_rank} and receives from "
            f"{recv_from_rank}; both must be the other core of two."
        )
    _check_alike(opcode, src, dst, dma_engine)
    num_bytes = src.size * src.dtype.itemsize
    run = min(src.runs(), dst.runs())
    transfer = Transfer(num_bytes, 0, run, num_bytes // run, src.shape[0], num_skipped=0, dge="none")
    details = {"dma_engine": dma_engine.name}
    operands = ((dst.operand(),), (src.operand(),))
    core.emit(Instruction(core.program_id, opcode, "dma", *operands, core.loops, transfer, details))
    received = core.exchange(("sendrecv", pipe_id), src.read().copy())
    assert isinstance(received, np.ndarray)
    if received.shape != dst.shape or received.dtype != dst.dtype:
        raise RuleError(
            f"{opcode}: core {core.program_id} receives {received.shape} of {received.dtype.name} into dst "
            f"{dst.shape} of {dst.dtype.name}; both cores must swap alike tiles."
        )
    dst.write(received)


def _check_alike(opcode: str, src: NkiTensor, dst: NkiTensor, dma_engine: enums.dma_engine) -> None:
    for role, tile in (("src", src), ("dst", dst)):
        if tile.buffer is not MemoryRegion.sbuf:
            raise RuleError(f"{opcode}: {role} must be in SBUF, and is {tile!r}.")
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise RuleError(f"{opcode}: src and dst must have one shape and one dtype, and are {src!r} and {dst!r}.")
    limit = GPSIMD_DMA_BYTES[src.dtype.itemsize]
    per_partition = src.size // src.shape[0] * src.dtype.itemsize
    if dma_engine is enums.dma_engine.gpsimd_dma and per_partition > limit:
        raise RuleError(
            f"{opcode}: gpsimd_dma takes {limit} bytes per partition of {src.dtype.name}, not {per_partition}."
        )


def core_barrier(
    data: NkiTensor,
    cores: tuple[int, ...],
    engine: enums.engine = enums.engine.gpsimd,
    name: str | None = None,
) -> None:
    """Waits until the other core is here too; what both wrote to `data`, in shared HBM, may then be read by both."""
    core = _running_core()
    able = (enums.engine.gpsimd, enums.engine.tensor, enums.engine.vector, enums.engine.scalar, enums.engine.sync)
    where = require_member("core_barrier", "engine", engine, *able)
    if tuple(cores) != (0, 1):
        raise RuleError(f"core_barrier: cores must be (0, 1), and is {cores}.")
    if data.buffer is not MemoryRegion.shared_hbm:
        raise RuleError(f"core_barrier: data must be in shared HBM, and is {data!r}.")
    core.emit(Instruction(core.program_id, "core_barrier", where.name, (), (data.operand(),), core.loops))
    core.exchange(("core_barrier", data.storage.id))


def _running_core() -> cores.Core:
    return cores.current()
