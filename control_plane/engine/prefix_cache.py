"""Which blocks hold the KV of which tokens: keys that chain over a sequence's blocks, and what is found under them.

Knows neither who holds a block nor whether it is computed: a block is published once an earlier plan fills it.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Protocol, TypeAlias

import numpy as np

from blockplane.protos.plan import Int32Array

KEY_BYTES = 16

CachedBlock: TypeAlias = tuple[tuple[int, ...], bytes]
"""What a kind of layers keeps of one full logical block: its ids in the kind's groups, and the tokens, int32. A bare
tuple, which the garbage collector soon looks at no more: there is one for each block of the pool.
"""

_NOTHING: CachedBlock = ((), b"")


def draw_secret() -> bytes:
    """What caches have in common whose keys are to be the same."""
    return secrets.token_bytes(32)


class CacheWatcher(Protocol):
    """Hears of what can be found by a key and what no longer."""

    def stored(self, key: bytes, parent: bytes | None, token_bytes: bytes) -> None: ...

    def removed(self, key: bytes) -> None: ...

    def cleared(self) -> None: ...


class PrefixCache:
    """Finds published blocks by their tokens and by all that stands before them.

    A key is a keyed BLAKE2b over the key of the block before and the block's own tokens; the first block's parent is a
    hash of what else must agree, such as a salt. The secret is drawn, so that nobody can prepare two prompts of one
    key; the tokens are compared on a hit all the same. Caches of one secret and block size have the same keys.

    Layers of different kinds (full attention, a sliding window) keep different parts of a sequence, so each kind has
    its own entries, under the same keys.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kinds: int,
        watcher: CacheWatcher | None = None,
        secret: bytes | None = None,
    ) -> None:
        """`watcher` hears of what is announced, and of all of the first kind that is forgotten. `secret` is one of
        `draw_secret`; None = its own.
        """
        self.block_bytes = block_size * np.dtype(np.int32).itemsize
        """Of a block's token ids."""
        self._watcher = watcher
        self._hash = hashlib.blake2b(digest_size=KEY_BYTES, key=secret or draw_secret())
        # Written by publish, forget and reset only; each is the others' inverse.
        self._entries: tuple[dict[bytes, CachedBlock], ...] = tuple({} for _ in range(num_kinds))
        self._key_of_block: list[tuple[int, bytes] | None] = [None] * num_blocks

    def root(self, extras: Mapping[str, str]) -> bytes:
        """The parent of a first block's key. `extras` are by kind, so that a value of one kind is none of another."""
        parts = [part.encode() for kind in sorted(extras) for part in (kind, extras[kind])]
        return self._digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))

    def next_key(self, parent: bytes, token_bytes: bytes) -> bytes:
        """The key of a full block of these tokens, int32, behind the block of key `parent`."""
        return self._digest(parent + token_bytes)

    def extend(self, keys: list[bytes], token_bytes: bytes) -> None:
        """Append the keys of the full blocks of `token_bytes`, int32, to a chain; its last key is their parent."""
        size, copy, key = self.block_bytes, self._hash.copy, keys[-1]
        for start in range(0, len(token_bytes) - size + 1, size):
            # `next_key`, written out: this is the one loop over a whole prompt.
            state = copy()
            state.update(key + token_bytes[start : start + size])
            key = state.digest()
            keys.append(key)

    def find(self, kind: int, key: bytes, token_bytes: bytes) -> tuple[int, ...] | None:
        """A kind's blocks under a key, which must hold just these tokens; None = it keeps none."""
        block_ids, tokens = self._entries[kind].get(key, _NOTHING)
        return block_ids if tokens == token_bytes else None

    def has(self, kind: int, key: bytes) -> bool:
        """Whether a kind keeps anything under a key."""
        return key in self._entries[kind]

    def find_run(self, kind: int, keys: Sequence[bytes], token_bytes: bytes) -> list[tuple[int, ...]]:
        """A kind's blocks under the leading keys, up to the first that is not found; keys as `extend` makes them."""
        run: list[CachedBlock] = list(takewhile(bool, map(self._entries[kind].get, keys)))  # type: ignore[arg-type]
        size = self.block_bytes
        if b"".join(map(itemgetter(1), run)) != token_bytes[: len(run) * size]:
            # Some key stands for other tokens here, which only a broken hash brings about.
            differs = (tokens != token_bytes[j * size : (j + 1) * size] for j, (_, tokens) in enumerate(run))
            del run[list(differs).index(True) :]
        return list(map(itemgetter(0), run))

    def holders(self, kind: int, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """A kind's blocks under those of the keys that it has."""
        entries = self._entries[kind]
        return [entries[key][0] for key in keys if key in entries]

    def publish(
        self, kind: int, key: bytes, block: CachedBlock, parent: bytes | None = None, *, announce: bool = False
    ) -> None:
        """Let a kind's blocks be found; what others hold already is found there still.

        `announce` tells the watcher, with the key of the block before, None = the block begins a sequence.
        """
        entries = self._entries[kind]
        if key in entries:
            return
        entries[key] = block
        place = kind, key
        for block_id in block[0]:
            self._key_of_block[block_id] = place
        if announce and self._watcher is not None:
            self._watcher.stored(key, parent, block[1])

    def forget(self, block_ids: Int32Array) -> None:
        """Let blocks be found no more, and with each the others of its entry; fine for one that never was."""
        key_of_block = self._key_of_block
        for block_id in block_ids.tolist():
            if (place := key_of_block[block_id]) is None:
                continue
            kind, key = place
            for sibling in self._entries[kind].pop(key)[0]:
                key_of_block[sibling] = None
            if kind == 0 and self._watcher is not None:
                self._watcher.removed(key)

    def reset(self) -> None:
        """Let no block be found that was published before."""
        for entries in self._entries:
            entries.clear()
        self._key_of_block[:] = [None] * len(self._key_of_block)
        if self._watcher is not None:
            self._watcher.cleared()

    def _digest(self, data: bytes) -> bytes:
        # The copy has the secret hashed in already.
        state = self._hash.copy()
        state.update(data)
        return state.digest()
