"""Instructions that compute each element of a tile from one element of each input; they reduce and select nothing."""

from __future__ import annotations

import numpy as np

from nki.isa.arguments import choose_engine, require_op
from nki.isa.enums import engine as engines
from nki.isa.scalar_stage import arithmetic, bitvec
from nki_machine import cores
from nki_machine.engines import forbid_both_in_psum, issue, require_same_free_size
from nki_machine.errors import RuleError
from nki_machine.ops import Op
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import bits, constant, is_integer, lanes, raw, store, store_bits, tiles_among


def memset(dst: NkiTensor, value: float, engine: engines = engines.unknown, name: str | None = None) -> None:
    """Fills dst with a compile-time constant of dst's kind. RuleError if it is not a value of dst's dtype."""
    where = choose_engine("memset", engine, engines.vector, engines.gpsimd)
    issue("memset", where, {"dst": dst}, {}, num_inputs=0)
    number = constant("memset", "value", value)
    if not is_integer(dst):
        dst.write(np.full(dst.shape, number, np.float32))
        return
    limits = np.iinfo(dst.dtype)
    if not isinstance(number, int | np.integer) or not limits.min <= number <= limits.max:
        raise RuleError(f"memset: value {value!r} is not one of dst's dtype, {dst.dtype.name}.")
    dst.write(np.full(dst.shape, number, dst.dtype))


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engines = engines.unknown, name: str | None = None) -> None:
    """dst = src: bit by bit between equal dtypes, through float32 otherwise."""
    where = choose_engine("tensor_copy", engine, engines.vector, engines.scalar, engines.gpsimd)
    issue("tensor_copy", where, {"dst": dst}, {"src": src}, num_inputs=1)
    require_same_free_size("tensor_copy", dst=dst, src=src)
    store(dst, raw(src) if src.dtype == dst.dtype else lanes(src))


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = 1 / data in float32, on the Vector Engine."""
    issue("reciprocal", "vector", {"dst": dst}, {"data": data}, num_inputs=1)
    require_same_free_size("reciprocal", dst=dst, data=data)
    store(dst, np.reciprocal(lanes(data)))


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Op,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 <op> data2: bits, float32, or exact integers on the GpSimd Engine if all three are 32 bits wide."""
    require_op("tensor_tensor", "op", op, "arithmetic", "bitvec", "power", num_inputs=2)
    where = _engine_of_tensor_tensor(op, engine, (dst, data1, data2))
    issue("tensor_tensor", where, {"dst": dst}, {"data1": data1, "data2": data2}, num_inputs=2, ops=(op.name,))
    require_same_free_size("tensor_tensor", dst=dst, data1=data1, data2=data2)
    forbid_both_in_psum("tensor_tensor", data1=data1, data2=data2)
    assert op.apply is not None
    if op.family == "bitvec":
        left, right = bits("tensor_tensor", "data1", data1), bits("tensor_tensor", "data2", data2)
        if left.dtype != right.dtype:
            raise RuleError(
                f"tensor_tensor: {op} casts nothing, so both inputs must be of one width, and are {data1.dtype.name} "
                f"and {data2.dtype.name}."
            )
        store_bits("tensor_tensor", dst, op.apply(left, right))
    elif where == "gpsimd" and _all_int32_like(dst, data1, data2):
        exact = op.apply(raw(data1).astype(np.int64), raw(data2).astype(np.int64))
        store(dst, exact.astype(np.int64).astype(dst.dtype))
    else:
        store(dst, op.apply(lanes(data1), lanes(data2)))


def _all_int32_like(*tiles: NkiTensor) -> bool:
    return all(tile.dtype.itemsize == 4 and is_integer(tile) for tile in tiles)


