"""How KV is laid out over a worker's layers: groups with their own block tables over one pool. Knows no requests.

The names and fields are those of seed 002, "KV cache workflow".
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that see alike and therefore share one block table.

    A group that names no layers holds all layers of the model. Without `sliding_window` and `attention_chunk_size` it
    is full attention: a token sees all before it.

    Attributes:
        layer_names: the i-th keeps its KV in the i-th tensor; layers that read another's KV follow all that own theirs.
        num_kv_heads, head_dim, dtype: of every layer, in one rank.
        sliding_window: tokens that a query sees, its own included.
        attention_chunk_size: tokens; a query sees its own chunk, up to itself.
    """

    layer_names: tuple[str, ...] = ()
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """Memory for the KV of `num_blocks` blocks of one layer; K and V together are `size` bytes.

    Layers of different groups share it: a block belongs to one group at a time.
    """

    size: int
    shared_by: tuple[str, ...]


def first_visible(position: Any, sliding_window: int | None, attention_chunk_size: int | None) -> Any:
    """The first position that a query at `position` sees; all from there up to its own are visible.

    `position` is a number or an integer array, and so is the answer. Where both limits are given the chunk's holds.
    """
    if attention_chunk_size is not None:
        return position - position % attention_chunk_size
    return position * 0 if sliding_window is None else np.maximum(position - sliding_window + 1, 0)
