"""Which KV blocks each row holds in every KV cache group: taken as rows grow, shared by prefix, given back.

Knows neither plans nor queues. A row's logical blocks grow in all groups at once; in a group that sees only so far
back, a row gives up the blocks that no query of its will see again, and the null block stands in their place.
"""

from collections.abc import Container, Iterable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockplane.control_plane.engine.block_pool import BlockPool
from blockplane.control_plane.engine.kv_needs import longest_fit, num_blocks_needed
from blockplane.control_plane.engine.prefix_cache import CacheWatcher, PrefixCache
from blockplane.control_plane.engine.request import Request
from blockplane.protos.kv_cache import KVCacheGroup, first_visible
from blockplane.protos.plan import NO_ROWS, Configure, Int32Array, IntArray


class Kind(NamedTuple):
    """Neighbouring groups that see alike: they hold and give up the same logical blocks, and are cached as one."""

    groups: slice
    sliding_window: int | None
    attention_chunk_size: int | None

    @property
    def sees_all(self) -> bool:
        return self.sliding_window is None and self.attention_chunk_size is None


class Prefix(NamedTuple):
    """Cached blocks that begin a request: int32 [num_blocks, num_groups], null where a group needs none."""

    block_ids: Int32Array

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def held(self) -> Int32Array:
        return self.block_ids[self.block_ids > 0]


Found: TypeAlias = list[tuple[int, ...]] | dict[int, tuple[int, ...]]
"""A kind's cached blocks by logical block: all from the first one on, or some."""


