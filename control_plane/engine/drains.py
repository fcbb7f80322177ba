"""Which workers an operator wants empty: they stay attached and serve again when told to. Knows no gRPC."""

import asyncio
from collections.abc import Callable

from blockplane.control_plane.engine.group import DRAINING, WorkerGroup
from blockplane.control_plane.engine.groups import Groups
from blockplane.control_plane.engine.placement import Placement
from blockplane.protos.errors import AbortedError, NotFoundError

POLL_SECONDS = 0.05


class Drains:
    """Kept by boot id: a worker that loses its stream and attaches anew is drained still, one that restarts is not."""

    def __init__(self, groups: Groups, placement: Placement, announce: Callable[[], None]) -> None:
        """`announce` tells the frontends if what is served has changed."""
        self._groups, self._placement, self._announce = groups, placement, announce
        self._boot_ids: set[int] = set()

    def attached(self, group: WorkerGroup) -> None:
        """A worker has attached; it may have been drained before."""
        if group.hello.boot_id in self._boot_ids:
            group.emptied_for.add(DRAINING)

    def detached(self, group: WorkerGroup) -> None:
        """A worker is gone; one that wanted to go does not come back."""
        if group.is_leaving:
            self._boot_ids.discard(group.hello.boot_id)

    async def drain(self, number: int) -> None:
        """Give a group no new requests and return once it has none left; cancelled, it goes on being drained.

        Raises:
            NotFoundError: no worker is attached under that number.
            AbortedError: it was told to serve again meanwhile.
        """
        group = self._group(number)
        if group.hello.boot_id:
            self._boot_ids.add(group.hello.boot_id)
        group.emptied_for.add(DRAINING)
        self._placement.empty(group)
        self._announce()
        while not group.is_lost and not group.is_empty:
            if DRAINING not in group.emptied_for:
                raise AbortedError(f"worker {number} was told to serve again before it was empty.")
            await asyncio.sleep(POLL_SECONDS)

    def undrain(self, number: int) -> None:
        """Let a group serve again, whether it was drained or not.

        Raises:
            NotFoundError: no worker is attached under that number.
        """
        group = self._group(number)
        self._boot_ids.discard(group.hello.boot_id)
        group.emptied_for.discard(DRAINING)
        self._placement.welcome(group)
        self._announce()

    def _group(self, number: int) -> WorkerGroup:
        group = self._groups.get(number)
        if group is None:
            numbers = ", ".join(str(each.number) for each in self._groups) or "none"
            raise NotFoundError(f"no worker {number} is attached; those that are: {numbers}.")
        return group
