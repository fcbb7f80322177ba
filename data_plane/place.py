"""A worker's place at an engine: alone, or as one rank of a group that meets first. Knows no signals and no retries."""

import logging
import secrets
from collections.abc import Callable, Iterator
from threading import Event
from typing import Protocol

from blockplane.data_plane.engine_stream import EngineStream, Received
from blockplane.data_plane.ranks.collectives import Ranks
from blockplane.data_plane.ranks.handed_on import handed_on, heard
from blockplane.data_plane.ranks.process_ranks import ProcessRanks
from blockplane.data_plane.ranks.watchdog import Watchdog
from blockplane.data_plane.served_model import ServedModel, expect
from blockplane.protos import wire
from blockplane.v1 import engine_pb2 as pb

logger = logging.getLogger(__name__)

Hello = Callable[[ServedModel], pb.WorkerHello]


class Place(Protocol):
    """What differs between a worker alone and a rank.

    Attributes:
        boot_id: 64 random bits, of this process: as long as they are the same its KV may still be there.
        model: None = it is loaded once the ranks have met.
        answers: whether it is this process that tells the engine what comes of its messages.
        has_peers: whether others wait for it: a start that fails is then the end of the process.
    """

    @property
    def boot_id(self) -> int: ...

    @property
    def model(self) -> ServedModel | None: ...

    @property
    def answers(self) -> bool: ...

    @property
    def has_peers(self) -> bool: ...

    def first_message(self, hello: Hello, /) -> pb.AttachWorkerRequest:
        """What a stream begins with."""
        ...

    def enter(self, stream: EngineStream, hello: Hello, /) -> ServedModel | None:
        """Do what comes before the configuration, the hello included; None = the stream ended before."""
        ...

    def messages(self, stream: EngineStream, /) -> Iterator[Received]:
        """What is to be done once configured; raises as iterating the stream does."""
        ...

    def leave(self) -> None:
        """The attach is over."""
        ...

    def told_to_end(self) -> None:
        """A signal has come, of which the main thread may not know yet; from any thread."""
        ...


class Single:
    """A worker that is a group by itself."""

    answers, has_peers = True, False

    def __init__(self, model: ServedModel) -> None:
        self.boot_id = secrets.randbits(64)
        self.model: ServedModel | None = model
        self._model = model

    def first_message(self, hello: Hello) -> pb.AttachWorkerRequest:
        return pb.AttachWorkerRequest(hello=hello(self._model))

    def enter(self, *_: object) -> ServedModel:
        return self._model

    def messages(self, stream: EngineStream) -> Iterator[Received]:
        return iter(stream)

    def leave(self) -> None:
        """Nobody else is there."""

    def told_to_end(self) -> None:
        """The main thread hears of it."""


class Member:
    """One rank of a group: it joins, meets the others, loads its part of the model once, and says hello."""

    has_peers = True

    def __init__(self, ranks: ProcessRanks, load: Callable[[Ranks], ServedModel]) -> None:
        self.boot_id = secrets.randbits(64)
        self.model: ServedModel | None = None
        self.answers = ranks.rank == 0
        self._ranks, self._load = ranks, load
        self._watchdog: Watchdog | None = None
        self._is_told = Event()

    def first_message(self, *_: object) -> pb.AttachWorkerRequest:
        ranks = self._ranks
        join = pb.JoinRanks(
            protocol_version=wire.PROTOCOL_VERSION,
            group_name=ranks.group,
            rank=ranks.rank,
            address=ranks.address,
            boot_id=self.boot_id,
        )
        return pb.AttachWorkerRequest(join=join)

    def enter(self, stream: EngineStream, hello: Hello) -> ServedModel | None:
        """Raises as `ProcessRanks.meet` does, or as loading does."""
        ranks = self._ranks
        self._watchdog = Watchdog(lambda: ranks.waits, stream.has_ended, self._is_told)
        received = next(iter(stream), None)
        if received is None:
            return None
        expect(received[0], "rendezvous")
        ranks.meet(received[0].rendezvous)
        logger.info("rank %d of group %s has met the %d others", ranks.rank, ranks.group, ranks.world_size - 1)
        if self.model is None:
            self.model = self._load(ranks)
        stream.send(pb.AttachWorkerRequest(hello=hello(self.model)))
        return self.model

    def messages(self, stream: EngineStream) -> Iterator[Received]:
        return (handed_on if self.answers else heard)(stream, self._ranks)

    def leave(self) -> None:
        self._ranks.leave()
        if self._watchdog is not None:
            self._watchdog.stop()

    def told_to_end(self) -> None:
        self._is_told.set()
