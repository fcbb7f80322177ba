"""The engine's messages on their way through a group: it tells rank 0, which tells the others. Knows not what they say.

While there is nothing to tell the others get an empty tick now and then: whoever waits in a collective hears no signal.
"""

import time
from collections.abc import Iterator

from blockplane.data_plane.engine_stream import EngineStream, Received
from blockplane.data_plane.ranks.collectives import Ranks
from blockplane.data_plane.ranks.messages import hear, tell
from blockplane.v1 import engine_pb2 as pb

_TICK = b""


def handed_on(stream: EngineStream, ranks: Ranks) -> Iterator[Received]:
    """What the engine tells rank 0, each message once the others have it. Raises as iterating the stream does."""
    for received in stream.with_idle_moments():
        tell(ranks, _TICK if received is None else received[2])
        if received is not None:
            yield received


def heard(stream: EngineStream, ranks: Ranks) -> Iterator[Received]:
    """What rank 0 tells this rank, until its own stream ends. Raises as iterating that does."""
    while not stream.has_ended.is_set():
        data = hear(ranks)
        if data != _TICK:
            yield pb.AttachWorkerResponse.FromString(data), time.monotonic_ns(), data
    yield from stream
