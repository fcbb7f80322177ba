"""The Tensor Engine's matrix product into PSUM, and the transposes that are one (or that the Vector Engine does)."""

from __future__ import annotations

import numpy as np

from nki.isa.arguments import choose_engine
from nki.isa.enums import engine as engines
from nki.isa.enums import matmul_perf_mode
from nki_machine import cores
from nki_machine.dtypes import name_of
from nki_machine.engines import issue
from nki_machine.errors import RuleError
from nki_machine.memory import MATMUL, NOTHING, OTHER, PSUM_BANK_BYTES
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import lanes, raw, store

MAX_ROWS = 128
MAX_STATIONARY_COLUMNS = 128
VECTOR_TRANSPOSE_SIZE = 32
_INPUTS = frozenset({"float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn"})


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> None:
    """dst[m, n] = or += sum over partitions k of stationary[k, m] * moving[k, n], in float32.

    Args:
        accumulate: False opens a group and overwrites; True adds to one that a matmul opened; None lets the first
            matmul overwrite and the others add.
        is_transpose: moving must be the identity; dst, of stationary's dtype, receives its transpose bit by bit.
    """
    opcode = "nc_matmul"
    if perf_mode is not matmul_perf_mode.none:
        raise NotImplementedError(f"{opcode}: {perf_mode} is not emulated; leave perf_mode at none.")
    num_rows, num_columns, num_moving = stationary.shape[0], _free(stationary), _free(moving)
    details = {"rows": num_rows, "stationary_columns": num_columns, "columns": num_moving}
    details |= {"dtype": name_of(moving.dtype), "is_transpose": is_transpose, "accumulate": accumulate}
    tiles = {"stationary": stationary, "moving": moving}
    issue(opcode, "tensor", {"dst": dst}, tiles, lanewise=False, **details)
    _check_sizes(opcode, dst, stationary, moving)
    _check_inputs(opcode, stationary, moving)
    _check_tiling(opcode, stationary, tile_position, tile_size)
    _check_bank(opcode, dst)
    if is_transpose:
        _check_identity(opcode, moving)
        _write_transposed(opcode, dst, stationary)
        return
    _check_output(opcode, dst)
    product = lanes(stationary).T @ lanes(moving)
    if _adds(opcode, dst, accumulate):
        product += lanes(dst)
    store(dst, product)
    dst.writers[...] = MATMUL


def _free(tile: NkiTensor) -> int:
    return tile.size // tile.shape[0]


def _check_sizes(opcode: str, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor) -> None:
    shapes = f"stationary {stationary.shape}, moving {moving.shape}, dst {dst.shape}"
    if stationary.shape[0] != moving.shape[0]:
        raise RuleError(f"{opcode}: the partitions of stationary and moving are contracted and must agree: {shapes}.")
    if _free(stationary) > MAX_STATIONARY_COLUMNS:
        raise RuleError(f"{opcode}: stationary has {_free(stationary)} columns, and {MAX_STATIONARY_COLUMNS} fit.")
    limit = _max_moving(dst)
    if _free(moving) > limit:
        raise RuleError(f"{opcode}: moving has {_free(moving)} columns, and {limit} fit this NeuronCore's PSUM write.")
    if (dst.shape[0], _free(dst)) != (_free(stationary), _free(moving)):
        raise RuleError(f"{opcode}: dst must be [stationary's columns, moving's columns]: {shapes}.")


def _max_moving(dst: NkiTensor) -> int:
    """One bank of float32 on NeuronCore-v3, all eight banks of dst's dtype on v4."""
    if cores.current().generation < 4:
        return PSUM_BANK_BYTES // 4
    return 8 * PSUM_BANK_BYTES // max(dst.dtype.itemsize, 2)


def _check_inputs(opcode: str, stationary: NkiTensor, moving: NkiTensor) -> None:
    names = (name_of(stationary.dtype), name_of(moving.dtype))
    for role, dtype in zip(("stationary", "moving"), names, strict=True):
        if dtype not in _INPUTS:
            raise RuleError(f"{opcode}: {role} is {dtype}; the Tensor Engine multiplies {', '.join(sorted(_INPUTS))}.")
    if "float32" in names and names[0] != names[1]:
        raise RuleError(f"{opcode}: float32 multiplies float32 alone, and the tiles are {names[0]} and {names[1]}.")
    if {"float8_e4m3", "float8_e4m3fn"}.issubset(names):
        raise RuleError(f"{opcode}: float8_e4m3 and float8_e4m3fn cannot be mixed in one matmul.")


