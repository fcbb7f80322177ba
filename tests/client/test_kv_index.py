"""A router's mirror of a prefix cache: what it finds, and that old, repeated and missing batches do no harm."""

from dataclasses import replace

import numpy as np
import pytest

from blockplane.client.kv_index import KVIndex
from blockplane.protos.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent, KVEventBatch

B = 2
EPOCH = 1
CLEARED = AllBlocksCleared()


def stored(hashes: list[int], tokens: list[int], parent: int | None = None) -> BlocksStored:
    return BlocksStored(tuple(hashes), parent, np.array(tokens, "<i4").tobytes())


def batch(sequence: int, *events: KVEvent, epoch: int = EPOCH) -> KVEventBatch:
    return KVEventBatch(epoch, sequence, B, events)


@pytest.fixture
def index() -> KVIndex:
    """One that knows two chains of one head: 5 6 7 8 and 5 6 9 9, as of number 10."""
    index = KVIndex()
    assert index.apply(batch(10, CLEARED, stored([1, 2], [5, 6, 7, 8]), stored([3], [9, 9], parent=1)))
    return index


@pytest.mark.parametrize(
    ("token_ids", "num_cached"),
    [
        ([], 0),
        ([5], 0),
        ([5, 6], 2),
        ([5, 6, 7], 2),
        ([5, 6, 7, 8], 4),
        ([5, 6, 9, 9, 7, 8], 4),
        ([7, 8], 0),
        ([6, 5, 7, 8], 0),
    ],
)
def test_a_prefix_is_found_block_by_block_behind_its_own_parent(
    index: KVIndex, token_ids: list[int], num_cached: int
) -> None:
    assert index.longest_prefix(token_ids) == num_cached
    assert index.longest_prefix(np.array(token_ids, np.int64)) == num_cached


def test_an_index_that_has_heard_nothing_finds_nothing() -> None:
    assert KVIndex().longest_prefix([1, 2, 3]) == 0


def test_a_removed_block_hides_what_stands_behind_it_until_it_comes_back(index: KVIndex) -> None:
    assert index.apply(batch(11, BlocksRemoved((1,))))
    assert (len(index), index.longest_prefix([5, 6, 7, 8])) == (2, 0)
    assert index.apply(batch(12, stored([1], [5, 6])))
    assert (len(index), index.longest_prefix([5, 6, 7, 8])) == (3, 4)


def test_a_block_that_is_unknown_is_removed_in_peace(index: KVIndex) -> None:
    assert index.apply(batch(11, BlocksRemoved((77,))))
    assert len(index) == 3


def test_after_a_reset_nothing_is_found(index: KVIndex) -> None:
    assert index.apply(batch(11, CLEARED))
    assert (len(index), index.longest_prefix([5, 6])) == (0, 0)


def test_the_same_batch_twice_changes_nothing(index: KVIndex) -> None:
    """Case 44: what came before is not taken back by a copy of what came before that."""
    for event in (BlocksRemoved((2,)), stored([2], [7, 8], parent=1), BlocksRemoved((3,))):
        sequence = index._groups[0]._sequence + 1
        assert index.apply(batch(sequence, event))
        before = dict(index._groups[0]._blocks)
        assert index.apply(batch(sequence, event))
        assert index.apply(batch(10, CLEARED))
        assert index._groups[0]._blocks == before
    assert (len(index), index.longest_prefix([5, 6, 7, 8])) == (2, 4)


def test_a_new_epoch_voids_what_was_known_and_the_old_one_s_batches_are_dropped(index: KVIndex) -> None:
    """Case 44: the engine's worker was restarted."""
    assert index.apply(batch(1, CLEARED, epoch=2))
    assert len(index) == 0
    assert index.apply(batch(11, stored([4], [1, 1])))
    assert index.apply(batch(12, CLEARED, stored([4], [1, 1])))
    assert (len(index), index.longest_prefix([1, 1])) == (0, 0)
    assert index.apply(batch(2, stored([4], [3, 3]), epoch=2))
    assert index.longest_prefix([3, 3]) == 2


def test_a_gap_changes_nothing_and_the_first_batch_of_a_new_call_mends_it(index: KVIndex) -> None:
    assert not index.apply(batch(12, BlocksRemoved((1,))))
    assert not index.apply(batch(13, BlocksRemoved((2,))))
    assert index.longest_prefix([5, 6, 7, 8]) == 4
    assert index.apply(batch(13, CLEARED, stored([3], [1, 1])))
    assert (index.longest_prefix([1, 1]), index.longest_prefix([5, 6])) == (2, 0)
    assert index.apply(batch(14, BlocksRemoved((3,))))
    assert len(index) == 0


@pytest.mark.parametrize("epoch", [EPOCH, 2])
def test_without_a_beginning_nothing_is_believed(epoch: int) -> None:
    index = KVIndex()
    for first in (batch(5, stored([1], [5, 6]), epoch=epoch), batch(6, epoch=epoch)):
        assert not index.apply(first)
    assert index.longest_prefix([5, 6]) == 0


def test_a_new_epoch_is_not_entered_in_its_middle(index: KVIndex) -> None:
    assert not index.apply(batch(11, stored([4], [1, 1]), epoch=2))
    assert index.apply(batch(11, stored([4], [1, 1])))
    assert index.longest_prefix([1, 1]) == 2


def test_each_worker_group_has_blocks_epochs_and_gaps_of_its_own() -> None:
    index = KVIndex()
    for group in (0, 1):
        assert index.apply(replace(batch(1, CLEARED, stored([9], [group, group]), epoch=7 + group), group=group))
    assert (len(index), index.longest_prefixes([1, 1, 1])) == (2, {0: 0, 1: 2})
    assert index.longest_prefix([0, 0]) == index.longest_prefix([1, 1]) == 2
    assert not index.apply(batch(3, BlocksRemoved((9,)), epoch=7)), "a batch of group 0 is missing"
    assert index.apply(replace(batch(2, BlocksRemoved((9,)), epoch=8), group=1)), "and none of group 1"
    assert (index.longest_prefixes([0, 0]), index.longest_prefix([1, 1])) == ({0: 2, 1: 0}, 0)
