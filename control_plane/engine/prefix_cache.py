"""Which block holds the KV of which tokens: contents that chain over a sequence's blocks, and where they are found.

Knows neither who holds a block nor whether it is computed: the scheduler publishes a block once a plan fills it.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from blockplane.protos.plan import Int32Array

KEY_BYTES = 16


class BlockContent(NamedTuple):
    """What a full block holds: its tokens, int32 bytes, behind all that the key's chain stands for."""

    key: bytes
    token_bytes: bytes


class PrefixCache:
    """Finds published blocks by their tokens and by all that stands before them.

    A key is a keyed BLAKE2b over the key of the block before and the block's own tokens; the first block's parent is a
    hash of what else must agree, such as a salt. The secret is drawn for each cache, so that nobody can prepare two
    prompts of one key; the tokens are compared on a hit all the same.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hash = hashlib.blake2b(digest_size=KEY_BYTES, key=secrets.token_bytes(32))
        # Written by publish, forget and reset only; each is the other's inverse.
        self._block_of_key: dict[bytes, int] = {}
        self._content_of_block: dict[int, BlockContent] = {}

    def root(self, extras: Mapping[str, str]) -> bytes:
        """The parent of a first block's key. `extras` are by kind, so that a value of one kind is none of another."""
        parts = [part.encode() for kind in sorted(extras) for part in (kind, extras[kind])]
        return self._digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))

    def extend(self, contents: list[BlockContent], root: bytes, token_ids: Int32Array) -> None:
        """Append the full blocks of `token_ids`, int32, the tokens that follow those of `contents`."""
        size = self._block_size * token_ids.itemsize
        data = token_ids.tobytes()
        key = contents[-1].key if contents else root
        for start in range(0, len(data) - size + 1, size):
            token_bytes = data[start : start + size]
            key = self._digest(key + token_bytes)
            contents.append(BlockContent(key, token_bytes))

    def find(self, contents: Sequence[BlockContent]) -> list[int]:
        """The blocks of the longest published prefix: one per leading content that is found, tokens compared."""
        block_ids = []
        for content in contents:
            block_id = self._block_of_key.get(content.key)
            if block_id is None or self._content_of_block[block_id] != content:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, content: BlockContent) -> None:
        """Let a block be found. Content that another block holds already is found there still."""
        if content.key not in self._block_of_key:
            self._block_of_key[content.key] = block_id
            self._content_of_block[block_id] = content

    def forget(self, block_id: int) -> None:
        """Let a block be found no more; fine for one that never was."""
        content = self._content_of_block.pop(block_id, None)
        if content is not None:
            del self._block_of_key[content.key]

    def reset(self) -> None:
        """Let no block be found that was published before."""
        self._block_of_key.clear()
        self._content_of_block.clear()

    def _digest(self, data: bytes) -> bytes:
        # The copy has the secret hashed in already.
        state = self._hash.copy()
        state.update(data)
        return state.digest()
