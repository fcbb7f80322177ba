"""Functions of one variable with a running sum: `activation` (Scalar Engine) and `exponential` (Vector Engine)."""

from __future__ import annotations

import numpy as np

from nki.isa.arguments import require_among, require_member, require_op
from nki.isa.enums import reduce_cmd as commands
from nki.isa.reduction import ADD, accumulate, read_out
from nki_machine import cores
from nki_machine.engines import issue, require_same_free_size
from nki_machine.errors import RuleError
from nki_machine.ops import Op
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import column_or_constant, is_integer, lanes, store, tiles_among


def activation(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    bias: float | NkiTensor | None = None,
    scale: float | NkiTensor = 1.0,
    reduce_op: Op | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias) in float32; its sum along the free axes goes where reduce_cmd says.

    reduce_res, [P, 1], receives the registers as they are after the instruction, also after an idle one.
    """
    members = (commands.idle, commands.reset, commands.reduce, commands.reset_reduce)
    require_member("activation", "reduce_cmd", reduce_cmd, *members)
    if reduce_op is not None or reduce_cmd in (commands.reduce, commands.reset_reduce):
        require_among("activation", "reduce_op", reduce_op, "add")
    _activate("activation", dst, op, data, bias, scale, reduce_res, reduce_cmd)


def activation_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    reduce_op: Op,
    reduce_res: NkiTensor | None,
    bias: float | NkiTensor | None = None,
    scale: float | NkiTensor = 1.0,
    name: str | None = None,
) -> None:
    """`activation` with reduce_cmd.reset_reduce."""
    require_among("activation_reduce", "reduce_op", reduce_op, "add")
    _activate("activation_reduce", dst, op, data, bias, scale, reduce_res, commands.reset_reduce)


def _activate(
    opcode: str,
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    bias: float | NkiTensor | None,
    scale: float | NkiTensor,
    reduce_res: NkiTensor | None,
    command: commands,
) -> None:
    require_op(opcode, "op", op, "activation", "arithmetic")
    if op.activation is None:
        raise RuleError(f"{opcode}: {op} is no activation function of the Scalar Engine.")
    reads = {"data": data, **tiles_among(bias=bias, scale=scale)}
    writes = {"dst": dst, **tiles_among(reduce_res=reduce_res)}
    issue(opcode, "scalar", writes, reads, num_inputs=1, ops=(op.name,))
    require_same_free_size(opcode, dst=dst, data=data)
    shifted = lanes(data) * column_or_constant(opcode, "scale", scale)
    if bias is not None:
        shifted = shifted + column_or_constant(opcode, "bias", bias, dtypes=None)
    result = op.activation(shifted)
    registers = cores.current().scalar_accumulator
    total = accumulate(opcode, registers, command, ADD, result)
    store(dst, result)
    if reduce_res is not None and total is None:
        total = registers.read(opcode, len(result))
    read_out(opcode, reduce_res, total)


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: float | NkiTensor = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: commands = commands.idle,
    reduce_init: float | NkiTensor = 0.0,
    name: str | None = None,
) -> None:
    """dst = exp(src - max_value) on the Vector Engine, and its sum along the free axes; NeuronCore-v4 and newer."""
    opcode = "exponential"
    generation = cores.current().generation
    if generation < 4:
        raise RuleError(f"{opcode}: needs NeuronCore-v4 (Trn3) and this one is v{generation}; use activation.")
    members = (commands.idle, commands.reset_reduce, commands.reduce, commands.load_reduce)
    require_member(opcode, "reduce_cmd", reduce_cmd, *members)
    # The default of 0.0 counts as not given, for every command but load_reduce.
    unset = not isinstance(reduce_init, NkiTensor) and reduce_init == 0 and reduce_cmd is not commands.load_reduce
    init = None if unset else reduce_init
    reads = {"src": src, **tiles_among(max_value=max_value, reduce_init=init)}
    writes = {"dst": dst, **tiles_among(reduce_res=reduce_res)}
    issue(opcode, "vector", writes, reads, num_inputs=1, ops=("exp",))
    require_same_free_size(opcode, dst=dst, src=src)
    if reduce_res is not None and is_integer(reduce_res):
        raise RuleError(f"{opcode}: reduce_res must be a float, and is {reduce_res.dtype.name}.")
    result = np.exp(lanes(src) - column_or_constant(opcode, "max_value", max_value))
    registers = cores.current().vector_accumulator
    total = accumulate(opcode, registers, reduce_cmd, ADD, result, init)
    if reduce_cmd is commands.idle:
        registers.forget()
    store(dst, result)
    read_out(opcode, reduce_res, total)
