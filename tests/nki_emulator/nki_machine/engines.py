"""The engines: which memories each one reaches, which tiles fit together, and how an instruction enters the trace.

Knows no instruction's arithmetic. Sources: the architecture guides of Trainium/Inferentia2, Trainium2 and Trainium3
("Accessing SBUF/PSUM tensors using compute engines"). Where an access may start is `Core.emit`'s to check.
"""

from __future__ import annotations

from collections.abc import Mapping

from nki_machine import cores
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor
from nki_machine.trace import Instruction, Operand

_ON_CHIP = frozenset({"sbuf", "psum"})
_READS = {"tensor": frozenset({"sbuf"}), "vector": _ON_CHIP, "scalar": _ON_CHIP, "gpsimd": frozenset({"sbuf"})}
_WRITES = {"tensor": frozenset({"psum"}), "vector": _ON_CHIP, "scalar": _ON_CHIP, "gpsimd": frozenset({"sbuf"})}
_TITLES = {
    "tensor": "the Tensor Engine, which reads SBUF and writes PSUM",
    "vector": "the Vector Engine, which reaches SBUF and PSUM",
    "scalar": "the Scalar Engine, which reaches SBUF and PSUM",
    "gpsimd": "the GpSimd Engine, which reaches SBUF alone",
}

Tiles = Mapping[str, NkiTensor]


def issue(opcode: str, engine: str, writes: Tiles, reads: Tiles, lanewise: bool = True, **details: object) -> None:
    """Checks where an instruction's tiles lie and adds it to the trace; the caller then computes and writes.

    Args:
        opcode: its name in `nki.isa`. engine: "tensor", "vector", "scalar" or "gpsimd".
        writes, reads: its tiles by the name of their parameter.
        lanewise: whether partition p of every tile meets partition p of the others.
        details: for `Instruction.details`.
    Raises:
        RuleError: a tile is out of the engine's reach, or does not span the partitions of the others.
    """
    core = cores.current()
    written = tuple([_operand(opcode, engine, role, tile, _WRITES[engine]) for role, tile in writes.items()])
    read = tuple([_operand(opcode, engine, role, tile, _READS[engine]) for role, tile in reads.items()])
    if lanewise:
        _require_same_partitions(opcode, writes, reads, written + read)
    core.emit(Instruction(core.program_id, opcode, engine, written, read, core.loops, details=details))


def _operand(opcode: str, engine: str, role: str, tile: object, reachable: frozenset[str]) -> Operand:
    if not isinstance(tile, NkiTensor):
        raise RuleError(f"{opcode}: {role} must be a tensor, and is {tile!r}.")
    operand = tile.operand()
    if operand.buffer not in reachable:
        raise RuleError(f"{opcode}: {role} is in {operand.buffer} and runs on {_TITLES[engine]}.")
    return operand


def _require_same_partitions(opcode: str, writes: Tiles, reads: Tiles, operands: tuple[Operand, ...]) -> None:
    count = operands[0].num_partitions
    for operand in operands:
        if operand.num_partitions != count:
            shapes = ", ".join(f"{role} {tile.shape}" for role, tile in {**writes, **reads}.items())
            raise RuleError(f"{opcode}: every tile must span the same number of partitions: {shapes}.")


def require_same_free_size(opcode: str, **tiles: NkiTensor) -> None:
    """RuleError unless every tile has the same number of elements in a partition; their shapes may differ."""
    sizes = {tile.size // tile.shape[0] for tile in tiles.values()}
    if len(sizes) > 1:
        shapes = ", ".join(f"{role} {tile.shape}" for role, tile in tiles.items())
        raise RuleError(f"{opcode}: every tile must have the same number of elements in a partition: {shapes}.")


def forbid_both_in_psum(opcode: str, **inputs: NkiTensor) -> None:
    """RuleError if all of an instruction's two input tiles lie in PSUM, whose read port they would share."""
    if all(tile.buffer.kind == "psum" for tile in inputs.values()):
        raise RuleError(f"{opcode}: {' and '.join(inputs)} are both in PSUM; copy one of them to SBUF first.")
