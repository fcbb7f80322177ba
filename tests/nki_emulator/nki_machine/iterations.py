"""Whether the iterations of a runtime loop are one body, repeated; knows no loop's bounds.

The device holds one copy of a body. A Python variable that a body changes (a counter, an alternation of buffers) would
be read once there, when the body is traced, but differs here from iteration to iteration: this is how that shows.
"""

from __future__ import annotations

from nki_machine.errors import RuleError
from nki_machine.trace import Instruction, Loops, Operand


def static_part(instructions: list[Instruction], loops: Loops, scopes: list[Loops]) -> list[tuple]:
    """What one iteration's instructions have that is known before the run, those of inner loops left out.

    Tensors allocated in the iteration go by the order of their first use, others by their number.

    Args:
        instructions: those of the iteration `loops`, in order. scopes: of the allocations, by number.
    """
    local: dict[int, int] = {}

    def of(operand: Operand) -> tuple:
        if scopes[operand.storage][: len(loops)] == loops:
            return (local.setdefault(operand.storage, -1 - len(local)), *operand[1:])
        return operand

    return [
        (instruction.opcode, instruction.engine, instruction.details, *map(of, instruction.writes + instruction.reads))
        for instruction in instructions
        if instruction.loops == loops
    ]


def check_repeats(first: list[tuple], later: list[tuple]) -> None:
    """Compares an iteration's static part with the first one's.

    Raises:
        RuleError: they differ.
    """
    if first == later:
        return
    for position, (left, right) in enumerate(zip(first, later, strict=False)):
        if left != right:
            raise RuleError(
                f"A runtime loop's body must issue the same instructions in every iteration: instruction {position} is "
                f"{left} in the first and {right} in a later one. A body must not change a Python variable."
            )
    raise RuleError(
        "A runtime loop's body must issue the same instructions in every iteration, and issued "
        f"{len(first)} in the first and {len(later)} in a later one. A body must not change a Python variable."
    )
