"""One process of a worker group and its stream, from its coming to its end. Knows neither its peers nor gRPC."""

import asyncio
from collections import deque

from blockplane.control_plane.engine.signs_of_life import SignsOfLife
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.plan import Configure
from blockplane.protos.transfer import Fetch


class Rank:
    """A worker that is alone is rank 0 of its group.

    Attributes:
        number: from 0 on, among those of its group.
        peer: whence its stream comes, as gRPC names peers.
        boot_id: drawn when the process started; 0 = it does not say.
        signs: of life.
        work: set whenever there may be something to say to it; its stream's driver waits for it and clears it.
        configure: what it is to build; None = that is not decided yet.
        is_ready: it has built that.
        fetches: what it is to read from its counterparts in other groups and was not told yet, the oldest first.
        is_ended: its stream ends, or has ended.
        error: what its stream ends with; None = it ends well, or it lives.
    """

    def __init__(self, number: int, boot_id: int, signs: SignsOfLife, peer: str = "") -> None:
        self.number, self.boot_id, self.signs, self.peer = number, boot_id, signs, peer
        self.work = asyncio.Event()
        self.configure: Configure | None = None
        self.is_ready = self.is_ended = False
        self.fetches: deque[Fetch] = deque()
        self.error: BlockplaneError | None = None

    def end(self, error: BlockplaneError | None) -> None:
        """Have its stream end, by this error or well; only the first reason holds."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
            self.work.set()

    @property
    def described(self) -> str:
        """It, for a sentence about its group."""
        return f"rank {self.number} at {self.peer or 'an unknown address'}"
