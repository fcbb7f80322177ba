"""Movement between partitions: `nc_stream_shuffle` permutes them within each quadrant of 32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nki_machine.engines import issue, require_same_free_size
from nki_machine.errors import RuleError
from nki_machine.tensor import NkiTensor
from nki_machine.tiles import raw, store

QUADRANT = 32
UNMODIFIED = 255


def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None) -> None:
    """In each quadrant, dst partition i = src partition shuffle_mask[i]; 255 leaves the partition as it is."""
    opcode = "nc_stream_shuffle"
    issue(opcode, "vector", {"dst": dst}, {"src": src}, lanewise=False, num_inputs=1)
    require_same_free_size(opcode, dst=dst, src=src)
    if dst.dtype != src.dtype:
        raise RuleError(f"{opcode}: dst is {dst.dtype.name} and src {src.dtype.name}; it casts nothing.")
    _check_starts(opcode, dst, src)
    mask = _checked_mask(opcode, shuffle_mask)
    partitions = np.arange(dst.shape[0])
    lane = mask[partitions % QUADRANT]
    source = partitions // QUADRANT * QUADRANT + lane
    moved = lane != UNMODIFIED
    if (source[moved] >= src.shape[0]).any():
        raise RuleError(
            f"{opcode}: the mask takes partition {source[moved].max()} of src, which spans {src.shape[0]}; a mask acts "
            "on each quadrant by itself."
        )
    values = raw(dst).copy()
    values[moved] = raw(src)[source[moved]]
    store(dst, values)


def _checked_mask(opcode: str, shuffle_mask: Sequence[int]) -> np.ndarray:
    mask = np.array(shuffle_mask, dtype=np.int64)
    if mask.shape != (QUADRANT,) or not ((mask == UNMODIFIED) | ((mask >= 0) & (mask < QUADRANT))).all():
        raise RuleError(f"{opcode}: shuffle_mask must be {QUADRANT} of 0..{QUADRANT - 1} or {UNMODIFIED}.")
    return mask


def _check_starts(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """The larger of the two tiles, in whole quadrants, decides where both may start."""
    active = -(-max(dst.shape[0], src.shape[0]) // QUADRANT) * QUADRANT
    step = {32: 32, 64: 64}.get(active, 128)
    for role, tile in (("dst", dst), ("src", src)):
        if tile.start_partition % step:
            raise RuleError(
                f"{opcode}: {role} starts at partition {tile.start_partition}, and with {active} active partitions it "
                f"must start at a multiple of {step}."
            )