class KVBlocks:
    """The blocks of one worker group; the only writer of its tables, of the pool, the cache and of requests' keys."""

    def __init__(
        self,
        configure: Configure,
        *,
        prefix_caching: bool = True,
        watcher: CacheWatcher | None = None,
        secret: bytes | None = None,
        weights: bytes = b"",
    ) -> None:
        """`secret` is the cache's, and `weights` the fingerprint of those that compute; empty = nobody knows it."""
        groups = configure.kv_cache_groups
        self.configure = configure
        self.block_size = configure.block_size
        self.kinds = tuple(_kinds(groups))
        self._parts = [(kind.groups, kind.sees_all) for kind in self.kinds]
        # Events are of full attention, which comes first where there is any.
        watcher = watcher if self.kinds[0].sees_all else None
        self.cache = PrefixCache(configure.num_blocks, self.block_size, len(self.kinds), watcher, secret)
        self.pool = BlockPool(configure.num_blocks, on_reuse=self.cache.forget)
        # Without segments a prefill reads no prior KV, so nothing could be shared (seed 001).
        self._prefix_caching = prefix_caching and configure.kv_segment_size > 0
        self._weights, self._num_renewals = weights, 0
        self._public_root = self._root(salt="")
        self.num_blocks = np.zeros(configure.max_num_seqs, np.int64)
        """Per row, logical blocks. Those before `_first_block` of a kind are given up."""
        self.tables = np.zeros((configure.max_num_seqs, configure.max_blocks_per_row, len(groups)), np.int32)
        self.num_lent = 0
        """Blocks that `Lease` holds, each as often as it does."""
        self._first_block = np.zeros((len(self.kinds), configure.max_num_seqs), np.int64)
        self.capacity = longest_fit(groups, self.pool.num_usable, self.block_size, self._least_segment)
        """Tokens that a lone request can have KV for, however often it is computed anew."""

    # -- how much ------------------------------------------------------------------------------------------------------

    def num_needed(self, num_tokens: int) -> int:
        """Blocks without which so many tokens are never computed (seed 000, "Padding Does NOT Allocate Blocks")."""
        return num_blocks_needed(self.configure.kv_cache_groups, num_tokens, self.block_size, self._least_segment)

    @property
    def _least_segment(self) -> int:
        """Tokens that a prefill cannot be cut below."""
        configure = self.configure
        return configure.segment_multiple if configure.kv_segment_size else configure.max_num_batched_tokens

    def has_room(self, num_tokens: int, prefix: Prefix, num_rows: int) -> bool:
        """Whether so many tokens fit behind `prefix`, with one more logical block for each of `num_rows` rows."""
        reserve = num_rows * self.tables.shape[2]
        held = prefix.held
        groups, segment = self.configure.kv_cache_groups, self.configure.max_num_batched_tokens
        num_missing = num_blocks_needed(groups, num_tokens, self.block_size, segment) - len(held)
        return num_missing + reserve + self.pool.num_free_among(held) <= self.pool.num_free

    def fits(self, num_tokens: int, prefix: Prefix) -> bool:
        """Whether the blocks of so many tokens, those of `prefix` among them, can be had now."""
        num_new = (-(-num_tokens // self.block_size) - prefix.num_blocks) * self.tables.shape[2]
        return num_new + self.pool.num_free_among(prefix.held) <= self.pool.num_free

    # -- sharing -------------------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Key all full blocks of a request without a row."""
        request.keys = self.keys_of(request)

    def keys_of(self, request: Request) -> list[bytes]:
        """The keys of all full blocks that a request has, or had when it last had no row, as `enter` sets them."""
        if not self._prefix_caching or request.skip_prefix_cache:
            return []
        root = self._root_of(request)
        # Those that it has stand, wherever they were reckoned.
        keys = request.keys.copy() if request.keys and request.keys[0] == root else [root]
        num_keyed = (len(keys) - 1) * self.block_size
        self.cache.extend(keys, request.token_ids[num_keyed:].tobytes())
        return keys

    def has_keys_of(self, other: "KVBlocks") -> bool:
        """Whether requests have the same keys at both, and some do."""
        return self._prefix_caching and other._prefix_caching and self._public_root == other._public_root

    def renew_weights(self, weights: bytes = b"") -> None:
        """The model's weights are others from now on: requests that enter find nothing that was cached before.

        `weights`: their fingerprint; empty = nobody knows it.
        """
        self._weights, self._num_renewals = weights, self._num_renewals + 1
        self.cache.reset()
        self._public_root = self._root(salt="")

    def _root_of(self, request: Request) -> bytes:
        return self._root(request.cache_salt) if request.cache_salt else self._public_root

    def _root(self, salt: str) -> bytes:
        # Groups of the same weights have the same keys, however often each has read them anew.
        extras = {"weights": self._weights.hex() or str(self._num_renewals)} | ({"salt": salt} if salt else {})
        return self.cache.root(extras)

    def num_shareable(self, request: Request) -> int:
        """Leading blocks that a request without a row may share: never its last token's, which is to be computed.

        Of a prompt that is told of, no token is left out.
        """
        if request.params.prompt_logprobs is not None:
            return 0
        return min(len(request.keys) - 1, (request.num_tokens - 1) // self.block_size)

    def find_prefix(self, request: Request) -> Prefix:
        """The longest prefix that all kinds keep, of the blocks that may be shared."""
        num_blocks = self.num_shareable(request)
        if num_blocks <= 0:
            return Prefix(self.tables[0, :0])
        keys, token_bytes = request.keys[1 : num_blocks + 1], request.token_ids.tobytes()
        found: list[Found] = []
        for index, kind in enumerate(self.kinds):
            if kind.sees_all:
                run = self.cache.find_run(index, keys[:num_blocks], token_bytes)
                num_blocks = len(run)
            found.append(run if kind.sees_all else {})
        agreed = -1
        while agreed != num_blocks:
            agreed = num_blocks
            for index, blocks in enumerate(found):
                if isinstance(blocks, dict):
                    num_blocks = self._longest_hit(index, keys[:num_blocks], token_bytes, blocks)
        return self._prefix(num_blocks, found)

    def num_leading(self, request: Request, live: Container[bytes]) -> tuple[int, int]:
        """Leading blocks that a request without a row would share here, once it has entered here or elsewhere: how many
        are cached, and how many there are with those behind them that others will have computed, whose keys are in
        `live`.
        """
        if not request.keys or request.keys[0] != self._root_of(request):
            self.enter(request)
        most, keys = self.num_shareable(request), request.keys
        num_blocks = 0
        # Most groups have nothing of most requests.
        if most > 0 and (not self.kinds[0].sees_all or self.cache.has(0, keys[1])):
            num_blocks = self.find_prefix(request).num_blocks
        num_cached = num_blocks
        while num_blocks < most and keys[num_blocks + 1] in live:
            num_blocks += 1
        return num_cached, num_blocks

    def _longest_hit(self, index: int, keys: list[bytes], token_bytes: bytes, found: dict[int, tuple[int, ...]]) -> int:
        """The most leading blocks behind which a kind keeps all that the next query sees; adds those to `found`."""
        size = self.cache.block_bytes
        num_blocks = j = len(keys)
        first = self._first_needed(self.kinds[index], num_blocks * self.block_size)
        while j > first:
            j -= 1
            if j in found:
                continue
            block_ids = self.cache.find(index, keys[j], token_bytes[j * size : (j + 1) * size])
            if block_ids is None:
                num_blocks = j
                first = self._first_needed(self.kinds[index], num_blocks * self.block_size)
            else:
                found[j] = block_ids
        return num_blocks

    def _prefix(self, num_blocks: int, found: list[Found]) -> Prefix:
        block_ids = np.zeros((num_blocks, self.tables.shape[2]), np.int32)
        for kind, blocks in zip(self.kinds, found, strict=True):
            first = self._first_needed(kind, num_blocks * self.block_size)
            needed = (
                blocks[first:num_blocks] if isinstance(blocks, list) else [blocks[j] for j in range(first, num_blocks)]
            )
            ids = np.fromiter(chain.from_iterable(needed), np.int32)
            block_ids[first:, kind.groups] = ids.reshape(block_ids[first:, kind.groups].shape)
        return Prefix(block_ids)

    def publish(self, request: Request, row: int, start: int, stop: int, token_bytes: bytes) -> None:
        """Let a row's logical blocks be found, `start` to `stop` - 1, which hold the tokens of `token_bytes`."""
        self.publish_table(request, start, self.tables[row, start:stop], token_bytes)

    def publish_table(self, request: Request, start: int, table: Int32Array, token_bytes: bytes) -> None:
        """Let logical blocks be found, from `start` on: int32 [num_blocks, num_groups], null where there is none."""
        size = self.cache.block_bytes
        for j, ids in enumerate(table.tolist()):
            self._publish_block(request, start + j, ids, token_bytes[j * size : (j + 1) * size])

    def publish_one_each(self, requests: Iterable[Request], rows: IntArray, blocks: IntArray, tokens: Any) -> None:
        """Let one logical block of each row be found; `tokens`: int32 [num_rows, block_size], what they hold."""
        size, token_bytes = self.cache.block_bytes, tokens.tobytes()
        ids, numbers = self.tables[rows, blocks].tolist(), blocks.tolist()
        for j, request in enumerate(requests):
            self._publish_block(request, numbers[j], ids[j], token_bytes[j * size : (j + 1) * size])

    def _publish_block(self, request: Request, number: int, ids: list[int], tokens: bytes) -> None:
        keys, cache = request.keys, self.cache
        if not keys:
            return
        if len(keys) == number + 1:
            keys.append(cache.next_key(keys[number], tokens))
        # Others cannot know what a salted request's blocks hold, nor could they ask for them.
        is_public = keys[0] == self._public_root
        key, parent = keys[number + 1], keys[number] if number else None
        for kind, (groups, sees_all) in enumerate(self._parts):
            if ids[groups.start]:
                cache.publish(kind, key, (tuple(ids[groups]), tokens), parent, announce=is_public and sees_all)

    def distrust(self, row: int) -> None:
        """Let nobody find what a failed row's blocks hold."""
        self.cache.forget(self._held(row))

    def distrust_keys(self, request: Request, start: int = 0, stop: int | None = None) -> None:
        """The same for a request whose blocks may not be its own any more: its logical blocks `start` to `stop` - 1,
        or all.
        """
        keys = request.keys[start + 1 : None if stop is None else stop + 1]
        for number in range(len(self.kinds)):
            self.cache.forget(np.fromiter(chain.from_iterable(self.cache.holders(number, keys)), np.int32))

    def num_common_prefix_blocks(self, rows: IntArray) -> list[int]:
        """Per group, leading blocks that all `rows` have in common (seed 002, `SchedulerOutput`)."""
        if not rows.size:
            return [0] * self.tables.shape[2]
        tables = self.tables[rows, : int(self.num_blocks[rows].min())]
        common = ((tables == tables[0]) & (tables[0] > 0)).all(axis=0)
        return [int(column.argmin()) if not column.all() else len(column) for column in common.T]

    # -- holding -------------------------------------------------------------------------------------------------------

    def take(self, row: int, prefix: Prefix) -> None:
        """Let an empty row begin with `prefix`, whose tokens are computed."""
        self.pool.hold(prefix.held)
        self.tables[row, : prefix.num_blocks] = prefix.block_ids
        self.num_blocks[row] = prefix.num_blocks
        for index, kind in enumerate(self.kinds):
            self._first_block[index, row] = self._first_needed(kind, prefix.num_blocks * self.block_size)

    def grow(self, rows: IntArray, num_new: IntArray) -> tuple[IntArray, Int32Array] | None:
        """Take `num_new` more logical blocks for each of `rows`.

        Returns:
            per new logical block its row and its ids, int32 [num_blocks] and [num_blocks, num_groups]; None = there is
            no room for them all now, and nothing has changed.
        """
        total, num_groups = int(num_new.sum()), self.tables.shape[2]
        if not total:
            return NO_ROWS, NO_ROWS
        block_ids = self.pool.allocate(total * num_groups)
        if block_ids is None:
            return None
        new_rows, indices = _spread(rows, self.num_blocks[rows], num_new)
        table = block_ids.reshape(total, num_groups)
        self.tables[new_rows, indices] = table
        self.num_blocks[rows] += num_new
        return new_rows, table

    def give_up_unseen(self, rows: IntArray, num_computed_tokens: IntArray) -> None:
        """Free what rows of so many answered tokens see no more; both int [num_rows]."""
        for index, kind in enumerate(self.kinds):
            if kind.sees_all:
                continue
            first = self._first_needed(kind, num_computed_tokens)
            num_unseen = np.maximum(first - self._first_block[index, rows], 0)
            if not num_unseen.any():
                continue
            old_rows, indices = _spread(rows, self._first_block[index, rows], num_unseen)
            self.pool.release(self.tables[old_rows, indices, kind.groups].ravel())
            self.tables[old_rows, indices, kind.groups] = 0
            self._first_block[index, rows] += num_unseen

    def vacate(self, row: int) -> None:
        """Give all blocks of a row back, the last first, which fewest share; they are found until they are reused."""
        self.pool.release(self._held(row)[::-1])
        self.tables[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0

    def _held(self, row: int) -> Int32Array:
        block_ids: Int32Array = self.tables[row, : self.num_blocks[row]].ravel()
        return block_ids[block_ids > 0]

    def seen_behind(self, num_blocks: int) -> NDArray[np.bool_]:
        """Which of so many leading blocks the query behind them sees in each group: bool [num_blocks, num_groups]."""
        is_seen = np.zeros((num_blocks, self.tables.shape[2]), bool)
        for kind in self.kinds:
            is_seen[self._first_needed(kind, num_blocks * self.block_size) :, kind.groups] = True
        return is_seen

    def _first_needed(self, kind: Kind, num_computed_tokens: Any) -> Any:
        """The first logical block that the query after so many tokens sees; for a number or an integer array."""
        return first_visible(num_computed_tokens, kind.sliding_window, kind.attention_chunk_size) // self.block_size


def _kinds(groups: Sequence[KVCacheGroup]) -> Iterable[Kind]:
    start = 0
    for (window, chunk), alike in groupby(groups, lambda group: (group.sliding_window, group.attention_chunk_size)):
        stop = start + len(list(alike))
        yield Kind(slice(start, stop), window, chunk)
        start = stop


def _spread(rows: IntArray, starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Each row `count` times, beside the numbers `start`, `start` + 1, ...: int [sum of counts] twice."""
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return np.repeat(rows, counts), np.repeat(starts, counts) + offsets