def _engine_of_tensor_tensor(op: Op, requested: engines, tiles: tuple[NkiTensor, ...]) -> str:
    if op.family == "bitvec":
        return choose_engine(f"tensor_tensor of {op}", requested, engines.vector)
    if op.family == "power":
        return choose_engine(f"tensor_tensor of {op}", requested, engines.gpsimd)
    exact = requested is engines.unknown and all(isinstance(tile, NkiTensor) for tile in tiles)
    if exact and _all_int32_like(*tiles) and all(tile.buffer.kind == "sbuf" for tile in tiles):
        return "gpsimd"
    return choose_engine("tensor_tensor", requested, engines.vector, engines.gpsimd)


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: float | NkiTensor | None,
    reverse0: bool = False,
    op1: Op | None = None,
    operand1: float | NkiTensor | None = None,
    reverse1: bool = False,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> None:
    """dst = (data <op0> operand0) <op1> operand1: both operators on bits, or both in float32."""
    require_op("tensor_scalar", "op0", op0, "arithmetic", "bitvec")
    if op1 is not None:
        require_op("tensor_scalar", "op1", op1, op0.family)
    elif operand1 is not None:
        raise RuleError("tensor_scalar: operand1 needs an op1.")
    where = _engine_of_tensor_scalar(op0, op1, engine)
    names = (op0.name,) if op1 is None else (op0.name, op1.name)
    reads = {"data": data, **tiles_among(operand0=operand0, operand1=operand1)}
    issue("tensor_scalar", where, {"dst": dst}, reads, num_inputs=1, ops=names)
    require_same_free_size("tensor_scalar", dst=dst, data=data)
    if op0.family == "bitvec":
        found = bitvec("tensor_scalar", 0, op0, bits("tensor_scalar", "data", data), operand0, reverse0)
        if op1 is not None:
            found = bitvec("tensor_scalar", 1, op1, found, operand1, reverse1)
        store_bits("tensor_scalar", dst, found)
        return
    result = arithmetic("tensor_scalar", 0, op0, lanes(data), operand0, reverse0)
    if op1 is not None:
        result = arithmetic("tensor_scalar", 1, op1, result, operand1, reverse1)
    store(dst, result)


# What the Scalar Engine of Trn2 computes of `tensor_scalar`; Trn3's computes what the Vector Engine does.
_SCALAR_ENGINE_PAIRS = {("multiply", "add"), ("multiply", None), ("add", None)}


def _engine_of_tensor_scalar(op0: Op, op1: Op | None, requested: engines) -> str:
    pair = (op0.name, None if op1 is None else op1.name)
    if op0.family == "bitvec":
        return choose_engine(f"tensor_scalar of {op0}", requested, engines.vector)
    if "rsqrt" in pair:
        return choose_engine("tensor_scalar of nl.rsqrt", requested, engines.gpsimd)
    where = choose_engine("tensor_scalar", requested, engines.vector, engines.scalar)
    if where == "scalar" and cores.current().generation < 4 and pair not in _SCALAR_ENGINE_PAIRS:
        raise RuleError(
            "tensor_scalar: the Scalar Engine of NeuronCore-v3 computes multiply, add, or multiply then add, "
            f"and not {' then '.join(filter(None, pair))}; leave the engine to the Vector Engine."
        )
    return where


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: float | NkiTensor,
    op1: Op,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data <op0> operand0) <op1> operand1 in float32, where operand1 is a whole tile, on the Vector Engine."""
    opcode = "scalar_tensor_tensor"
    require_op(opcode, "op0", op0, "arithmetic")
    require_op(opcode, "op1", op1, "arithmetic", num_inputs=2)
    reads = {"data": data, "operand1": operand1, **tiles_among(operand0=operand0)}
    issue(opcode, "vector", {"dst": dst}, reads, num_inputs=2, ops=(op0.name, op1.name))
    require_same_free_size(opcode, dst=dst, data=data, operand1=operand1)
    forbid_both_in_psum(opcode, data=data, operand1=operand1)
    first = arithmetic(opcode, 0, op0, lanes(data), operand0, reverse0, dtypes=None)
    assert op1.apply is not None
    second = lanes(operand1)
    store(dst, op1.apply(second, first) if reverse1 else op1.apply(first, second))
