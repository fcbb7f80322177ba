"""What of a KV cache moves, byte by byte, against caches made by hand and copied token by token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.backends.neuron import head_major
from blockplane.data_plane.kv_cache import bind_kv_caches
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.transfers.blocks import Bytes, MovableBlocks, movable_blocks
from blockplane.protos.errors import BlocksGoneError
from blockplane.protos.kv_cache import KVCacheGroup, KVCacheTensor
from blockplane.protos.plan import Configure

NUM_BLOCKS, BLOCK_SIZE = 7, 4
SHAPES = ((2, 8), (1, 16), (3, 8))
"""(num_kv_heads, head_dim) of each KV cache tensor."""
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
HEAD_MAJOR = replace(CPU, kv_cache_shape=head_major)


def caches(dtype: torch.dtype, *, is_head_major: bool = False, seed: int = 0) -> MovableBlocks:
    generator, made = np.random.default_rng(seed), []
    for num_kv_heads, head_dim in SHAPES:
        axes = (num_kv_heads, BLOCK_SIZE) if is_head_major else (BLOCK_SIZE, num_kv_heads)
        shape = NUM_BLOCKS, *axes, head_dim * dtype.itemsize
        made += [torch.from_numpy(generator.integers(0, 256, shape, np.uint8)).view(dtype) for _ in range(2)]
    return MovableBlocks(1, tuple(made), is_head_major)


def token_by_token(blocks: MovableBlocks, block_ids: list[int]) -> list[bytes]:
    """Each block's contents as transfer.proto has them, in its own words."""
    contents = []
    for block_id in block_ids:
        data = b""
        for cache, (num_kv_heads, _) in zip(blocks.caches, [s for s in SHAPES for _ in range(2)], strict=True):
            memory = cache.view(torch.uint8).numpy()
            for token in range(BLOCK_SIZE):
                for head in range(num_kv_heads):
                    place = (head, token) if blocks.is_head_major else (token, head)
                    data += memory[(block_id, *place)].tobytes()
        contents.append(data)
    return contents


def copies(blocks: MovableBlocks) -> list[Bytes]:
    return [cache.view(torch.uint8).numpy().copy() for cache in blocks.caches]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_head_major", [False, True])
def test_contents_are_keys_then_values_of_each_tensor_token_after_token(
    dtype: torch.dtype, is_head_major: bool
) -> None:
    blocks = caches(dtype, is_head_major=is_head_major)
    contents = blocks.contents(np.array([5, 1, 5], np.int32))
    assert contents.shape == (3, blocks.block_bytes)
    assert blocks.block_bytes == 2 * BLOCK_SIZE * sum(heads * dim for heads, dim in SHAPES) * dtype.itemsize
    assert [block.tobytes() for block in contents] == token_by_token(blocks, [5, 1, 5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source_is", "target_is"), [(False, False), (False, True), (True, False), (True, True)])
def test_what_is_written_is_what_was_read_whatever_the_layouts(
    dtype: torch.dtype, source_is: bool, target_is: bool
) -> None:
    source = caches(dtype, is_head_major=source_is)
    target = caches(dtype, is_head_major=target_is, seed=1)
    before = copies(target)
    target.write(np.array([6, 2], np.int32), source.contents(np.array([3, 4], np.int32)))
    assert token_by_token(target, [6, 2]) == token_by_token(source, [3, 4])
    for was, cache in zip(before, copies(target), strict=True):
        assert np.flatnonzero((was != cache).any(axis=(1, 2, 3))).tolist() == [2, 6]


@given(st.permutations(range(1, NUM_BLOCKS)), st.integers(0, NUM_BLOCKS - 1), st.integers(0, 2**32))
def test_any_blocks_move_and_no_others_change(order: list[int], num_ids: int, seed: int) -> None:
    source, target = caches(torch.bfloat16, seed=seed), caches(torch.bfloat16, is_head_major=True, seed=seed + 1)
    block_ids, before = np.array(order[:num_ids], np.int32), token_by_token(target, list(range(NUM_BLOCKS)))
    target.write(block_ids, source.contents(block_ids[::-1]))
    for place, block_id in enumerate(block_ids[::-1].tolist()):
        before[int(block_ids[place])] = token_by_token(source, [block_id])[0]
    assert token_by_token(target, list(range(NUM_BLOCKS))) == before


@pytest.mark.parametrize("wrong", [0, -1, NUM_BLOCKS, 2**31 - 1])
def test_the_null_block_and_what_is_no_block_is_refused_by_its_id(wrong: int) -> None:
    with pytest.raises(BlocksGoneError, match=f"block {wrong} is none of this worker's, which go from 1 to 6"):
        caches(torch.float32).check_ids(np.array([1, wrong, 6], np.int32))
    caches(torch.float32).check_ids(np.array([1, 6], np.int32))


def bound(model: SyntheticModel, backend: Any = CPU, **changes: Any) -> MovableBlocks:
    configure = replace(Configure(BLOCK_SIZE, NUM_BLOCKS, 64, (16,), (2,), epoch=9), **changes)
    bind_kv_caches(model, configure, backend)
    return movable_blocks(configure, model, backend)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_worker_s_blocks_are_those_of_its_layers_in_their_order(dtype: str) -> None:
    model = SyntheticModel("float32", kv_cache_dtype=dtype)
    blocks = bound(model)
    own = [cache for attention in model.attentions for cache in attention.bound()[0]]
    assert [cache.data_ptr() for cache in blocks.caches] == [cache.data_ptr() for cache in own]
    assert (blocks.epoch, blocks.num_blocks, blocks.is_head_major) == (9, NUM_BLOCKS, False)
    assert bound(model, HEAD_MAJOR).is_head_major


def test_a_tensor_that_layers_share_moves_once_and_in_the_order_of_the_tensors() -> None:
    model = SyntheticModel("float32")
    names = [f"layers.{index}.self_attn" for index in range(3)]
    windows = [attention.spec.sliding_window for attention in model.attentions]
    groups = tuple(KVCacheGroup((name,), sliding_window=each) for name, each in zip(names, windows, strict=True))
    spec = model.attentions[0].spec
    size = 2 * NUM_BLOCKS * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * 4
    tensors = KVCacheTensor(size, (names[2],)), KVCacheTensor(size, (names[0], names[1]))
    blocks = bound(model, kv_cache_groups=groups, kv_cache_tensors=tensors)
    own = [model.attentions[index].bound()[0] for index in (2, 0)]
    assert [cache.data_ptr() for cache in blocks.caches] == [cache.data_ptr() for pair in own for cache in pair]
