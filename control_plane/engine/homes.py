"""What the choice of a group is made by: what each group has of a request, and how much it is left with.

Knows neither who is held nor why; it takes no request anywhere.
"""

from collections.abc import Iterable, Mapping, Sequence

from blockplane.control_plane.engine.choice import Candidate, in_order_of_choice
from blockplane.control_plane.engine.group import WorkerGroup
from blockplane.control_plane.engine.groups import Groups
from blockplane.control_plane.engine.request import Request


class Homes:
    """The only writer of groups' `last_turn`, and the one that lets requests into their `live_keys`."""

    def __init__(self, groups: Groups, max_imbalance_percent: int) -> None:
        self._groups, self._max_imbalance_percent = groups, max_imbalance_percent
        self._num_turns = 0

    def in_order(
        self, request: Request, groups: Sequence[WorkerGroup], loads: Mapping[WorkerGroup, int] | None = None
    ) -> list[tuple[WorkerGroup, int]]:
        """Groups that may take a request, the best first, and how many leading tokens it shares there.

        One alone is asked nothing. `loads`: all groups'; None = to be asked for.
        """
        if len(groups) < 2:
            return [(group, 0) for group in groups]
        # All groups of the same weights have its keys from here.
        groups[0].scheduler.blocks.enter(request)
        candidates = []
        for group in groups:
            size = group.scheduler.blocks.block_size
            num_cached, num_shared = group.scheduler.blocks.num_leading(request, group.live_keys)
            load = group.scheduler.num_to_compute if loads is None else loads[group]
            candidates.append(Candidate(num_shared * size, load, (num_shared - num_cached) * size, group.last_turn))
        order = in_order_of_choice(candidates, request.num_tokens, self._max_imbalance_percent)
        return [(groups[index], candidates[index].num_shared) for index in order]

    def expect(self, requests: Sequence[Request], num_shared: int, group: WorkerGroup) -> None:
        """Say what a prompt's samples will share at a group: the first so many tokens, the others all it computes."""
        first, blocks = requests[0], group.scheduler.blocks
        first.num_expected_tokens = num_shared
        for request in requests[1:]:
            # One prompt has one chain of keys.
            request.keys = first.keys.copy()
            request.num_expected_tokens = max(0, blocks.num_shareable(request)) * blocks.block_size

    def came(self, requests: Iterable[Request], num_shared: int, group: WorkerGroup) -> None:
        """Requests were given to a group, of whose first so many tokens are shared there."""
        if not num_shared:
            self._num_turns += 1
            group.last_turn = self._num_turns
        if len(self._groups) > 1:
            for request in requests:
                group.live_keys.come(request)

    def joined(self) -> None:
        """A group has come: as long as another was alone nobody asked what waits there."""
        for group in self._groups:
            for request in group.scheduler.waiting:
                group.live_keys.come(request)
