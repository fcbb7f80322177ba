"""Bytes of any length from rank 0 to the other ranks, in one broadcast where they are few. Knows not what they say."""

import torch

from blockplane.data_plane.ranks.collectives import Ranks

FIRST_BYTES = 4096
"""Of the first broadcast, which has one size because nobody knows the length before: as cheap as a few bytes."""
_LENGTH_BYTES = 8
_ROOM = FIRST_BYTES - _LENGTH_BYTES


def tell(ranks: Ranks, data: bytes) -> None:
    """From rank 0; the others call `hear` for each."""
    first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_ROOM]
    first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    ranks.broadcast(first)
    if len(data) > _ROOM:
        ranks.broadcast(torch.frombuffer(bytearray(data[_ROOM:]), dtype=torch.uint8))


def hear(ranks: Ranks) -> bytes:
    """What rank 0 tells, as soon as it does."""
    first = ranks.broadcast(torch.empty(FIRST_BYTES, dtype=torch.uint8)).numpy().tobytes()
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    data = first[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if length > _ROOM:
        data += ranks.broadcast(torch.empty(length - _ROOM, dtype=torch.uint8)).numpy().tobytes()
    return data
