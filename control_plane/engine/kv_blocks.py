"""The KV blocks that requests hold: taken as they grow, shared by prefix, given back. Knows neither rows nor plans."""

from collections.abc import Sequence

import numpy as np

from blockplane.control_plane.engine.block_pool import BlockPool
from blockplane.control_plane.engine.prefix_cache import BlockContent, PrefixCache
from blockplane.control_plane.engine.request import Request


class KVBlocks:
    """The blocks of one worker group; the only writer of requests' `block_ids` and `contents`.

    A block may be found by others from the plan after the one that fills it: plans are carried out in order, so what
    an earlier plan fills is filled.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.cache = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, on_reuse=self.cache.forget)
        self._prefix_caching = prefix_caching
        # Blocks that the plan in the making fills, by key; nobody finds them before the next plan.
        self._filling: dict[bytes, tuple[int, BlockContent]] = {}

    @property
    def capacity(self) -> int:
        """Tokens whose KV the whole cache holds."""
        return self.pool.num_usable * self.block_size

    def num_needed(self, num_tokens: int) -> int:
        """Blocks for this many tokens; padding takes none (seed 000, "Padding Does NOT Allocate Blocks")."""
        return -(-num_tokens // self.block_size)

    def enter(self, request: Request) -> None:
        """Key a request that is new to this group, however much it holds already."""
        request.contents = []
        self._extend_contents(request)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that others filled with the request's first tokens. Never all of them: the last token is computed."""
        return self.cache.find(request.contents[: (request.num_tokens - 1) // self.block_size])

    def is_being_filled(self, request: Request, prefix: Sequence[int]) -> bool:
        """Whether the block that follows `prefix` is filled by the plan in the making: the next plan finds it."""
        if len(prefix) >= (request.num_tokens - 1) // self.block_size or len(prefix) >= len(request.contents):
            return False
        content = request.contents[len(prefix)]
        return self._filling.get(content.key, (None, None))[1] == content

    def has_room(self, request: Request, prefix: Sequence[int], reserve: int) -> bool:
        """Whether the request's known tokens fit behind `prefix`, with `reserve` blocks left."""
        num_missing = self.num_needed(request.num_tokens) - len(prefix)
        return num_missing + reserve <= self.pool.num_free - self.pool.num_free_among(prefix)

    def share(self, request: Request, prefix: list[int]) -> None:
        """Let the request hold `prefix` as its first blocks; their tokens are computed."""
        self.pool.hold(prefix)
        request.block_ids = list(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Take blocks for `num_tokens` more computed tokens. Returns the new ones; None = no room, nothing changed."""
        num_missing = self.num_needed(request.num_computed_tokens + num_tokens) - len(request.block_ids)
        block_ids = self.pool.allocate(max(0, num_missing))
        if block_ids is not None:
            request.block_ids += block_ids
        return block_ids

    def fill(self, request: Request, num_tokens: int) -> None:
        """Note that the plan in the making computes the request's next `num_tokens` tokens."""
        if not self._prefix_caching:
            return
        first = request.num_computed_tokens // self.block_size
        past = (request.num_computed_tokens + num_tokens) // self.block_size
        if past > len(request.contents):
            self._extend_contents(request)
        for index in range(first, past):
            content = request.contents[index]
            self._filling[content.key] = request.block_ids[index], content

    def publish_filled(self) -> None:
        """The plan is made: the next one may find what it fills."""
        for block_id, content in self._filling.values():
            self.cache.publish(block_id, content)
        self._filling.clear()

    def vacate(self, request: Request) -> None:
        """Give a request's blocks back; what they hold may be found until they are reused."""
        self.pool.release(request.block_ids)
        request.num_computed_tokens, request.block_ids = 0, []

    def distrust(self, request: Request) -> None:
        """Let nobody find what a failed request's blocks hold."""
        for block_id in request.block_ids:
            self.cache.forget(block_id)

    def _extend_contents(self, request: Request) -> None:
        """Key the blocks that the request's known tokens fill and that have no key yet."""
        if not self._prefix_caching:
            return
        extras = {"salt": request.cache_salt} if request.cache_salt else {}
        new_token_ids = np.array(request.token_ids[len(request.contents) * self.block_size :], np.int32)
        self.cache.extend(request.contents, self.cache.root(extras), new_token_ids)
