"""Which group serves which request, who is held meanwhile, and who moves. Knows neither frontends nor steps.

A request is at one group, or it moves between two with its blocks, or it is held: while no group is ready, or since it
may have killed a worker and others that may have are on trial first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from blockplane.control_plane.engine.group import RELOADING, WorkerGroup
from blockplane.control_plane.engine.groups import Groups
from blockplane.control_plane.engine.homes import Homes
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.step import StepOutputs
from blockplane.control_plane.engine.suspects import MAX_LOSSES_ALONE, Suspects
from blockplane.control_plane.engine.transfers import Transfers
from blockplane.protos.errors import (
    BlockplaneError,
    CapacityError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
    UnsupportedError,
    WorkerKilledError,
)

logger = logging.getLogger(__name__)


class Placement:
    """With its `transfers` the only one that puts requests into schedulers and takes them out before their time.

    Attributes:
        transfers: to groups that take decodes.
    """

    def __init__(
        self,
        groups: Groups,
        hold_seconds: float,
        fail: Callable[[Request, BlockplaneError], None],
        max_imbalance_percent: int = 20,
        *,
        clock: Callable[[], float] = time.monotonic,
        transfer_seconds: float = 30.0,
    ) -> None:
        """`fail` ends a request, which calls `remove`. `hold_seconds`: how long requests wait for a group at most.
        `max_imbalance_percent` is what `in_order_of_choice` has it for, `transfer_seconds` the limit of `Transfers`.
        """
        self._groups, self._hold_seconds, self._fail = groups, hold_seconds, fail
        self._held: dict[Request, None] = {}
        self.transfers = Transfers(groups, self._in_order, self._go_on, clock, transfer_seconds)
        self._suspects = Suspects()
        self._homes = Homes(groups, max_imbalance_percent)
        self._trial: WorkerGroup | None = None
        """The group that the suspects' cohort is at."""
        self._model_name = ""
        self._stop_holding: asyncio.TimerHandle | None = None
        """Armed while requests are held and no group is ready; a worker that comes and fails does not put it off."""

    @property
    def num_held(self) -> int:
        return len(self._held) + self.transfers.num_moving

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], now: float) -> None:
        """Queue the samples of a new prompt at one group, the first in order of choice that has room.

        Raises:
            UnavailableError: no group serves.
            CapacityError, InvalidRequestError: as every group's scheduler says.
            UnsupportedError: no group's worker knows what they ask for.
        """
        error: BlockplaneError = UnavailableError("no worker is ready; retry once the service's health is SERVING.")
        for group, num_shared in self._in_order(requests[0], self._groups.may_begin()):
            try:
                group.check_can_serve(requests[0])
                self._homes.expect(requests, num_shared, group)
                group.scheduler.add(requests, now)
            except UnsupportedError as refusal:
                # What another group says of room is the better answer.
                error = refusal if isinstance(error, UnavailableError) else error
                continue
            except (CapacityError, InvalidRequestError) as refusal:
                # That none may wait is said only where it is so at every group.
                is_said = isinstance(refusal, QueueFullError) and isinstance(error, CapacityError | InvalidRequestError)
                error = error if is_said else refusal
                continue
            for request in requests:
                request.group = group.number
            self._homes.came(requests, num_shared, group)
            group.work.set()
            return
        raise error

    def restore(self, requests: Sequence[Request], model_name: str) -> None:
        """Hold requests of an earlier engine until a group of their model is ready."""
        self._model_name = model_name
        self._hold(requests)
        self._arm_stop()

    def remove(self, request: Request) -> None:
        """A request has ended, or is to end now, wherever it is."""
        if request.group is None:
            self._held.pop(request, None)
            self.transfers.drop(request)
            request.ended = True
            self._arm_stop()
        else:
            group = self._groups[request.group]
            group.live_keys.go(request)
            if not request.ended:
                group.scheduler.end(request)
            group.work.set()
        self._clear([request])

    def park(self, request: Request) -> None:
        """Let a request neither run nor wait until `unpark`; it is no suspect meanwhile, for whom others would wait."""
        if request.group is None:
            request.is_parked = True
        else:
            self._groups[request.group].scheduler.park(request)
            self._groups[request.group].work.set()
        self._clear([request])

    def unpark(self, request: Request) -> None:
        """Let a parked request go on."""
        if request.group is None:
            request.is_parked = False
        else:
            self._groups[request.group].scheduler.unpark(request)
            self._groups[request.group].work.set()

    def answered(self, group: WorkerGroup, outputs: StepOutputs) -> None:
        """Whoever got a token has not killed the worker."""
        if group is self._trial:
            got = set(zip(outputs.owners.tolist(), outputs.stream_ids.tolist(), strict=True))
            self._clear([one for one in self._suspects.cohort if (one.owner, one.stream_id) in got])
        self.transfers.answered(group)
        if group.emptied_for:
            self.empty(group)

    # -- groups come and go --------------------------------------------------------------------------------------------

    def welcome(self, group: WorkerGroup) -> None:
        """A group serves from now on: whoever is held goes on, and others give it of those that wait."""
        group.work.set()
        name = group.model.name
        if self._model_name not in ("", name):
            gone = UnavailableError(f"the model {self._model_name} is no longer served; {name} is.")
            for request in tuple(self._held):
                self._fail(request, gone)
        self._model_name = name
        self._homes.joined()
        self.transfers.groups_changed()
        self._settle()
        self._share_with(group)
        for other in self._groups:
            if other.emptied_for:
                self.empty(other)

    def lose(self, group: WorkerGroup) -> None:
        """A group's worker is gone: its requests go on elsewhere, or are held; those that it may have died of wait."""
        going_on = self.transfers.lost(group)
        unfinished, unanswered = group.scheduler.lose()
        self._groups.lose(group)
        self._hold(unfinished, group)
        self.transfers.groups_changed()
        for request, target in going_on:
            self._go_on(request, target)
        for request in self._suspects.lost(unanswered):
            self._fail(
                request,
                WorkerKilledError(
                    f"request {request.request_id} was alone in the step {MAX_LOSSES_ALONE} times when its worker died,"
                    " and is taken to be the cause; change it before you send it again."
                ),
            )
        self._settle()

    def empty(self, group: WorkerGroup) -> None:
        """A group is to serve no more: its requests move once its steps are answered, or end there if none can.

        Where others serve, but with other weights, only those move that have not begun.
        """
        self.transfers.groups_changed()
        scheduler, ends_there = group.scheduler, self._ends_there(group)
        if not ends_there and not group.has_in_flight:
            self._hold(scheduler.unfinished(), group)
            self._settle()
        elif scheduler.waiting and self._groups.may_serve():
            self._hold(scheduler.give_away(len(scheduler.waiting), begun_too=not ends_there), group)
            self._settle()
        # Its driver looks whether anything is left.
        group.work.set()

    def may_plan(self, group: WorkerGroup) -> bool:
        """Whether a group's requests are to be computed on: not if they are about to move."""
        return not group.emptied_for or self._ends_there(group)

    def _ends_there(self, group: WorkerGroup) -> bool:
        """Whether what has begun at a group that is emptied may end there, and nobody goes on with the same weights."""
        return group.may_finish and not any(
            other.hello.has_weights_of(group.hello) for other in self._groups.may_serve()
        )

    def _share_with(self, group: WorkerGroup) -> None:
        """Give a group that has nothing to do its share of what waits at each of the others."""
        serving = self._groups.may_begin()
        for other in serving if group in serving else ():
            if other is not group and other is not self._trial:
                self._hold(other.scheduler.give_away(len(other.scheduler.waiting) // len(serving)), other)
        self._settle()

    # -- held requests -------------------------------------------------------------------------------------------------

    def _hold(self, requests: Iterable[Request], group: WorkerGroup | None = None) -> None:
        """`group`: where they were; None = at none."""
        for request in requests:
            request.group = None
            if group is not None:
                group.live_keys.go(request)
                request.weights = group.hello.model_fingerprint
            self._held[request] = None

    def _settle(self) -> None:
        """Let go on whoever is held and may."""
        serving = self._groups.may_begin()
        if serving and self._held:
            loads = {group: group.scheduler.num_to_compute for group in serving}
            for request in sorted(self._held, key=lambda request: request.rank):
                # One that fails may have let others go on meanwhile.
                if request in self._held and (choice := self._choose(request, loads)) is not None:
                    group, num_shared = choice
                    self._resume(request, num_shared, group)
                    loads[group] = group.scheduler.num_to_compute
        self._arm_stop()

    def _resume(self, request: Request, num_shared: int, group: WorkerGroup) -> None:
        self._homes.expect([request], num_shared, group)
        try:
            group.resume(request)
        except (CapacityError, InvalidRequestError, UnsupportedError) as error:
            self._fail(request, error)
        else:
            del self._held[request]
            self._homes.came([request], num_shared, group)

    def _go_on(self, request: Request, group: WorkerGroup | None) -> None:
        """Have a request served that has moved: at that group, or, if that may not serve, as one that is held."""
        self._held[request] = None
        if group is not None and group.may_serve:
            blocks = group.scheduler.blocks
            _, num_shared = blocks.num_leading(request, group.live_keys)
            self._resume(request, num_shared * blocks.block_size, group)
        else:
            self._settle()

    def _choose(self, request: Request, loads: Mapping[WorkerGroup, int]) -> tuple[WorkerGroup, int] | None:
        """The group that a held request is to go on at, and what it shares there; None = it is not its turn."""
        if request not in self._suspects:
            # Where none can, the one that is asked says so; where none has its weights, others compute it anew.
            able = [group for group in loads if group.can_serve(request)] or list(loads)
            alike = [group for group in able if group.goes_on_with(request)]
            return self._in_order(request, alike or able, loads)[0]
        if request not in self._suspects.cohort:
            return None
        if self._trial is None or self._trial not in loads:
            self._trial = min(loads, key=lambda group: group.scheduler.rows.num_running)
        return self._trial, 0

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _in_order(
        self, request: Request, groups: Sequence[WorkerGroup], loads: Mapping[WorkerGroup, int] | None = None
    ) -> list[tuple[WorkerGroup, int]]:
        """Groups that may take a request, the best first, and how many leading tokens it shares there.

        A group on trial is the last choice, for it may fall. `loads`: as `Homes.in_order` has them.
        """
        order = self._homes.in_order(request, groups, loads)
        return sorted(order, key=lambda choice: choice[0] is self._trial) if self._trial is not None else order

    def _clear(self, requests: Collection[Request]) -> None:
        """These are no suspects any more."""
        if requests and self._suspects.clear(requests):
            self._trial = None
            self._settle()

    def _arm_stop(self) -> None:
        # Whoever reads weights shows that it lives, and serves again then.
        may_come = any(RELOADING in group.emptied_for for group in self._groups)
        is_stuck = bool(self._held) and not may_come and not self._groups.may_serve()
        if self._stop_holding is not None and not is_stuck:
            self._stop_holding.cancel()
            self._stop_holding = None
        if self._stop_holding is None and is_stuck:
            logger.warning("no worker is left; %d requests wait for one", len(self._held))
            self._stop_holding = asyncio.get_running_loop().call_later(self._hold_seconds, self._give_up)

    def _give_up(self) -> None:
        self._stop_holding = None
        for request in tuple(self._held):
            self._fail(request, UnavailableError(f"no worker came within {self._hold_seconds} s; send it again."))
