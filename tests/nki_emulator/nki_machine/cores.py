"""The running core: its number, its loops, its memory and what it did; knows no instruction by name."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np

from nki_machine.accumulators import Accumulator
from nki_machine.channels import Channels
from nki_machine.errors import RuleError
from nki_machine.memory import MemoryRegion, Storage, check_allocation, check_start_partition, poisoned
from nki_machine.trace import Instruction, Loops

_GENERATIONS = {"trn2": 3, "gen3": 3, "trn3": 4, "gen4": 4}
_running = threading.local()


def target_generation() -> int:
    """3 (Trn2) or 4 (Trn3), by `NEURON_PLATFORM_TARGET_OVERRIDE`; 4 when unset, as AWS's simulator has it.

    Raises:
        RuleError: the variable names another target.
    """
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    if target not in _GENERATIONS:
        raise RuleError(f"NEURON_PLATFORM_TARGET_OVERRIDE={target}: this emulator knows {', '.join(_GENERATIONS)}.")
    return _GENERATIONS[target]


class Machine:
    """One run's logical core: one or two cores over one HBM.

    Attributes:
        generation: 3 (Trn2) or 4 (Trn3). poison: what new memory holds.
        scopes: of every allocation, by its id: the runtime loops around it.
    """

    def __init__(self, lnc: int, generation: int, poison: float = math.nan, first_core: int = 0) -> None:
        if lnc not in (1, 2):
            raise RuleError(f"kernel[{lnc}]: a logical core has 1 or 2 cores.")
        self.lnc = lnc
        self.generation = generation
        self.poison = poison
        self.scopes: list[Loops] = []
        self.channels = Channels(first_core)
        self.cores = [Core(self, program_id) for program_id in range(lnc)]
        self._shared: list[Storage] = []

    def adopt(self, array: np.ndarray, shape: tuple[int, ...], name: str) -> Storage:
        """A caller's array, flat and contiguous, as memory of the device."""
        self.scopes.append(())
        return Storage(len(self.scopes) - 1, shape, array, MemoryRegion.shared_hbm, name, is_argument=True)

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        buffer: MemoryRegion,
        name: str,
        scope: Loops,
    ) -> Storage:
        """New memory, full of poison."""
        check_allocation(shape, dtype, buffer, self.generation)
        self.scopes.append(scope)
        return Storage(len(self.scopes) - 1, shape, poisoned(shape, dtype, self.poison), buffer, name, scope)

    def allocate_shared(self, index: int, shape: tuple[int, ...], dtype: np.dtype, name: str, scope: Loops) -> Storage:
        """Shared HBM: the n-th allocation of both cores is one."""
        if index == len(self._shared):
            self._shared.append(self.allocate(shape, dtype, MemoryRegion.shared_hbm, name, scope))
        storage = self._shared[index]
        if (storage.shape, storage.dtype) != (shape, dtype):
            raise RuleError(
                f"nl.ndarray: shared HBM number {index} is {storage.shape} of {storage.dtype} on one core and "
                f"{shape} of {dtype} on the other: both cores must allocate alike."
            )
        return storage


class Core:
    """One core of a run.

    Attributes:
        program_id: 0 or 1. instructions: what it did, in order.
        loops: the runtime loops around it now, outermost first: (loop's number, iteration).
        vector_accumulator, scalar_accumulator: the registers in which two engines keep a running sum or maximum.
        trips: of every runtime loop that ended: its number and its iterations. in_no_reorder: inside `nl.no_reorder`.
    """

    def __init__(self, machine: Machine, program_id: int) -> None:
        self.machine = machine
        self.program_id = program_id
        self.generation = machine.generation
        self.num_programs = machine.lnc
        self.instructions: list[Instruction] = []
        self.loops: Loops = ()
        self.trips: list[tuple[int, int]] = []
        self.in_no_reorder = False
        self.vector_accumulator = Accumulator("Vector")
        self.scalar_accumulator = Accumulator("Scalar")
        self._num_loops = 0
        self._num_shared = 0

    def emit(self, instruction: Instruction) -> None:
        """Records what was done.

        Raises:
            RuleError: an engine's operand begins at a partition from which the engine does not reach.
        """
        if instruction.engine not in ("dma", "sync"):
            for operand in (*instruction.writes, *instruction.reads):
                if operand.num_partitions:
                    check_start_partition(instruction.opcode, operand)
        self.instructions.append(instruction)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype, buffer: MemoryRegion, name: str) -> Storage:
        if buffer is not MemoryRegion.shared_hbm:
            return self.machine.allocate(shape, dtype, buffer, name, self.loops)
        self._num_shared += 1
        return self.machine.allocate_shared(self._num_shared - 1, shape, dtype, name, self.loops)

    def exchange(self, channel: Hashable, value: object = None) -> object:
        """Meets the other core: gives it `value` and returns its own.

        Raises:
            RuleError: there is no other core, or it never comes (a deadlock).
        """
        if self.num_programs == 1:
            raise RuleError(f"{channel}: there is one core only; launch the kernel with kernel[2].")
        return self.machine.channels.exchange(self.program_id, channel, value)

    def begin_loop(self) -> int:
        """A runtime loop's number, in the order of their beginnings."""
        self._num_loops += 1
        return self._num_loops - 1


def current() -> Core:
    """The core that runs this thread.

    Raises:
        RuleError: no kernel runs.
    """
    core = getattr(_running, "core", None)
    if core is None:
        raise RuleError("No kernel is running: call nki.language and nki.isa inside a function under nki.jit.")
    return core


def is_running() -> bool:
    return getattr(_running, "core", None) is not None


@contextmanager
def running(core: Core) -> Iterator[None]:
    """Makes `core` this thread's."""
    _running.core = core
    try:
        yield
    finally:
        _running.core = None
