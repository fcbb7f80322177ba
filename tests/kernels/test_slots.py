"""The slot formula over groups, far positions and ranks, against the plainest way to say it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockplane.kernels.slots import PAD_SLOT_ID, ContextParallel, context_parallel_of, keep_slots, slots_of


def test_several_groups_are_mapped_in_one_pass() -> None:
    tables = np.array([[[4, 7], [5, 1]], [[9, 2], [3, 8]]], np.int32)
    rows, positions = np.array([0, 1, 0]), np.array([0, 3, 2])
    both = slots_of(tables, rows, positions, 2)
    assert both.tolist() == [slots_of(table, rows, positions, 2).tolist() for table in tables]
    on_torch = slots_of(torch.from_numpy(tables), torch.from_numpy(rows), torch.from_numpy(positions), 2)
    assert on_torch.tolist() == both.tolist() == [[8, 3, 14], [18, 17, 4]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_slots_beyond_int32_do_not_overflow(world_size: int) -> None:
    table = np.array([[2**30]], np.int32)
    slots = slots_of(table, np.array([0]), np.array([0]), 256, ContextParallel(world_size))
    assert slots.tolist() == [2**38]


def test_what_is_not_kept_is_padding_in_every_group() -> None:
    slots, kept = np.array([[0, 5, 9], [-1, 2**40, 3]]), np.array([True, False, True])
    for kept_slots in keep_slots(slots, kept), keep_slots(torch.from_numpy(slots), torch.from_numpy(kept)):
        assert kept_slots.tolist() == [[0, PAD_SLOT_ID, 9], [-1, PAD_SLOT_ID, 3]]


@given(st.integers(1, 5), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_every_position_is_one_rank_s_and_each_rank_fills_its_blocks_in_order(
    world_size: int, interleave_size: int, num_blocks: int
) -> None:
    block_size = 8
    table = np.random.default_rng(world_size).permutation(np.arange(1, 20, dtype=np.int32))[None, :num_blocks]
    positions = np.arange(num_blocks * block_size * world_size)
    rows = np.zeros(len(positions), np.int64)
    owners = positions // interleave_size % world_size
    whole_blocks = (table[0][:, None].astype(np.int64) * block_size + np.arange(block_size)).ravel()
    for rank in range(world_size):
        slots = slots_of(table, rows, positions, block_size, ContextParallel(world_size, rank, interleave_size))
        assert ((slots != PAD_SLOT_ID) == (owners == rank)).all()
        assert slots[owners == rank].tolist() == whole_blocks.tolist()


@given(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(0, 60))
def test_places_are_counted_from_the_positions_that_a_rank_keeps(
    world_size: int, interleave_size: int, num_tokens: int
) -> None:
    for rank in range(world_size):
        share = ContextParallel(world_size, rank, interleave_size)
        kept = [position for position in range(num_tokens) if share.owns(position)]
        assert share.num_kept(num_tokens) == len(kept)
        assert [share.positions(place) for place in range(len(kept))] == kept
        assert share.positions(torch.arange(len(kept))).tolist() == kept


def test_prefill_and_decode_groups_interleave_as_one() -> None:
    shares = [context_parallel_of((2, prefill), (3, decode), 4) for prefill in range(2) for decode in range(3)]
    assert shares == [ContextParallel(6, rank, 4) for rank in range(6)]
    assert context_parallel_of(decode=(3, 1)) == ContextParallel(3, 1)
    assert context_parallel_of() == ContextParallel()
