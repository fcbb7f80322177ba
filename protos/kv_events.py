"""What a prefix cache tells its watchers, as frozen values; knows neither protobuf nor who watches."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks can be found from now on.

    Attributes:
        block_hashes: the blocks' int64 ids, each the parent of the next.
        parent_block_hash: the block before the first; None = the first begins a sequence. It need not be cached.
        token_bytes: little-endian int32 [len(block_hashes) * block_size], the blocks' tokens end to end: nobody reads
            them as numbers, they are compared.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks cannot be found any more."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be found any more."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """What happened to a prefix cache in one step, in order. Only blocks of full attention without salt or adapter.

    A batch that begins with `AllBlocksCleared` needs none before it: so does the first that a watcher gets.

    Attributes:
        epoch: unsigned 64-bit, drawn at random whenever a worker attaches: what was known of another epoch is void.
        sequence: 1, 2, 3, ... within the epoch.
        block_size: tokens.
        group: the worker group whose cache it is; each has epochs of its own.
    """

    epoch: int
    sequence: int
    block_size: int
    events: tuple[KVEvent, ...]
    group: int = 0
