"""The prefix cache's events survive the wire unchanged; what no peer of ours sends is a protocol error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_values import CUT, int32, seeds, sent

from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEventBatch
from blockplane.protos.kv_events_wire import kv_event_batch_from_proto, kv_event_batch_to_proto
from blockplane.v1 import engine_pb2 as pb

int64 = st.sampled_from([0, -1, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
hashes = st.lists(int64, max_size=4).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> KVEventBatch:
    block_size = draw(st.integers(1, 3))

    def stored(block_hashes: tuple[int, ...], parent: int | None) -> BlocksStored:
        num_tokens = len(block_hashes) * block_size
        tokens = draw(st.lists(int32, min_size=num_tokens, max_size=num_tokens))
        return BlocksStored(block_hashes, parent, np.array(tokens, "<i4").tobytes())

    events = st.one_of(
        st.builds(stored, hashes, st.none() | int64),
        st.builds(BlocksRemoved, hashes),
        st.just(AllBlocksCleared()),
    )
    return KVEventBatch(draw(seeds), draw(seeds), block_size, tuple(draw(st.lists(events, max_size=4))))


@given(batches())
def test_a_batch_survives_the_wire(batch: KVEventBatch) -> None:
    assert kv_event_batch_from_proto(sent(kv_event_batch_to_proto(batch))) == batch


def test_ids_are_little_endian_int64() -> None:
    proto = kv_event_batch_to_proto(KVEventBatch(1, 1, 1, (BlocksRemoved((1, -2)),)))
    assert proto.events[0].removed.block_hashes == b"\1" + b"\0" * 7 + b"\xfe" + b"\xff" * 7


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (pb.KVEvent(), "no kind"),
        (pb.KVEvent(removed=pb.BlocksRemoved(block_hashes=CUT)), "int64"),
        (pb.KVEvent(stored=pb.BlocksStored(block_hashes=CUT)), "int64"),
        (pb.KVEvent(stored=pb.BlocksStored(block_hashes=bytes(8), token_ids=CUT)), "7 bytes of token ids"),
        (pb.KVEvent(stored=pb.BlocksStored(block_hashes=bytes(8), token_ids=bytes(4))), "1 stored blocks of 2 tokens"),
    ],
)
def test_what_no_peer_of_ours_sends_is_refused(event: pb.KVEvent, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        kv_event_batch_from_proto(pb.WatchKVEventsResponse(epoch=1, sequence=1, block_size=2, events=[event]))
