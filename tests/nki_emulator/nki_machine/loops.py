"""Loops that the device runs: one body, repeated; knows no instruction but the loop's own.

`nl.fori_loop` and `nl.while_loop` as the stubs of NKI 0.6 and migration/index.rst have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from nki_machine import cores
from nki_machine.errors import RuleError
from nki_machine.iterations import check_repeats, static_part
from nki_machine.registers import VirtualRegister, runtime_value
from nki_machine.trace import Instruction


def fori_loop(
    lower: int | VirtualRegister,
    upper: int | VirtualRegister,
    body_fun: Callable[[VirtualRegister], None],
    step: int = 1,
) -> None:
    """Runs `body_fun(i)` for i in lower, lower + step, ... below upper.

    Raises:
        RuleError: a step that is no positive compile-time integer, a body that returns something, or a loop inside
            `nl.no_reorder`.
    """
    if not isinstance(step, int) or step < 1:
        raise RuleError(f"fori_loop: step {step!r} must be a positive integer that is known before the run.")

    def body(value: int) -> None:
        if body_fun(VirtualRegister(value, frozen=True)) is not None:
            raise RuleError("fori_loop: the body must return None; carry state in SBUF or HBM.")

    _run_loop(range(runtime_value(lower), runtime_value(upper), step), body)


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """Runs `r = body_fun(r)`, beginning with `init`, as long as r is not 0.

    Raises:
        RuleError: a condition that is no register, or a loop inside `nl.no_reorder`.
    """
    condition = init

    def conditions() -> Iterable[int]:
        for iteration in itertools.count():
            if not isinstance(condition, VirtualRegister):
                raise RuleError(f"while_loop: the condition must be a register, and the body returned {condition!r}.")
            if condition.read() == 0:
                return
            yield iteration

    def body(_: int) -> None:
        nonlocal condition
        condition = body_fun(VirtualRegister(condition.read()))

    _run_loop(conditions(), body)


def _run_loop(values: Iterable[int], body: Callable[[int], None]) -> None:
    core = cores.current()
    if core.in_no_reorder:
        raise RuleError("A runtime loop cannot stand inside nl.no_reorder: put nl.no_reorder inside the loop's body.")
    number, outer, num_iterations = core.begin_loop(), core.loops, 0
    first: list[tuple] | None = None
    try:
        for value in values:
            core.loops = (*outer, (number, num_iterations))
            begin = len(core.instructions)
            core.emit(Instruction(core.program_id, "fori_loop", "sync", loops=core.loops))
            body(value)
            done = static_part(core.instructions[begin:], core.loops, core.machine.scopes)
            first = done if first is None else first
            check_repeats(first, done)
            num_iterations += 1
    finally:
        core.loops = outer
    core.trips.append((number, num_iterations))
