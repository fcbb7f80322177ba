"""One request on its way between two worker groups, and what is held for it at either; decides nothing."""

import asyncio
from dataclasses import dataclass, field

from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.moved_blocks import Lease, Room
from blockplane.control_plane.engine.request import Request
from blockplane.protos.transfer import Fetch


@dataclass(slots=True, eq=False)
class Transfer:
    """From the moment when it leaves its row until its blocks are nobody's business any more.

    Attributes:
        lease: of the source's blocks that are read.
        room: the target's, held until its worker has answered or is lost.
        after_step: the target's last step that may still touch what is its room now.
        unanswered: the target's ranks from which an answer is to come.
        is_awaited: the request waits for it; else it has ended, or goes on without.
        is_void: what the blocks hold is not to be found any more, whatever becomes of them.
    """

    request: Request
    source: WorkerGroup
    target: WorkerGroup
    lease: Lease
    room: Room
    fetch: Fetch
    after_step: int
    began_at: float
    unanswered: set[int] = field(default_factory=set)
    failure: str = ""
    is_sent: bool = False
    is_awaited: bool = True
    is_void: bool = False
    alarm: asyncio.TimerHandle | None = None
