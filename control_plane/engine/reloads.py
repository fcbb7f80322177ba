"""Weights read anew, one worker after another, each empty meanwhile. Knows neither gRPC nor files.

While it is under way, and after one that failed half way, workers differ in their weights. A request that has output
then goes on where its weights are, if it can; else it is computed anew with others, and what it said stays said.
"""

import asyncio
import logging
from collections.abc import Callable

from blockplane.control_plane.engine.drains import POLL_SECONDS
from blockplane.control_plane.engine.group import RELOADING, WorkerGroup
from blockplane.control_plane.engine.groups import Groups
from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.placement import Placement
from blockplane.protos.errors import ConfigurationError, DuplicateError, ModelError, UnavailableError

logger = logging.getLogger(__name__)


class Reloads:
    """One at a time."""

    def __init__(
        self, groups: Groups, placement: Placement, announce: Callable[[], None], drain_seconds: float
    ) -> None:
        """`announce` as `Drains` has it.

        `drain_seconds`: how long requests may take to end where they are, before they go on with other weights.
        """
        self._groups, self._placement, self._announce = groups, placement, announce
        self._drain_seconds = drain_seconds
        self._is_running = False
        self._before: set[bytes] = set()
        """Fingerprints of the weights that there were before, until a reload has gone well."""
        self._told: set[int] = set()
        """Boot ids of the workers that may have others than they last said, until then."""

    def expects(self, hello: Hello) -> bool:
        """Whether a worker may attach whose weights are none of those that are here: it comes back into a reload."""
        return hello.model_fingerprint in self._before or hello.boot_id in self._told

    async def reload(self, model: str) -> list[int]:
        """Have all groups read their weights from `model`, empty = where they did before. Returns their numbers.

        Cancelled, it leaves those that were not told yet as they are.

        Raises:
            DuplicateError: another one is under way.
            UnavailableError: no worker is attached, or one was lost while it read.
            ConfigurationError: a worker does not know how.
            ModelError: a worker has kept its weights, or two have read different ones.
        """
        if self._is_running:
            raise DuplicateError("a reload is under way; wait for its end.")
        groups = [group for group in self._groups if not group.is_leaving]
        if not groups:
            raise UnavailableError("no worker is attached that could read weights; retry once one is.")
        for group in groups:
            _check_can_reload(group)
        self._is_running = True
        self._before |= {group.hello.model_fingerprint for group in groups}
        try:
            reloaded = await self._reload_each(model)
        finally:
            self._is_running = False
        self._before.clear()
        self._told.clear()
        return sorted(group.number for group in reloaded)

    async def _reload_each(self, model: str) -> list[WorkerGroup]:
        """Also of those that attach meanwhile. Returns the groups that have the new weights."""
        boot_ids: set[int] = set()

        def remaining() -> WorkerGroup | None:
            return next(
                (each for each in self._groups if not (each.is_leaving or each.hello.boot_id in boot_ids)), None
            )

        while (group := remaining()) is not None:
            if await self._empty(group):
                await self._read(group, model)
                boot_ids.add(group.hello.boot_id)
        reloaded = [group for group in self._groups if group.hello.boot_id in boot_ids]
        for other in reloaded[1:]:
            if not other.hello.has_weights_of(reloaded[0].hello):
                raise ModelError(
                    f"workers {reloaded[0].number} and {other.number} have read different weights; give both the same"
                    " files, and reload again."
                )
        return reloaded

    async def _empty(self, group: WorkerGroup) -> bool:
        """Have a group's requests end or go; False = it is lost."""
        while not group.is_lost and (not group.is_ready or RELOADING in group.emptied_for):
            await asyncio.sleep(POLL_SECONDS)
        if group.is_lost:
            return False
        _check_can_reload(group)
        group.emptied_for.add(RELOADING)
        self._placement.empty(group)
        self._announce()
        try:
            if not await _is_empty_within(self._drain_seconds, group):
                group.may_finish = False
                self._placement.empty(group)
                await _is_empty_within(None, group)
        except asyncio.CancelledError:
            self._serve_again(group)
            raise
        return not group.is_lost

    async def _read(self, group: WorkerGroup, model: str) -> None:
        self._told.add(group.hello.boot_id)
        group.begin_reload(model)
        while not group.is_lost and RELOADING in group.emptied_for:
            await asyncio.sleep(POLL_SECONDS)
        if group.is_lost:
            raise UnavailableError(
                f"worker {group.number} was lost while it read weights; reload again once it is back."
            )
        if group.reload_failure:
            raise ModelError(f"worker {group.number} has kept its weights: {group.reload_failure}")

    def answered(self, group: WorkerGroup, model_fingerprint: bytes, failure: str) -> None:
        """A worker has read its weights, or kept those it had, and says why; it serves again.

        Raises:
            ProtocolError: nobody told it to.
        """
        group.end_reload(model_fingerprint, failure)
        if failure:
            logger.error("worker %d has kept its weights: %s", group.number, failure)
        else:
            logger.info("worker %d has new weights, fingerprint %s", group.number, model_fingerprint.hex()[:16])
        self._serve_again(group)

    def _serve_again(self, group: WorkerGroup) -> None:
        if group.is_lost:
            return
        group.emptied_for.discard(RELOADING)
        group.may_finish = True
        self._placement.welcome(group)
        self._announce()


def _check_can_reload(group: WorkerGroup) -> None:
    if not group.hello.reloads_weights:
        raise ConfigurationError(
            f"worker {group.number} at {group.peer or 'an unknown address'} cannot read its weights anew; run this"
            " version of Blockplane there, or restart it with the new ones."
        )


async def _is_empty_within(seconds: float | None, group: WorkerGroup) -> bool:
    """Wait until a group has no requests or is lost; `seconds`: so long at most. Returns whether it is so."""
    loop = asyncio.get_running_loop()
    give_up_at = None if seconds is None else loop.time() + seconds
    while not group.is_lost and not group.is_empty:
        if give_up_at is not None and loop.time() >= give_up_at:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True
