"""Blocks that are held for a request on its way, at both ends, and what a scheduler does that lacks them meanwhile."""

import numpy as np
from driving import FULL, answer, finish, is_whole, make_request, make_scheduler, plan_step, run_step, window
from hypothesis import given, settings
from hypothesis import strategies as st

from blockplane.control_plane.engine.moved_blocks import Lease, lease_computed, make_room
from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Scheduler
from blockplane.protos.kv_cache import KVCacheGroup

SECRET = bytes(32)


def ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, np.int32)


def standing(length: int, **settings: object) -> tuple[Scheduler, Request]:
    """A request whose prompt is computed, with its first token, at a scheduler that hands over."""
    source = make_scheduler(secret=SECRET, **settings)
    source.hand_over(True)
    request = make_request("a", length)
    source.add([request])
    while not source.standing():
        run_step(source)
    return source, request


# -- leases ------------------------------------------------------------------------------------------------------------


def test_leased_blocks_are_not_handed_out_and_come_back_once() -> None:
    scheduler = make_scheduler(usable_blocks=4)
    blocks = scheduler.blocks
    lease = Lease(blocks, ids(1, 2))
    assert blocks.pool.allocate(3) is None
    assert sorted(blocks.pool.free_list()) == [3, 4]
    lease.release()
    lease.release()
    assert (is_whole(scheduler), blocks.num_lent) == (True, 0)


def test_a_lone_request_waits_for_blocks_that_are_leased() -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4)
    lease = Lease(scheduler.blocks, ids(1, 2))
    request = make_request("a", 12)
    scheduler.add([request])
    assert scheduler.schedule() is None
    lease.release()
    finish(scheduler, request)


def test_a_lone_row_that_decodes_keeps_its_blocks_while_it_waits_for_leased_ones() -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4)
    request = make_request("a", 4, max_tokens=8)
    scheduler.add([request])
    run_step(scheduler)
    lease = Lease(scheduler.blocks, ids(*scheduler.blocks.pool.free_list()))
    assert scheduler.schedule() is None
    assert request.row is not None
    lease.release()
    finish(scheduler, request)
    assert scheduler.statistics().num_preemptions == 0


# -- rows that stand ---------------------------------------------------------------------------------------------------


def test_a_row_that_stands_neither_decodes_nor_keeps_others_from_it() -> None:
    scheduler, request = standing(8)
    other = make_request("b", 5, first=40)
    scheduler.hand_over(False)
    scheduler.add([other])
    plan, _ = run_step(scheduler)
    assert len(plan.prefill_rows) == 1
    plan, _ = run_step(scheduler)
    assert plan.decode_rows is not None
    assert plan.decode_rows.tolist() == [other.row]
    assert scheduler.standing() == [request]


def test_a_row_that_is_kept_decodes_beside_those_that_do() -> None:
    scheduler, request = standing(8)
    scheduler.hand_over(False)
    other = make_request("b", 5, first=40, max_tokens=30)
    scheduler.add([other])
    for _ in range(4):
        # The decode set is steady.
        run_step(scheduler)
    scheduler.keep(request)
    plan, _ = run_step(scheduler)
    assert plan.decode_rows is not None
    assert sorted(plan.decode_rows.tolist()) == sorted([request.row, other.row])
    finish(scheduler, request, other)
    assert is_whole(scheduler)


def test_a_row_stands_only_once_its_first_token_is_answered() -> None:
    scheduler = make_scheduler()
    scheduler.hand_over(True)
    request = make_request("a", 6)
    scheduler.add([request])
    plan = plan_step(scheduler)
    assert scheduler.standing() == []
    scheduler.update(answer(scheduler, plan))
    assert scheduler.standing() == [request]
    scheduler.give_over(request)
    assert request.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert is_whole(scheduler)


# -- room --------------------------------------------------------------------------------------------------------------


def test_there_is_no_room_where_running_rows_may_need_it() -> None:
    _, request = standing(16)
    target = make_scheduler(usable_blocks=6, secret=SECRET)
    assert make_room(target.blocks, request, num_rows=2) is None
    assert is_whole(target)
    room = make_room(target.blocks, request, num_rows=1)
    assert room is not None
    assert len(room.block_ids) == 4


@settings(max_examples=40)
@given(
    length=st.integers(1, 40),
    block_size=st.sampled_from((1, 2, 4)),
    groups=st.sampled_from(((FULL,), (window(5),), (FULL, window(1), window(7)), (window(3), window(6)))),
    num_cached=st.integers(0, 40),
)
def test_whatever_the_target_has_a_request_that_moved_computes_no_whole_block_anew(
    length: int, block_size: int, groups: tuple[KVCacheGroup, ...], num_cached: int
) -> None:
    layout = {"block_size": block_size, "groups": groups, "usable_blocks": 400}
    source, request = standing(length, **layout)
    target = make_scheduler(secret=SECRET, **layout)
    if num_cached:
        before = make_request("before", num_cached, max_tokens=1)
        target.add([before])
        finish(target, before)
    room = make_room(target.blocks, request, num_rows=0)
    assert room is not None
    assert request.row is not None
    lease = lease_computed(source.blocks, request.row, room.is_missing)
    assert (lease.block_ids > 0).all()
    assert len(lease.block_ids) == len(room.block_ids)
    source.give_over(request)
    room.publish()
    room.lease.release()
    lease.release()
    target.resume(request)
    plan = plan_step(target)
    assert plan.admissions[0].num_computed_tokens == length // block_size * block_size
    target.update(answer(target, plan))
    finish(target, request)
    assert is_whole(source)
    assert is_whole(target)
