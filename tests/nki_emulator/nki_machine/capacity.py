"""Whether what lives at the same time fits the memories, told from a trace; knows no kernel.

An allocation lives from its first to its last access. When it is touched both inside a loop's iteration and outside of
that iteration, it lives through the whole loop, since the device repeats one body with one set of addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nki_machine.errors import RuleError
from nki_machine.memory import PSUM_BANK_BYTES, PSUM_NUM_BANKS, MemoryRegion, capacity_bytes
from nki_machine.trace import Instruction, Loops, Operand


@dataclass(slots=True)
class LiveRange:
    """One allocation's life: positions in its core's instructions, both ends included.

    Attributes:
        loops: the iterations that hold all accesses.
    """

    operand: Operand
    first: int
    last: int
    loops: Loops


def check_capacity(instructions: list[Instruction], generation: int) -> None:
    """Raises: RuleError: more is alive at some instruction of a core than its SBUF or PSUM holds."""
    ranges = live_ranges(instructions)
    for buffer in (MemoryRegion.sbuf, MemoryRegion.psum):
        of_buffer = [live for live in ranges if live.operand.buffer == buffer.kind]
        for position, alive in _crowds(of_buffer):
            if not fits(buffer, [live.operand.free_bytes for live in alive], generation):
                sizes = ", ".join(f"{live.operand.shape} {live.operand.dtype}" for live in alive)
                raise RuleError(
                    f"{instructions[position].opcode}, instruction {position}: {len(alive)} tensors that live in "
                    f"{buffer.name} do not fit the {capacity_bytes(buffer, generation)} bytes of a partition: {sizes}."
                )


def live_ranges(instructions: list[Instruction]) -> list[LiveRange]:
    """The lives of the on-chip allocations that a core touches."""
    spans = _loop_spans(instructions)
    ranges: dict[int, LiveRange] = {}
    for position, instruction in enumerate(instructions):
        for operand in (*instruction.writes, *instruction.reads):
            if operand.buffer == "hbm":
                continue
            live = ranges.get(operand.storage)
            if live is None:
                ranges[operand.storage] = LiveRange(operand, position, position, instruction.loops)
            else:
                live.last = position
                live.loops = _common(live.loops, instruction.loops)
    for live in ranges.values():
        live.first, live.last = _widened(live, instructions, spans)
    return list(ranges.values())


def fits(buffer: MemoryRegion, sizes: list[int], generation: int) -> bool:
    """Whether allocations of these bytes per partition fit side by side; in PSUM, what fits a bank crosses none."""
    if buffer is MemoryRegion.sbuf:
        return sum(sizes) <= capacity_bytes(buffer, generation)
    whole_banks = sum(-(-size // PSUM_BANK_BYTES) for size in sizes if size > PSUM_BANK_BYTES)
    shared: list[int] = []
    for size in sorted((size for size in sizes if size <= PSUM_BANK_BYTES), reverse=True):
        bank = next((index for index, free in enumerate(shared) if free >= size), None)
        if bank is None:
            shared.append(PSUM_BANK_BYTES - size)
        else:
            shared[bank] -= size
    return whole_banks + len(shared) <= PSUM_NUM_BANKS


def _loop_spans(instructions: list[Instruction]) -> dict[tuple[Loops, int], tuple[int, int]]:
    """First and last position of every loop, by the iterations around it and its number."""
    spans: dict[tuple[Loops, int], tuple[int, int]] = {}
    for position, instruction in enumerate(instructions):
        for depth, (number, _) in enumerate(instruction.loops):
            key = (instruction.loops[:depth], number)
            spans[key] = (spans.get(key, (position, position))[0], position)
    return spans


def _widened(
    live: LiveRange, instructions: list[Instruction], spans: dict[tuple[Loops, int], tuple[int, int]]
) -> tuple[int, int]:
    ends = [live.first, live.last]
    for position in (live.first, live.last):
        loops = instructions[position].loops
        if len(loops) > len(live.loops):
            depth = len(live.loops)
            ends.extend(spans[loops[:depth], loops[depth][0]])
    return min(ends), max(ends)


def _common(some: Loops, others: Loops) -> Loops:
    for depth, (left, right) in enumerate(zip(some, others, strict=False)):
        if left != right:
            return some[:depth]
    return min(some, others, key=len)


def _crowds(ranges: list[LiveRange]) -> Iterable[tuple[int, list[LiveRange]]]:
    """Whoever lives whenever one more begins to."""
    alive: list[LiveRange] = []
    for live in sorted(ranges, key=lambda live: live.first):
        alive = [other for other in alive if other.last >= live.first]
        alive.append(live)
        yield live.first, alive
