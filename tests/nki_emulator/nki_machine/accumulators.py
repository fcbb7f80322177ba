"""An engine's accumulator registers, one float32 per lane, which outlive an instruction; knows no memory.

The Vector Engine has one set, shared by exponential, range_select, select_reduce and tensor_scalar_reduce; the Scalar
Engine has another, for activation and activation_reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nki_machine.errors import RuleError
from nki_machine.ops import Op

Lanes = np.ndarray


@dataclass(slots=True)
class Accumulator:
    """What one engine's registers hold: [P, 1] float32, or None while unknown, and the operator that made it."""

    engine: str
    values: Lanes | None = None
    op: Op | None = None

    def load(self, op: Op, values: Lanes) -> None:
        """Starts from `values`, [P, 1] float32."""
        self.values, self.op = values, op

    def forget(self) -> None:
        """An idle instruction of the Vector Engine leaves its registers in a state that nothing promises."""
        self.values, self.op = None, None

    def add(self, opcode: str, op: Op, partial: Lanes) -> None:
        """Folds [P, 1] into what is held.

        Raises:
            RuleError: as `read`; or the registers hold another operator's running value.
        """
        held = self.read(opcode, len(partial))
        if self.op is not op:
            raise RuleError(
                f"{opcode}: the {self.engine} Engine's accumulator registers hold a running {self.op}, and this "
                f"instruction would go on with {op}; start with reduce_cmd.reset_reduce."
            )
        assert op.apply is not None
        self.values = op.apply(held, partial)

    def read(self, opcode: str, num_partitions: int) -> Lanes:
        """[P, 1] float32. RuleError if the registers hold nothing defined for these lanes."""
        if self.values is None:
            raise RuleError(
                f"{opcode}: the {self.engine} Engine's accumulator registers hold nothing defined; start with "
                "reduce_cmd.reset_reduce, and let no idle instruction of the family come between."
            )
        if len(self.values) != num_partitions:
            raise RuleError(
                f"{opcode}: the accumulator registers were started over {len(self.values)} partitions and are now "
                f"used over {num_partitions}."
            )
        return self.values
