"""Arguments of instructions that are no tiles: operators, engines, enumerations. Knows no instruction."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from nki.isa.enums import engine as engines
from nki_machine import cores
from nki_machine.errors import RuleError
from nki_machine.ops import Op

Member = TypeVar("Member", bound=Enum)


def require_op(opcode: str, role: str, op: object, *families: str, num_inputs: int | None = None) -> Op:
    """The operator, if this core has it and it is of one of the families. RuleError if not."""
    if not isinstance(op, Op):
        raise RuleError(f"{opcode}: {role} must be an operator of nki.language such as nl.add, and is {op!r}.")
    op.require(cores.current().generation)
    if op.family not in families:
        raise RuleError(f"{opcode}: {role} must be of the {' or '.join(families)} operators, and {op} is {op.family}.")
    if num_inputs is not None and op.num_inputs != num_inputs:
        raise RuleError(f"{opcode}: {role} must take {num_inputs} inputs, and {op} takes {op.num_inputs}.")
    return op


def require_among(opcode: str, role: str, op: object, *names: str) -> Op:
    """The operator, if it has one of the names. RuleError if not."""
    if not isinstance(op, Op) or op.name not in names:
        allowed = ", ".join(f"nl.{name}" for name in names)
        raise RuleError(f"{opcode}: {role} must be one of {allowed}, and is {op!r}.")
    return op


def require_member(opcode: str, role: str, value: object, *members: Member) -> Member:
    """The member of an enumeration, if it is one that the instruction knows. RuleError if not, and for integers."""
    for member in members:
        if value is member:
            return member
    raise RuleError(f"{opcode}: {role} must be one of {', '.join(map(str, members))}, and is {value!r}.")


def choose_engine(opcode: str, requested: object, *able: engines) -> str:
    """The name of the engine that runs an instruction: the requested one, or the first of the able if unknown."""
    if requested is engines.unknown:
        return able[0].name
    return require_member(opcode, "engine", requested, *able).name
