"""The block pool by itself: small cases, and random use against an ordered dictionary that does the obvious."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockplane.control_plane.engine.block_pool import BlockPool
from blockplane.protos.plan import Int32Array


def pool_of(num_usable: int) -> BlockPool:
    return BlockPool(num_usable + 1, on_reuse=lambda block_ids: None)


def ids(*block_ids: int) -> Int32Array:
    return np.array(block_ids, np.int32)


def taken(pool: BlockPool, num_blocks: int) -> Int32Array:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def test_the_null_block_is_never_handed_out() -> None:
    pool = pool_of(6)
    assert (pool.num_usable, pool.num_free) == (6, 6)
    assert taken(pool, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert pool.num_free == 0


def test_what_is_handed_out_is_a_copy() -> None:
    pool = pool_of(4)
    block_ids = taken(pool, 2)
    assert block_ids.dtype == np.int32
    kept = block_ids.tolist()
    pool.release(block_ids)
    taken(pool, 4)
    for _ in range(10):
        pool.release(ids(1, 2, 3, 4))
        taken(pool, 4)
    assert block_ids.tolist() == kept


def test_a_refused_allocation_changes_nothing_not_even_the_order() -> None:
    reused: list[int] = []
    pool = BlockPool(7, on_reuse=lambda block_ids: reused.extend(block_ids.tolist()))
    pool.release(taken(pool, 3)[::-1])
    taken(pool, 3)
    before = pool.free_list(), [pool.num_holders(block_id) for block_id in range(7)], list(reused)
    assert pool.allocate(4) is None
    assert (pool.free_list(), [pool.num_holders(block_id) for block_id in range(7)], reused) == before
    assert before[0] == [3, 2, 1]


def test_nothing_is_a_fine_number_of_blocks() -> None:
    pool = pool_of(2)
    taken(pool, 2)
    nothing = taken(pool, 0)
    assert nothing.size == 0
    assert nothing.dtype == np.int32
    pool.hold(nothing)
    pool.release(nothing)
    assert (pool.num_free, pool.num_free_among(nothing)) == (0, 0)


def test_the_block_that_is_free_longest_is_reused_first_and_a_chains_tail_before_its_head() -> None:
    reused: list[int] = []
    pool = BlockPool(7, on_reuse=lambda block_ids: reused.extend(block_ids.tolist()))
    first, second = taken(pool, 3), taken(pool, 3)
    assert reused == [1, 2, 3, 4, 5, 6]
    pool.release(second[::-1])
    pool.release(first[::-1])
    assert taken(pool, 4).tolist() == [6, 5, 4, 3]
    assert taken(pool, 2).tolist() == [2, 1]
    assert reused[6:] == [6, 5, 4, 3, 2, 1]


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = pool_of(2)
    block_ids = taken(pool, 1)
    pool.hold(block_ids)
    assert pool.num_holders(1) == 2
    pool.release(block_ids)
    assert (pool.num_free, pool.num_free_among(block_ids), pool.num_holders(1)) == (1, 0, 1)
    pool.release(block_ids)
    assert (pool.num_free, pool.num_free_among(block_ids)) == (2, 1)


def test_a_free_block_that_is_held_again_is_not_handed_out_and_comes_last_when_it_is_free_again() -> None:
    pool = pool_of(4)
    pool.release(taken(pool, 4))
    pool.hold(ids(2))
    assert (pool.num_free, pool.free_list()) == (3, [1, 3, 4])
    assert pool.allocate(4) is None
    pool.release(ids(2))
    assert pool.free_list() == [1, 3, 4, 2]
    pool.hold(ids(3))
    assert taken(pool, 3).tolist() == [1, 4, 2]


def test_all_holders_may_let_go_of_a_block_at_once() -> None:
    """It is freed once; among what is freed with it, it comes where it was named last."""
    pool = pool_of(4)
    taken(pool, 4)
    pool.hold(ids(1, 2))
    pool.release(ids(1, 3, 1, 2, 4))
    assert (pool.free_list(), pool.num_free) == ([3, 1, 4], 3)
    assert [pool.num_holders(block_id) for block_id in (1, 2, 3, 4)] == [0, 1, 0, 0]


def test_only_named_blocks_are_counted_as_free() -> None:
    pool = pool_of(4)
    taken(pool, 2)
    assert [pool.num_free_among(ids(*block_ids)) for block_ids in ((1, 2), (2, 3), (3, 4), ())] == [0, 1, 2, 0]


@pytest.mark.parametrize("num_usable", [1, 2, 3, 7])
def test_gaps_are_closed_however_often_blocks_are_held_and_let_go(num_usable: int) -> None:
    """Each round leaves a place in the queue that counts no more."""
    pool = pool_of(num_usable)
    order = list(range(1, num_usable + 1))
    for round_number in range(10 * num_usable):
        block_id = order[round_number * 5 % num_usable]
        pool.hold(ids(block_id))
        pool.release(ids(block_id))
        order.remove(block_id)
        order.append(block_id)
        assert pool.free_list() == order
    assert taken(pool, num_usable).tolist() == order


@pytest.mark.parametrize("block_id", [1, 2, 3, 4])
def test_a_block_that_comes_and_goes_stands_in_the_queue_once(block_id: int) -> None:
    """Its old places are still there when the gaps are closed, the very first among them."""
    pool = pool_of(4)
    others = [other for other in (1, 2, 3, 4) if other != block_id]
    for _ in range(20):
        pool.hold(ids(block_id))
        pool.release(ids(block_id))
        assert pool.free_list() == [*others, block_id]


class NaivePool:
    """The free blocks in order, and how many hold each."""

    def __init__(self, num_usable: int) -> None:
        self.free = OrderedDict.fromkeys(range(1, num_usable + 1))
        self.holders = dict.fromkeys(range(1, num_usable + 1), 0)

    def allocate(self, num_blocks: int) -> list[int]:
        block_ids = [self.free.popitem(last=False)[0] for _ in range(num_blocks)]
        self.holders.update(dict.fromkeys(block_ids, 1))
        return block_ids

    def hold(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.free.pop(block_id, None)
            self.holders[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.holders[block_id] -= 1
        for block_id in block_ids:
            if not self.holders[block_id]:
                self.free[block_id] = None
                self.free.move_to_end(block_id)


class PoolWalk(RuleBasedStateMachine):
    """Allocate, share and let go in any order."""

    @initialize(num_usable=st.integers(1, 8))
    def start(self, num_usable: int) -> None:
        self.reused: list[int] = []
        self.pool = BlockPool(num_usable + 1, on_reuse=lambda block_ids: self.reused.extend(block_ids.tolist()))
        self.naive = NaivePool(num_usable)
        self.all_reused: list[int] = []

    @rule(num_blocks=st.integers(0, 9))
    def allocate(self, num_blocks: int) -> None:
        block_ids = self.pool.allocate(num_blocks)
        if num_blocks > len(self.naive.free):
            assert block_ids is None
            return
        assert block_ids is not None
        expected = self.naive.allocate(num_blocks)
        self.all_reused += expected
        assert block_ids.tolist() == expected

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.naive.holders)), unique=True))
        assert self.pool.num_free_among(ids(*block_ids)) == len(self.naive.free.keys() & set(block_ids))
        self.pool.hold(ids(*block_ids))
        self.naive.hold(block_ids)

    @precondition(lambda self: any(self.naive.holders.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [(block_id, nth) for block_id, number in self.naive.holders.items() for nth in range(number)]
        block_ids = [block_id for block_id, _ in data.draw(st.lists(st.sampled_from(held), unique=True))]
        self.pool.release(ids(*block_ids))
        self.naive.release(block_ids)

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_list() == list(self.naive.free)
        assert self.pool.num_free == len(self.naive.free)
        assert {block_id: self.pool.num_holders(block_id) for block_id in self.naive.holders} == self.naive.holders
        assert self.reused == self.all_reused, "whoever's content is given up is told, in order"


TestPoolWalk = PoolWalk.TestCase
TestPoolWalk.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(num_usable=st.integers(1, 200), sizes=st.lists(st.integers(1, 50), max_size=30))
def test_what_is_taken_and_given_back_in_pieces_is_all_there(num_usable: int, sizes: list[int]) -> None:
    pool = pool_of(num_usable)
    held: list[Int32Array] = []
    for size in sizes:
        block_ids = pool.allocate(size)
        if block_ids is None:
            pool.release(np.concatenate([ids(), *held]))
            held = []
        else:
            held.append(block_ids)
    in_use = [block_id for block_ids in held for block_id in block_ids.tolist()]
    assert len(set(in_use)) == len(in_use) == num_usable - pool.num_free
    assert sorted(in_use + pool.free_list()) == list(range(1, num_usable + 1))
