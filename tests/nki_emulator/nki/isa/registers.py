"""Instructions that move scalars between memory and the sequencers' registers."""

from __future__ import annotations

from nki_machine import cores
from nki_machine.errors import RuleError
from nki_machine.registers import VirtualRegister
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import is_integer
from nki_machine.trace import Instruction, Operand


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register, holding x if given."""
    if x is not None and not isinstance(x, int):
        raise RuleError(f"register_alloc: x must be a compile-time integer or None, and is {x!r}.")
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: int | VirtualRegister) -> None:
    """dst = src."""
    _require_register("register_move", "dst", dst)
    if not isinstance(src, int | VirtualRegister):
        raise RuleError(f"register_move: src must be a register or a compile-time integer, and is {src!r}.")
    dst.write(src.read() if isinstance(src, VirtualRegister) else src)
    _emit("register_move")


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of src, from HBM or SBUF."""
    _require_register("register_load", "dst", dst)
    operand = _single("register_load", "src", src)
    dst.write(int(src.read().reshape(-1)[0]))
    _emit("register_load", reads=(operand,))


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """The one element of dst, in HBM or SBUF, = src."""
    _require_register("register_store", "src", src)
    operand = _single("register_store", "dst", dst)
    dst.write(src.read())
    _emit("register_store", writes=(operand,))


def _emit(opcode: str, writes: tuple[Operand, ...] = (), reads: tuple[Operand, ...] = ()) -> None:
    core = cores.current()
    core.emit(Instruction(core.program_id, opcode, "sync", writes, reads, core.loops))


def _require_register(opcode: str, role: str, register: object) -> None:
    if not isinstance(register, VirtualRegister):
        raise RuleError(f"{opcode}: {role} must be a register of register_alloc, and is {register!r}.")


def _single(opcode: str, role: str, tensor: object) -> Operand:
    if not isinstance(tensor, NkiTensor) or tensor.size != 1 or len(tensor.shape) > 2:
        raise RuleError(f"{opcode}: {role} must be a tensor of one element, (1,) or (1, 1), and is {tensor!r}.")
    if tensor.buffer.kind == "psum" or not is_integer(tensor):
        raise RuleError(f"{opcode}: {role} must hold an integer in HBM or SBUF, and is {tensor!r}.")
    return tensor.operand()