def _check_output(opcode: str, dst: NkiTensor) -> None:
    allowed = ("float32",) if cores.current().generation < 4 else ("float32", "bfloat16")
    if name_of(dst.dtype) not in allowed:
        raise RuleError(f"{opcode}: dst must be {' or '.join(allowed)} on this NeuronCore, and is {dst.dtype.name}.")


def _check_bank(opcode: str, dst: NkiTensor) -> None:
    """NeuronCore-v3 writes one PSUM bank per instruction; an allocation is taken to begin where a bank does."""
    if cores.current().generation >= 4:
        return
    first, last = (byte // PSUM_BANK_BYTES for byte in dst.free_span)
    if first != last:
        raise RuleError(
            f"{opcode}: dst lies in PSUM banks {first} to {last}, and one instruction writes within one bank of "
            f"{PSUM_BANK_BYTES} bytes per partition."
        )


def _check_tiling(opcode: str, stationary: NkiTensor, position: tuple[int, ...], size: tuple[int, ...]) -> None:
    if bool(position) != bool(size):
        raise RuleError(f"{opcode}: tile_position and tile_size must both be given, or neither.")
    if not size:
        return
    for start, extent, used in zip(position, size, (stationary.shape[0], _free(stationary)), strict=True):
        if extent not in (32, 64, 128) or start % extent or start + extent > MAX_ROWS or used > extent:
            raise RuleError(
                f"{opcode}: tile_position {position} and tile_size {size} for stationary {stationary.shape}: a size is "
                "32, 64 or 128 and holds the tile, and a position is a multiple of it within 128."
            )


def _check_identity(opcode: str, moving: NkiTensor) -> None:
    if not np.array_equal(lanes(moving), np.eye(moving.shape[0], dtype=np.float32)):
        raise RuleError(f"{opcode}: with is_transpose, moving must be the identity of stationary's partitions.")


def _write_transposed(opcode: str, dst: NkiTensor, data: NkiTensor) -> None:
    if dst.dtype != data.dtype:
        raise RuleError(
            f"{opcode}: a transpose moves bits, so dst must be {data.dtype.name} as its input is, and is "
            f"{dst.dtype.name}."
        )
    if (dst.shape[0], _free(dst)) != (_free(data), data.shape[0]):
        raise RuleError(f"{opcode}: dst {dst.shape} is not the transposed shape of {data.shape}, its free axes in one.")
    store(dst, raw(data).T)


def _adds(opcode: str, dst: NkiTensor, accumulate: bool | None) -> bool:
    """Whether the product is added to what dst holds. RuleError where hardware's answer is undefined."""
    if accumulate is False:
        return False
    writers = dst.writers
    if (writers == MATMUL).all():
        return True
    if accumulate is None and (writers == NOTHING).all():
        return False
    if (writers == OTHER).all():
        if accumulate is None or cores.current().generation < 4:
            raise RuleError(
                f"{opcode}: dst was written last by another instruction than a matmul, onto which accumulating is "
                "undefined; open the group with accumulate=False."
            )
        return True
    raise RuleError(
        f"{opcode}: accumulate={accumulate} onto elements of dst of which not all were begun by a matmul; open the "
        "group with accumulate=False."
    )


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: engines = engines.unknown, name: str | None = None) -> None:
    """dst [F, P] = data [P, F] transposed, its free axes in one; bit by bit.

    The Tensor Engine takes up to 128 x 128 from SBUF to PSUM, the Vector Engine up to 32 x 32 anywhere on chip. An
    unknown engine is the Vector Engine where the tile is small enough for it.
    """
    opcode = "nc_transpose"
    is_small = max(data.shape[0], _free(data)) <= VECTOR_TRANSPOSE_SIZE
    able = (engines.vector, engines.tensor) if is_small else (engines.tensor, engines.vector)
    where = choose_engine(opcode, engine, *able)
    details = {"rows": data.shape[0], "columns": _free(data), "dtype": name_of(data.dtype), "is_transpose": True}
    issue(opcode, where, {"dst": dst}, {"data": data}, lanewise=False, num_inputs=1, **details)
    limit = MAX_ROWS if where == "tensor" else VECTOR_TRANSPOSE_SIZE
    if max(data.shape[0], _free(data)) > limit:
        raise RuleError(f"{opcode}: data {data.shape} exceeds the {limit} x {limit} of the {where} engine.")
    if where == "tensor":
        _check_bank(opcode, dst)
    _write_transposed(opcode, dst, data)
