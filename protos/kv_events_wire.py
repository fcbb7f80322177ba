"""The prefix cache's events to protobuf and back; knows neither the cache nor who watches it."""

import struct

from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEventBatch
from blockplane.v1 import engine_pb2 as pb

_INT32_BYTES, _INT64_BYTES = 4, 8


def kv_event_batch_to_proto(batch: KVEventBatch) -> pb.WatchKVEventsResponse:
    return pb.WatchKVEventsResponse(
        epoch=batch.epoch,
        sequence=batch.sequence,
        block_size=batch.block_size,
        events=[_event_to_proto(event) for event in batch.events],
        group=batch.group,
    )


def kv_event_batch_from_proto(proto: pb.WatchKVEventsResponse) -> KVEventBatch:
    """Raises ProtocolError if an event is of no known kind, or its columns do not belong together."""
    events = tuple(_event_from_proto(event, proto.block_size) for event in proto.events)
    return KVEventBatch(proto.epoch, proto.sequence, proto.block_size, events, proto.group)


def _event_to_proto(event: KVEvent) -> pb.KVEvent:
    if isinstance(event, BlocksStored):
        stored = pb.BlocksStored(
            block_hashes=_hashes_to_bytes(event.block_hashes),
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_bytes,
        )
        return pb.KVEvent(stored=stored)
    if isinstance(event, BlocksRemoved):
        return pb.KVEvent(removed=pb.BlocksRemoved(block_hashes=_hashes_to_bytes(event.block_hashes)))
    return pb.KVEvent(cleared=pb.AllBlocksCleared())


def _event_from_proto(proto: pb.KVEvent, block_size: int) -> KVEvent:
    kind = proto.WhichOneof("event")
    if kind == "stored":
        return _stored_from_proto(proto.stored, block_size)
    if kind == "removed":
        return BlocksRemoved(_hashes_from_bytes(proto.removed.block_hashes))
    if kind == "cleared":
        return AllBlocksCleared()
    raise ProtocolError("a KV event is of no kind that is known here; run the same version everywhere.")


def _stored_from_proto(proto: pb.BlocksStored, block_size: int) -> BlocksStored:
    block_hashes = _hashes_from_bytes(proto.block_hashes)
    if len(proto.token_ids) != len(block_hashes) * block_size * _INT32_BYTES:
        raise ProtocolError(
            f"{len(block_hashes)} stored blocks of {block_size} tokens come with {len(proto.token_ids)} bytes of token"
            " ids; run the same version everywhere."
        )
    parent = proto.parent_block_hash if proto.HasField("parent_block_hash") else None
    return BlocksStored(block_hashes, parent, proto.token_ids)


def _hashes_to_bytes(block_hashes: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(block_hashes)}q", *block_hashes)


def _hashes_from_bytes(data: bytes) -> tuple[int, ...]:
    if len(data) % _INT64_BYTES:
        raise ProtocolError(
            f"a column of {len(data)} bytes does not hold whole int64 numbers; check the peer's version."
        )
    return struct.unpack(f"<{len(data) // _INT64_BYTES}q", data)
