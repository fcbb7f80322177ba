"""Runs a kernel on one or two cores, and checks what only a whole run shows; knows no instruction."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_machine import cores
from nki_machine.arguments import Arguments
from nki_machine.capacity import check_capacity
from nki_machine.cores import Core, Machine
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor
from nki_machine.trace import Trace


def run(
    kernel: Callable[..., Any],
    *args: Any,
    lnc: int = 1,
    poison: float = math.nan,
    generation: int | None = None,
    first_core: int = 0,
    **kwargs: Any,
) -> tuple[Any, Trace]:
    """Calls `kernel(*args, **kwargs)` on the emulated device.

    Args:
        kernel: under `nki.jit`, or plain. lnc: cores, unless the kernel says so itself as `kernel[2]` does.
        poison: what new memory holds. A kernel that reads nothing before it wrote it gives the same bits with any.
        generation: 3 (Trn2) or 4 (Trn3); None asks `NEURON_PLATFORM_TARGET_OVERRIDE`.
        first_core: which of two cores runs first; a kernel that lacks no barrier gives the same bits with either.

    Returns:
        What the kernel returned (an argument: the caller's own array, changed in place), and what it did.

    Raises:
        RuleError: the kernel broke a rule.
    """
    lnc = getattr(kernel, "lnc", None) or lnc
    function = getattr(kernel, "func", kernel)
    machine = Machine(lnc, generation or cores.target_generation(), poison, first_core)
    arguments = Arguments(machine)
    device_args = [arguments.to_device(value) for value in args]
    device_kwargs = {name: arguments.to_device(value) for name, value in kwargs.items()}
    # Poison makes NaN where a kernel masks it out later.
    with np.errstate(all="ignore"):
        results = _run_cores(machine, lambda: function(*device_args, **device_kwargs))
    _check_alike(machine, results)
    for core in machine.cores:
        check_capacity(core.instructions, machine.generation)
    arguments.write_back()
    trace = Trace([instruction for core in machine.cores for instruction in core.instructions])
    return arguments.to_caller(results[0]), trace


def _run_cores(machine: Machine, call: Callable[[], Any]) -> list[Any]:
    if machine.lnc == 1:
        with cores.running(machine.cores[0]):
            return [call()]
    results: list[Any] = [None, None]
    failures: list[BaseException] = []

    def work(core: Core) -> None:
        machine.channels.begin(core.program_id)
        try:
            with cores.running(core), np.errstate(all="ignore"):
                results[core.program_id] = call()
        except BaseException as error:
            failures.append(error)
        finally:
            machine.channels.end(core.program_id)

    threads = [threading.Thread(target=work, args=(core,), daemon=True) for core in machine.cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # When one core fails, the other waits for it in vain: the first failure is the cause.
    if failures:
        raise failures[0]
    return results


def _check_alike(machine: Machine, results: list[Any]) -> None:
    """Raises: RuleError: two cores ran other loops, or returned other tensors."""
    if machine.lnc == 1:
        return
    trips = [core.trips for core in machine.cores]
    if trips[0] != trips[1]:
        raise RuleError(f"The cores ran different runtime loops (number, iterations): {trips[0]} and {trips[1]}.")
    storages = [_storages(result) for result in results]
    if storages[0] != storages[1]:
        raise RuleError("The cores returned different tensors: both must return the same shared HBM.")


def _storages(result: Any) -> list[int]:
    if isinstance(result, NkiTensor):
        return [result.storage.id]
    if isinstance(result, tuple | list):
        return [storage for item in result for storage in _storages(item)]
    return []
