"""Requests that move to another worker group with their KV blocks: when, where to, and what becomes of them.

A prompt is computed at a group of role `prefill`. Once its first token is answered its row stands, until a group that
takes decodes has room: then the request leaves the row, its whole computed blocks stay held there, and so is room at
the target; the target's worker reads them, and whoever comes first, its answer, the time's end or the loss of a side,
lets the request go on. It goes on with its blocks only after the worker has said that it has them. Knows no gRPC.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.groups import Groups
from blockplane.control_plane.engine.moved_blocks import Room, lease_computed, make_room
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.taking_over import can_take, fits, has_what_moves
from blockplane.control_plane.engine.transfer import Transfer
from blockplane.protos.errors import ProtocolError, UnavailableError
from blockplane.protos.histogram import Histogram
from blockplane.protos.trace_context import trace_mark
from blockplane.protos.transfer import Fetch

logger = logging.getLogger(__name__)

TRANSFER_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

GoOn: TypeAlias = Callable[[Request, WorkerGroup | None], None]
InOrder: TypeAlias = Callable[
    [Request, Sequence[WorkerGroup], Mapping[WorkerGroup, int]], Iterable[tuple[WorkerGroup, int]]
]


class Transfers:
    """The only one that moves requests with their blocks.

    Attributes:
        num_transfers, num_failed_transfers, num_transferred_blocks: as `EngineStatistics` has them.
        seconds: that requests were at no group for it, of those that went on with their blocks.
    """

    def __init__(
        self, groups: Groups, in_order: InOrder, go_on: GoOn, clock: Callable[[], float], limit: float
    ) -> None:
        """
        Args:
            in_order: groups that may take a request, of these loads, the best first.
            go_on: has a request that moved served, at that group if it may serve.
            limit: seconds that a move may take in all; for the first half of them its row may stand.
        """
        self._groups, self._in_order, self._go_on, self._clock, self._limit = groups, in_order, go_on, clock, limit
        self._targets: dict[WorkerGroup, list[WorkerGroup]] = {}
        """Where the requests of a group can go whose prompts are computed there."""
        self._standing: dict[Request, asyncio.TimerHandle] = {}
        """Those that found no room yet, and what ends their waiting. It may be over otherwise meanwhile."""
        self._moving: dict[Request, Transfer] = {}
        self._transfers: dict[int, Transfer] = {}
        """By id, those that somebody still is to answer for too."""
        self._num_unsent = 0
        self.num_transfers = self.num_failed_transfers = self.num_transferred_blocks = 0
        self.seconds = Histogram(TRANSFER_SECONDS)

    @property
    def num_moving(self) -> int:
        """Requests that are at no group since their blocks move."""
        return len(self._moving)

    # -- groups come, go and answer ------------------------------------------------------------------------------------

    def groups_changed(self) -> None:
        """Some group has come, gone, or serves otherwise: find out anew who hands over to whom."""
        serving = self._groups.may_serve()
        self._targets = {
            group: [each for each in serving if can_take(each, group)]
            for group in self._groups
            if not group.hello.takes_decodes
        }
        for group, targets in self._targets.items():
            group.scheduler.hand_over(bool(targets))
        self._retry()

    def answered(self, group: WorkerGroup) -> None:
        """A group has answered a step: prompts may be computed, blocks may be out of its plans' reach, or be free."""
        if self._num_unsent:
            for transfer in [each for each in self._transfers.values() if each.target is group]:
                self._send(transfer)
        if group in self._targets:
            self._hand_over(group)
        elif self._standing:
            self._retry()

    def lost(self, group: WorkerGroup) -> list[tuple[Request, WorkerGroup | None]]:
        """A group's worker is gone, and what it had or was to get is no more.

        Returns:
            the requests that moved from it or to it, each with the group at which it is to go on, None = at any.
        """
        going_on: list[tuple[Request, WorkerGroup | None]] = []
        for transfer in [each for each in self._transfers.values() if group in (each.source, each.target)]:
            if transfer.is_awaited:
                self._fail(transfer, f"worker {group.number} is lost")
                going_on.append((transfer.request, None if group is transfer.target else transfer.target))
            if group is transfer.target or not transfer.is_sent:
                self._forget(transfer)
        return going_on

    def distrust(self) -> None:
        """Nothing is to be found that was computed until now: what moves is not published."""
        for transfer in self._transfers.values():
            transfer.is_void = True

    # -- rows that stand -----------------------------------------------------------------------------------------------

    def _retry(self) -> None:
        for group in list(self._targets):
            self._hand_over(group)

    def _hand_over(self, source: WorkerGroup) -> None:
        """Have requests leave a group whose prompts are computed; the first that finds no room has the others wait."""
        has_room, targets = True, self._targets.get(source, [])
        for request in sorted(source.scheduler.standing(), key=lambda request: request.rank):
            able = [group for group in targets if fits(group, request)] if has_what_moves(request) else []
            if not able:
                self._keep(source, request)
            elif not (has_room and self._begin(request, source, able)):
                has_room = False
                if request not in self._standing:
                    loop = asyncio.get_running_loop()
                    self._standing[request] = loop.call_later(self._limit / 2, self._give_up, request)

    def _give_up(self, request: Request) -> None:
        """Nobody had room for a request: it stays, if it still stands."""
        del self._standing[request]
        source = None if request.group is None or request.ended else self._groups.get(request.group)
        if source is not None and request in source.scheduler.standing():
            logger.info("request %s finds no room and stays%s", request.request_id, trace_mark(request.traceparent))
            self._keep(source, request)
            self._hand_over(source)

    def _keep(self, source: WorkerGroup, request: Request) -> None:
        source.scheduler.keep(request)
        source.work.set()

    # -- a transfer's way ----------------------------------------------------------------------------------------------

    def _begin(self, request: Request, source: WorkerGroup, able: list[WorkerGroup]) -> bool:
        """Have a request leave for the first group that has room, of those that can serve it; False = none has now."""
        loads = {group: group.scheduler.num_to_compute + self._load_coming(group) for group in able}
        for target, _ in self._in_order(request, able, loads):
            if (room := self._room_at(target, request)) is not None:
                self._leave(request, source, target, room)
                return True
        return False

    def _coming(self, group: WorkerGroup) -> list[Transfer]:
        """Those of requests that are to go on there."""
        return [each for each in self._moving.values() if each.target is group]

    def _load_coming(self, group: WorkerGroup) -> int:
        return sum(transfer.request.num_to_compute for transfer in self._coming(group))

    def _room_at(self, target: WorkerGroup, request: Request) -> Room | None:
        """Room, and a row; None = there is none now, or another brings the same blocks, which are found there then."""
        scheduler, coming = target.scheduler, self._coming(target)
        num_expected = len(coming) + len(scheduler.waiting)
        if scheduler.rows.num_free <= num_expected:
            return None
        if not all(transfer.room.missing_keys.isdisjoint(request.keys) for transfer in coming):
            return None
        return make_room(scheduler.blocks, request, scheduler.rows.num_running + num_expected)

    def _leave(self, request: Request, source: WorkerGroup, target: WorkerGroup, room: Room) -> None:
        seconds, transport = self._limit, target.hello.transport_from(source.hello)
        assert request.row is not None
        assert transport is not None
        if (alarm := self._standing.pop(request, None)) is not None:
            alarm.cancel()
            seconds /= 2
        lease = lease_computed(source.scheduler.blocks, request.row, room.is_missing)
        fetch = Fetch(
            secrets.randbits(64),
            transport,
            source.hello.transfer_addresses,
            source.configure.epoch,
            lease.block_ids,
            room.block_ids,
            seconds,
        )
        source.scheduler.give_over(request)
        source.live_keys.go(request)
        request.group, request.weights = None, source.hello.model_fingerprint
        request.num_expected_tokens = len(room.is_missing) * room.blocks.block_size
        after_step, is_there = target.scheduler.last_step, not room.block_ids.size
        transfer = Transfer(request, source, target, lease, room, fetch, after_step, self._clock(), is_sent=is_there)
        self._moving[request] = self._transfers[fetch.transfer_id] = transfer
        source.num_transfers += 1
        target.num_transfers += 1
        source.work.set()
        if is_there:
            self._arrive(transfer)
            return
        self._num_unsent += 1
        transfer.alarm = asyncio.get_running_loop().call_later(seconds, self._overdue, transfer)
        self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        """Have the target's worker read the blocks, once no plan of its can touch those that are to hold the same."""
        if not transfer.is_sent and transfer.target.scheduler.num_answered >= transfer.after_step:
            transfer.is_sent = True
            self._num_unsent -= 1
            transfer.unanswered = set(range(len(transfer.target.ranks)))
            transfer.target.begin_fetch(transfer.fetch)

    def fetched(self, group: WorkerGroup, rank: int, transfer_id: int, failure: str) -> None:
        """A rank of a group has answered a fetch; `failure`: why the contents are not there, empty = they are.

        Raises:
            ProtocolError: it was not told to.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.target is not group or rank not in transfer.unanswered:
            raise ProtocolError(
                f"worker {group.number} has answered a fetch that nobody asked rank {rank} for; run the same version on"
                " both."
            )
        transfer.unanswered.remove(rank)
        transfer.failure = transfer.failure or failure
        if transfer.unanswered:
            return
        if not transfer.is_awaited:
            self._forget(transfer)
        elif transfer.failure or transfer.is_void:
            self._fail(transfer, transfer.failure or "the prefix cache was reset")
            self._forget(transfer)
            self._go_on(transfer.request, group)
        else:
            self._arrive(transfer)
        self._retry()

    def _arrive(self, transfer: Transfer) -> None:
        """The blocks are there."""
        transfer.room.publish()
        self.num_transfers += 1
        self.num_transferred_blocks += len(transfer.room.block_ids)
        self.seconds.observe(self._clock() - transfer.began_at)
        self._let_go(transfer)
        self._forget(transfer)
        self._go_on(transfer.request, transfer.target)

    def _overdue(self, transfer: Transfer) -> None:
        self._fail(transfer, f"it took longer than {self._limit:.0f} s")
        if transfer.is_sent:
            asyncio.get_running_loop().call_later(self._limit, self._despair, transfer)
        else:
            self._forget(transfer)
        self._go_on(transfer.request, transfer.target)
        self._retry()

    def _despair(self, transfer: Transfer) -> None:
        """Have a worker lost that does not even say that it could not read in time: it has blocks which others need."""
        if transfer.fetch.transfer_id in self._transfers:
            seconds = transfer.fetch.timeout_seconds
            number = transfer.target.number
            transfer.target.ranks[min(transfer.unanswered)].end(
                UnavailableError(
                    f"worker {number} was to read blocks within {seconds:.0f} s and did not say how it went."
                )
            )

    def drop(self, request: Request) -> None:
        """A request has ended that may move."""
        transfer = self._moving.get(request)
        if transfer is not None:
            self._let_go(transfer)
            if not transfer.is_sent:
                self._forget(transfer)

    def _fail(self, transfer: Transfer, reason: str) -> None:
        request, source, target = transfer.request, transfer.source.number, transfer.target.number
        logger.warning(
            "request %s is computed anew, its blocks did not come from worker %d to worker %d: %s%s",
            request.request_id,
            source,
            target,
            reason,
            trace_mark(request.traceparent),
        )
        self.num_failed_transfers += 1
        self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        """The request waits no more: whatever the source's blocks are read for, nobody will look at it."""
        if transfer.alarm is not None:
            transfer.alarm.cancel()
        del self._moving[transfer.request]
        transfer.is_awaited = False
        transfer.lease.release()
        transfer.source.num_transfers -= 1
        transfer.source.work.set()

    def _forget(self, transfer: Transfer) -> None:
        """Nobody writes into the target's blocks any more."""
        del self._transfers[transfer.fetch.transfer_id]
        self._num_unsent -= not transfer.is_sent
        transfer.room.lease.release()
        transfer.target.num_transfers -= 1
        transfer.target.work.set()
