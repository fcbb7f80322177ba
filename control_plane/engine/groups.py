"""The workers that are attached, and the caches of those that may come back. Knows no request by name and no gRPC."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import chain, count

from blockplane.control_plane.engine.group import GroupState, WorkerGroup
from blockplane.control_plane.engine.group_counts import GroupCounts
from blockplane.control_plane.engine.hello import Hello
from blockplane.control_plane.engine.kv_events import KVEventFeed, KVWatcher
from blockplane.control_plane.engine.kv_planning import RankKV, plan_kv_cache
from blockplane.control_plane.engine.prefix_cache import draw_secret
from blockplane.control_plane.engine.rank import Rank
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.control_plane.engine.signs_of_life import SignsOfLife
from blockplane.control_plane.engine.step_clock import StepClock
from blockplane.control_plane.engine.step_log import StepLog
from blockplane.control_plane.engine.waiting import WaitingQueue
from blockplane.protos.config import Config
from blockplane.protos.errors import UnavailableError
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import Configure
from blockplane.protos.statistics import EngineStatistics, Statistics

MAX_STEP_CLOCKS = 256
"""So many workers' paces are kept, the latest."""


class Groups:
    """Worker groups from attach to loss. All serve one model, that of the first."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._attached: dict[int, WorkerGroup] = {}
        self._away: dict[int, GroupState] = {}
        """What lost workers may come back to, by their boot ids."""
        self._step_clocks: dict[int, StepClock] = {}
        """By boot id, the latest last."""
        self._feeds: dict[int, KVEventFeed] = {}
        """By number, those of lost groups too until the number is drawn again."""
        self._watchers: set[KVWatcher] = set()
        self._cache_secret = draw_secret()
        """Of all prefix caches: a request's keys mean the same in each group."""
        self._counts: dict[tuple[int, str], GroupCounts] = {}
        """By number and model, of lost groups too."""
        self.num_lost_workers = self.num_dropped_results = 0

    def __getitem__(self, number: int) -> WorkerGroup:
        return self._attached[number]

    def get(self, number: int) -> WorkerGroup | None:
        return self._attached.get(number)

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._attached.values())

    def may_serve(self) -> list[WorkerGroup]:
        """Those to which requests may come."""
        return [group for group in self if group.may_serve]

    def may_begin(self) -> list[WorkerGroup]:
        """Those to which new requests may come: they take prompts, unless none of them serves."""
        serving = self.may_serve()
        return [group for group in serving if group.hello.takes_prompts] or serving

    @property
    def model(self) -> ModelInfo | None:
        """The model that is served; None = no group serves new requests."""
        return next((group.model for group in self if group.may_serve), None)

    def __len__(self) -> int:
        return len(self._attached)

    def of_boot(self, boot_id: int) -> WorkerGroup | None:
        """The group of that process, or of all those processes, as its hello has the id; 0 is nobody's."""
        return next((group for group in self if boot_id and group.hello.boot_id == boot_id), None)

    # -- attach and loss -----------------------------------------------------------------------------------------------

    def attach(
        self, hello: Hello, ranks: tuple[Rank, ...] = (), name: str = "", *, may_differ: bool = False
    ) -> WorkerGroup:
        """A group for a worker, with all that its process had before if it has that still.

        Args:
            ranks: its processes, which are told what to build; none = there is one, whom nobody waits for.
            name: what they call their group.
            may_differ: its weights may be others than those of all that are here.

        Raises:
            ConfigurationError: the settings do not fit the worker, or it has another model than those that are here.
        """
        hello.check_same_model([other.hello for other in self], may_differ=may_differ)
        kept = self._away.get(hello.boot_id)
        if kept is not None and kept.is_kept_by(hello):
            state, last_step = self._away.pop(hello.boot_id), kept.scheduler.last_step
            state.feed.resume()
        else:
            if kept is not None:
                self._forget(hello.boot_id, kept)
                kept = None
            state, last_step = self._new_state(hello, self._plan(hello)), 0
        ranks = ranks or (Rank(0, hello.boot_id, SignsOfLife(self._config.worker_timeout_seconds, self._clock)),)
        epoch, heartbeat = secrets.randbits(64) or 1, self._config.worker_timeout_seconds * 1000 // 3
        for rank, said, configure in zip(ranks, hello.of_each_rank, state.configures, strict=True):
            rank.signs.are_due = said.has_epochs
            rank.configure = replace(
                configure,
                epoch=epoch,
                keeps_kv=kept is not None,
                last_step=last_step,
                heartbeat_milliseconds=heartbeat,
            )
        group = WorkerGroup(hello, ranks, state, self._step_clock(hello.boot_id), name=name, clock=self._clock)
        self._attached[group.number] = group
        return group

    def lose(self, group: WorkerGroup) -> None:
        """Take a group out whose worker is gone; its scheduler has no live request any more."""
        del self._attached[group.number]
        group.is_lost = True
        for rank in group.ranks:
            # Whose end has taken it out has said why.
            rank.end(UnavailableError("the worker has attached anew."))
        group.feed.suspend()
        self.num_lost_workers += group.is_ready and not group.is_leaving
        boot_id, state, seconds = group.hello.boot_id, group.state, self._config.reattach_seconds
        if not boot_id or group.is_leaving:
            self._retire(state)
            return
        self._away[boot_id] = state
        asyncio.get_running_loop().call_later(seconds, self._forget, boot_id, state)

    def _forget(self, boot_id: int, state: GroupState) -> None:
        if self._away.get(boot_id) is state:
            del self._away[boot_id]
            self._retire(state)

    def _retire(self, state: GroupState) -> None:
        """Keep what a scheduler counted that is gone for good."""
        state.counts.past = _sum([state.counts.past, state.statistics()])

    def _plan(self, hello: Hello) -> tuple[Configure, ...]:
        ranks = [RankKV(rank.layers, rank.available_memory) for rank in hello.of_each_rank]
        return plan_kv_cache(self._config, ranks, hello.rules, hello.model.max_model_len)

    def _new_state(self, hello: Hello, configures: tuple[Configure, ...]) -> GroupState:
        configure = configures[0]
        config, taken = self._config, {state.number for state in self._away.values()} | self._attached.keys()
        number = next(number for number in count() if number not in taken)
        feed = self._feeds[number] = KVEventFeed(configure.block_size, self._watchers, number)
        counts = self._counts.setdefault((number, hello.model.name), GroupCounts(_sum([])))
        waiting = WaitingQueue(
            config.max_waiting_requests, config.max_waiting_tokens, config.priority_seconds, counts.queue_seconds
        )
        scheduler = Scheduler(
            configure,
            waiting,
            vocab_size=hello.model.vocab_size,
            eos_token_ids=hello.model.eos_token_ids,
            prefix_caching=config.prefix_caching == "on",
            watcher=feed,
            secret=self._cache_secret,
            weights=hello.model_fingerprint,
        )
        steps = StepLog(configure, self._clock, counts.step_seconds)
        return GroupState(number, hello, configures, scheduler, feed, counts, steps)

    def _step_clock(self, boot_id: int) -> StepClock:
        step_clock = self._step_clocks.pop(boot_id, None) or StepClock(self._config.step_timeout_seconds)
        if boot_id:
            self._step_clocks[boot_id] = step_clock
            if len(self._step_clocks) > MAX_STEP_CLOCKS:
                del self._step_clocks[next(iter(self._step_clocks))]
        return step_clock

    # -- the prefix caches and their watchers --------------------------------------------------------------------------

    def watch(self) -> KVWatcher:
        """Tell somebody what is cached in which group, and from now on what changes."""
        watcher = KVWatcher()
        self._watchers.add(watcher)
        for feed in self._feeds.values():
            watcher.put(feed.snapshot())
        return watcher

    def unwatch(self, watcher: KVWatcher) -> None:
        self._watchers.discard(watcher)

    def reset_prefix_caches(self) -> None:
        """Let no block be found that was cached before. Raises UnavailableError while no worker is attached."""
        if not self._attached:
            raise UnavailableError("no worker is attached, so nothing is cached.")
        for state in chain((group.state for group in self), self._away.values()):
            state.scheduler.blocks.cache.reset()
            state.feed.release()

    # -- statistics ----------------------------------------------------------------------------------------------------

    def step_logs(self) -> dict[int, StepLog]:
        """By number, of groups that are attached or may come back."""
        states = [*(group.state for group in self), *self._away.values()]
        return {state.number: state.steps for state in sorted(states, key=lambda state: state.number)}

    def statistics(self) -> EngineStatistics:
        """Of the groups that are ready."""
        groups = {group.number: group.state.statistics() for group in self if group.is_ready}
        past = [counts.past for counts in self._counts.values()]
        total = _sum([*past, *groups.values(), *(state.statistics() for state in self._away.values())])
        pools = [group.scheduler.blocks.pool for group in self if group.is_ready]
        num_usable, num_free = sum(pool.num_usable for pool in pools), sum(pool.num_free for pool in pools)
        common = [group.num_common_prefix_blocks for group in groups.values()]
        return EngineStatistics(
            replace(
                total,
                kv_cache_usage=1 - num_free / num_usable if pools else 0.0,
                num_common_prefix_blocks=common[0] if len(common) == 1 else (),
            ),
            groups,
            num_lost_workers=self.num_lost_workers,
            num_dropped_results=self.num_dropped_results,
        )

    def counts(self) -> Iterator[tuple[int, str, GroupCounts]]:
        """By the groups' numbers and their models' names, what was counted until now, of lost groups too."""
        live = [*(group.state for group in self), *self._away.values()]
        for (number, model_name), counts in self._counts.items():
            schedulers = [state.statistics() for state in live if state.counts is counts]
            yield number, model_name, replace(counts, past=_sum([counts.past, *schedulers]))


def _sum(groups: list[Statistics]) -> Statistics:
    """What can be added up."""
    names = {field.name for field in fields(Statistics)} - {"kv_cache_usage", "num_common_prefix_blocks"}
    sums = {name: sum(getattr(group, name) for group in groups) for name in names}
    return Statistics(**sums, kv_cache_usage=0.0, num_common_prefix_blocks=())
