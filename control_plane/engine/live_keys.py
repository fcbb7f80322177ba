"""Which blocks a group's live requests compute or are about to, by their keys. Knows neither groups nor caches."""

from collections import Counter

from blockplane.control_plane.engine.request import Request


class LiveKeys:
    """The keys of requests as they came, as long as they live here: as many as their full blocks, and no more."""

    def __init__(self) -> None:
        self._num_requests: Counter[bytes] = Counter()
        """By key, those that are positive."""
        self._keys: dict[Request, list[bytes]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._num_requests

    def __len__(self) -> int:
        return len(self._num_requests)

    def come(self, request: Request) -> None:
        """A request is here now; fine for one that is known."""
        if request not in self._keys and len(request.keys) > 1:
            keys = self._keys[request] = request.keys[1:]
            self._num_requests.update(keys)

    def go(self, request: Request) -> None:
        """It is here no more; fine for one that is not known."""
        counts = self._num_requests
        for key in self._keys.pop(request, ()):
            if (num_left := counts[key] - 1) > 0:
                counts[key] = num_left
            else:
                # A counter's `del` is no dict's, and far slower.
                counts.pop(key)
