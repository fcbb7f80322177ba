"""A scalar register of the device: a value that exists at run time, hence never in Python's control flow."""

from __future__ import annotations

from typing import NoReturn

from nki_machine.errors import RuleError


class VirtualRegister:
    """32 bits on a sequencer.

    Its value is unknown while a kernel is traced, so Python may neither compare, convert nor compute with it.

    Attributes:
        frozen: a loop's own variable, which nothing may write.
    """

    __slots__ = ("_value", "frozen")

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self._value = state
        self.frozen = frozen

    def read(self) -> int:
        """Raises: RuleError: nothing was written to it yet."""
        if self._value is None:
            raise RuleError("A register is read before anything was moved or loaded into it: initialise it first.")
        return self._value

    def write(self, value: int) -> None:
        """Raises: RuleError: it is a loop's variable."""
        if self.frozen:
            raise RuleError("A loop's variable is read-only: keep other state in SBUF, HBM or a register of your own.")
        self._value = int(value)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "A register's value is not known while the kernel is traced: use it as a scalar_offset, as a bound of "
            "nl.fori_loop or as the condition of nl.while_loop, not in Python."
        )

    __bool__ = __int__ = __index__ = __float__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _refuse

    def __repr__(self) -> str:
        return "VirtualRegister(frozen)" if self.frozen else "VirtualRegister()"


def runtime_value(value: int | VirtualRegister) -> int:
    """A compile-time integer, or what a register holds now."""
    return value.read() if isinstance(value, VirtualRegister) else value
