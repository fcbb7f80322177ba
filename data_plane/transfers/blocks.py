"""The contents of KV blocks as they move between workers, whatever layout the device has. Knows no network, no plans.

Canonical, of each block: for each KV cache tensor of the configuration its keys, then its values, token-major,
[rank_block_size, num_kv_heads, head_dim], as raw bytes. Layers that share a tensor share its contents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.data_plane.backends.backend import Backend
from blockplane.data_plane.kv_cache import attentions_of, layer_kv_specs
from blockplane.data_plane.models.interface import Model
from blockplane.kernels.nki.layout import to_head_major, to_token_major
from blockplane.kernels.slots import NULL_BLOCK_ID
from blockplane.protos.errors import BlocksGoneError
from blockplane.protos.plan import Configure, IntArray

Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class MovableBlocks:
    """The KV caches of one attach, block by block.

    Attributes:
        epoch: of the attach in which block ids mean what the engine believes.
        caches: of each KV cache tensor its keys, then its values; [num_blocks, ...] in the device's layout, contiguous.
        is_head_major: that layout is `kernels.nki.layout`'s, else it is token-major.
    """

    epoch: int
    caches: tuple[Tensor, ...]
    is_head_major: bool = False

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return self.caches[0].shape[0]

    @cached_property
    def block_bytes(self) -> int:
        """Of one block's contents, in all tensors."""
        return sum(_bytes_of_block(cache) for cache in self.caches)

    def check_ids(self, block_ids: IntArray) -> None:
        """Raises BlocksGoneError where an id is the null block's, or no block's."""
        wrong = block_ids[(block_ids <= NULL_BLOCK_ID) | (block_ids >= self.num_blocks)]
        if wrong.size:
            raise BlocksGoneError(
                f"block {wrong[0]} is none of this worker's, which go from 1 to {self.num_blocks - 1}; compute what it"
                " held anew."
            )

    def contents(self, block_ids: IntArray) -> Bytes:
        """uint8 [num_ids, block_bytes]: copies of what stands in the blocks, in the order of their ids."""
        gathered = np.empty((len(block_ids), self.block_bytes), np.uint8)
        for cache, part in self._parts(gathered):
            blocks = _gather(cache, block_ids)
            part[:] = (_converted(blocks, to_token_major) if self.is_head_major else blocks).reshape(part.shape)
        return gathered

    def write(self, block_ids: IntArray, contents: Bytes) -> None:
        """Let the blocks hold `contents`, uint8 [num_ids, block_bytes], and touch no others."""
        for cache, part in self._parts(contents):
            blocks = part.reshape(len(part), *self._token_major_shape(cache))
            _scatter(cache, block_ids, _converted(blocks, to_head_major) if self.is_head_major else blocks)

    def _parts(self, contents: Bytes) -> Iterator[tuple[Tensor, Bytes]]:
        """Each cache, and the columns of `contents` that are its own."""
        end = 0
        for cache in self.caches:
            start, end = end, end + _bytes_of_block(cache)
            yield cache, contents[:, start:end]

    def _token_major_shape(self, cache: Tensor) -> tuple[int, int, int]:
        """(rank_block_size, num_kv_heads, bytes of a head's token), of one block."""
        _, first, second, head_dim = cache.shape
        axes = (second, first) if self.is_head_major else (first, second)
        return *axes, head_dim * cache.dtype.itemsize


def movable_blocks(
    configure: Configure, model: Model, backend: Backend, draft_model: Model | None = None
) -> MovableBlocks:
    """The caches that were bound to the models' layers for `configure`."""
    names = [spec.name for spec in layer_kv_specs(model, draft_model)]
    attentions = dict(zip(names, attentions_of(model, draft_model), strict=True))
    owners = [tensor.shared_by[0] for tensor in configure.kv_cache_tensors] or names
    caches = tuple(cache for owner in owners for cache in attentions[owner].bound()[0])
    # A layout is told by where it puts the axes that it is asked for.
    return MovableBlocks(configure.epoch, caches, is_head_major=backend.kv_cache_shape(1, 2, 3, 4) == (1, 3, 2, 4))


def _bytes_of_block(cache: Tensor) -> int:
    return cache[0].numel() * cache.dtype.itemsize


def _gather(cache: Tensor, block_ids: IntArray) -> Bytes:
    """uint8 [num_ids, ..., bytes of a head's token], in the device's layout."""
    memory = cache.view(torch.uint8)
    if memory.device.type == "cpu":
        # Where numpy sees the memory it copies whole blocks at a time, and takes no thread of the step's.
        return np.take(memory.numpy(), block_ids, axis=0)
    return memory.index_select(0, _on_device(block_ids, memory)).cpu().numpy()


def _scatter(cache: Tensor, block_ids: IntArray, blocks: Bytes) -> None:
    memory = cache.view(torch.uint8)
    if memory.device.type == "cpu":
        memory.numpy()[block_ids] = blocks
    else:
        copied = torch.from_numpy(np.ascontiguousarray(blocks)).to(memory.device)
        memory.index_copy_(0, _on_device(block_ids, memory), copied)


def _on_device(block_ids: IntArray, memory: Tensor) -> Tensor:
    return torch.from_numpy(block_ids.astype(np.int64)).to(memory.device)


def _converted(blocks: Bytes, convert: Callable[[Tensor], Tensor]) -> Bytes:
    converted: Bytes = convert(torch.from_numpy(blocks)).numpy()
    return converted
