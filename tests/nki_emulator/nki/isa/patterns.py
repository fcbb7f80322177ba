"""Instructions that reckon with an element's place by an affine expression, on the GpSimd Engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nki.isa.arguments import require_among
from nki_machine.engines import issue, require_same_free_size
from nki_machine.errors import RuleError
from nki_machine.ops import OPS, Op
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import constant, lanes, raw, store

Pattern = Sequence[Sequence[int]]
MAX_PATTERN_AXES = 4
_INT32 = np.iinfo(np.int32)


def _affine(opcode: str, dst: NkiTensor, pattern: Pattern, offset: int, channel_multiplier: int) -> np.ndarray:
    """[P, F] int32: offset + p * channel_multiplier + the sum of step * index, the last axis of pattern fastest."""
    if not 1 <= len(pattern) <= MAX_PATTERN_AXES:
        raise RuleError(f"{opcode}: pattern {pattern} must have 1 to {MAX_PATTERN_AXES} pairs of [step, num].")
    values = offset + channel_multiplier * np.arange(dst.shape[0], dtype=np.int64)
    for step, num in pattern:
        values = values[..., None] + step * np.arange(num, dtype=np.int64)
    if values.size != dst.size:
        raise RuleError(
            f"{opcode}: pattern {pattern} counts {values.size // dst.shape[0]} elements in a partition, and dst "
            f"{dst.shape} has {dst.size // dst.shape[0]}."
        )
    if values.min() < _INT32.min or values.max() > _INT32.max:
        raise RuleError(f"{opcode}: the values of pattern {pattern} from {offset} on leave 32-bit integers.")
    return values.reshape(dst.shape[0], -1).astype(np.int32)


def iota(
    dst: NkiTensor, pattern: Pattern, offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> None:
    """dst[p, ...] = offset + p * channel_multiplier + sum of step * index, in 32-bit integers, then dst's dtype."""
    issue("iota", "gpsimd", {"dst": dst}, {}, num_inputs=0)
    store(dst, _affine("iota", dst, pattern, offset, channel_multiplier))


def affine_select(
    dst: NkiTensor,
    pattern: Pattern,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Op = OPS["equal"],
    offset: int = 0,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where `affine value <cmp_op> 0`, else on_false_value."""
    opcode = "affine_select"
    comparisons = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    require_among(opcode, "cmp_op", cmp_op, *comparisons)
    issue(opcode, "gpsimd", {"dst": dst}, {"on_true_tile": on_true_tile}, num_inputs=1, ops=(cmp_op.name,))
    require_same_free_size(opcode, dst=dst, on_true_tile=on_true_tile)
    fill = constant(opcode, "on_false_value", on_false_value)
    assert cmp_op.apply is not None
    chosen = cmp_op.apply(_affine(opcode, dst, pattern, offset, channel_multiplier), 0).astype(np.bool_)
    if on_true_tile.dtype == dst.dtype:
        # A selected element keeps its bits, which float32 could not hold of a large int32.
        store(dst, np.where(chosen, raw(on_true_tile), np.array(np.float32(fill)).astype(dst.dtype)))
    else:
        store(dst, np.where(chosen, lanes(on_true_tile), np.float32(fill)))
