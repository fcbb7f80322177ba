"""Blocks of rows in several KV groups: what is held, given up, found again. Rows and requests here are made by hand."""

from collections import deque

import numpy as np
import pytest
from driving import FULL, answer, chunk, is_whole, make_request, make_scheduler, run, window
from hypothesis import example, given
from hypothesis import strategies as st

from blockplane.control_plane.engine.kv_blocks import KVBlocks, Prefix
from blockplane.control_plane.engine.request import Request
from blockplane.protos.kv_cache import KVCacheGroup, first_visible
from blockplane.protos.plan import Configure, StepPlan

B = 4
NOTHING = np.zeros((0, 1), np.int32)


def make_blocks(
    *groups: KVCacheGroup, num_usable: int = 100, block_size: int = B, num_rows: int = 4, budget: int = 16
) -> KVBlocks:
    return KVBlocks(Configure(block_size, num_usable + 1, 256, (budget,), (num_rows,), groups or (FULL,)))


def grow(blocks: KVBlocks, row: int, num_new: int) -> None:
    assert blocks.grow(np.array([row]), np.array([num_new])) is not None


def give_up(blocks: KVBlocks, row: int, num_computed_tokens: int) -> None:
    blocks.give_up_unseen(np.array([row]), np.array([num_computed_tokens]))


def held(blocks: KVBlocks, row: int, group: int = 0) -> list[int]:
    """Logical blocks that a row holds in a group."""
    return np.flatnonzero(blocks.tables[row, :, group]).tolist()


def entered(blocks: KVBlocks, num_tokens: int) -> Request:
    request = make_request("a", num_tokens)
    blocks.enter(request)
    return request


def publish(blocks: KVBlocks, request: Request, row: int, num_blocks: int) -> None:
    blocks.publish(request, row, 0, num_blocks, request.token_ids.tobytes())


# -- growing -----------------------------------------------------------------------------------------------------------


def test_a_logical_block_has_an_id_in_every_group() -> None:
    blocks = make_blocks(FULL, window(8), chunk(8))
    grown = blocks.grow(np.array([2, 0]), np.array([2, 1]))
    assert grown is not None
    rows, block_ids = grown
    assert rows.tolist() == [2, 2, 0]
    assert block_ids.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert blocks.tables[2, :3].tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0]]
    assert blocks.tables[0, :2].tolist() == [[7, 8, 9], [0, 0, 0]]
    assert blocks.num_blocks.tolist() == [1, 0, 2, 0]


def test_rows_grow_behind_what_they_have() -> None:
    blocks = make_blocks()
    grow(blocks, 0, 2)
    grown = blocks.grow(np.array([0, 1, 2]), np.array([1, 0, 2]))
    assert grown is not None
    assert (grown[0].tolist(), grown[1].tolist()) == ([0, 2, 2], [[3], [4], [5]])
    assert blocks.tables[0, :4, 0].tolist() == [1, 2, 3, 0]
    assert blocks.num_blocks.tolist() == [3, 0, 2, 0]


def test_where_there_is_no_room_for_all_nothing_changes() -> None:
    blocks = make_blocks(FULL, window(8), num_usable=5)
    grow(blocks, 0, 1)
    free, tables = blocks.pool.free_list(), blocks.tables.copy()
    assert blocks.grow(np.array([0, 1]), np.array([1, 1])) is None
    assert blocks.pool.free_list() == free
    assert np.array_equal(blocks.tables, tables)
    assert blocks.num_blocks.tolist() == [1, 0, 0, 0]


def test_to_grow_by_nothing_needs_no_room() -> None:
    blocks = make_blocks(num_usable=1)
    grow(blocks, 0, 1)
    grown = blocks.grow(np.array([0, 1]), np.array([0, 0]))
    assert grown is not None
    assert (grown[0].size, grown[1].size) == (0, 0)


def test_a_row_gives_all_back_its_last_block_first() -> None:
    blocks = make_blocks(FULL, window(4), num_usable=6)
    grow(blocks, 1, 3)
    give_up(blocks, 1, 8)
    assert blocks.pool.free_list() == [2]
    blocks.vacate(1)
    assert blocks.pool.free_list() == [2, 6, 5, 4, 3, 1]
    assert not blocks.tables.any()
    assert blocks.num_blocks[1] == 0


# -- windows and chunks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "computed", "kept"),
    [
        (FULL, 32, range(8)),
        (window(8), 0, range(8)),
        (window(8), 8, range(8)),
        (window(8), 10, range(8)),
        (window(8), 11, range(1, 8)),
        (window(8), 15, range(2, 8)),
        (window(1), 15, range(3, 8)),
        (window(1), 16, range(4, 8)),
        (chunk(8), 7, range(8)),
        (chunk(8), 8, range(2, 8)),
        (chunk(8), 15, range(2, 8)),
        (chunk(6), 11, range(1, 8)),
        (chunk(6), 12, range(3, 8)),
    ],
)
def test_a_group_keeps_the_blocks_that_the_next_query_sees(group: KVCacheGroup, computed: int, kept: range) -> None:
    """The query at position p sees p - window + 1 to p, or its chunk; blocks hold 4 tokens."""
    blocks = make_blocks(group)
    grow(blocks, 0, 8)
    give_up(blocks, 0, computed)
    assert held(blocks, 0) == list(kept)
    assert blocks.pool.num_free == 100 - len(kept)
    assert blocks.num_blocks[0] == 8, "logical blocks stay, the null block in their place"


def test_groups_give_up_each_its_own() -> None:
    blocks = make_blocks(FULL, window(8), window(8), chunk(16))
    grow(blocks, 0, 6)
    give_up(blocks, 0, 20)
    assert [held(blocks, 0, group) for group in range(4)] == [[*range(6)], [3, 4, 5], [3, 4, 5], [4, 5]]


def test_what_is_given_up_is_given_up_once_and_by_its_own_row() -> None:
    blocks = make_blocks(window(4))
    for row in (0, 1):
        grow(blocks, row, 5)
    for computed in (4, 8, 8, 6, 12):
        give_up(blocks, 0, computed)
    assert (held(blocks, 0), held(blocks, 1)) == ([2, 3, 4], [0, 1, 2, 3, 4])
    blocks.give_up_unseen(np.array([1, 0]), np.array([8, 16]))
    assert (held(blocks, 0), held(blocks, 1)) == ([3, 4], [1, 2, 3, 4])
    assert blocks.pool.num_free == 100 - 6
    assert blocks.pool.num_holders(0) == 0, "the null block in its place was never given back"


def test_the_next_request_of_a_row_begins_with_nothing_given_up() -> None:
    blocks = make_blocks(window(4))
    grow(blocks, 0, 5)
    give_up(blocks, 0, 20)
    blocks.vacate(0)
    blocks.take(0, Prefix(NOTHING))
    grow(blocks, 0, 2)
    give_up(blocks, 0, 4)
    assert held(blocks, 0) == [0, 1]
    give_up(blocks, 0, 8)
    assert held(blocks, 0) == [1]


def test_a_row_that_takes_a_prefix_gives_up_from_where_that_begins() -> None:
    blocks = make_blocks(FULL, window(8))
    request = entered(blocks, 25)
    grow(blocks, 0, 6)
    publish(blocks, request, 0, 6)
    prefix = blocks.find_prefix(request)
    blocks.take(1, prefix)
    assert (held(blocks, 1, 0), held(blocks, 1, 1)) == ([*range(6)], [4, 5])
    assert blocks.num_blocks[1] == 6
    give_up(blocks, 1, 28)
    assert held(blocks, 1, 1) == [5]
    blocks.vacate(0)
    blocks.vacate(1)
    assert sorted(blocks.pool.free_list()) == list(range(1, 101))


@pytest.mark.parametrize("ahead", [1, 2])
def test_through_a_long_text_a_window_group_holds_no_more_than_its_window_and_what_is_in_flight(ahead: int) -> None:
    """Blocks of 4, a window of 8, segments of 8: each plan in flight adds what it writes to the window's two."""
    scheduler = make_scheduler(block_size=4, groups=(FULL, window(8)), max_model_len=128, tokens=(8,))
    request = make_request("a", 40, max_tokens=60)
    scheduler.add([request])
    most_prefilling, most_decoding = 0, 0
    unanswered: deque[StepPlan] = deque()
    while not request.ended:
        while len(unanswered) < ahead and (plan := scheduler.schedule()) is not None:
            unanswered.append(plan)
        num_held = len(held(scheduler.blocks, 0, 1))
        assert len(held(scheduler.blocks, 0, 0)) == scheduler.blocks.num_blocks[0]
        if any(plan.prefill_rows.size for plan in unanswered):
            most_prefilling = max(most_prefilling, num_held)
        else:
            most_decoding = max(most_decoding, num_held)
        scheduler.update(answer(scheduler, unanswered.popleft()))
    assert most_prefilling == 2 + 2 * ahead
    assert most_decoding == 2 + ahead


# -- how much ----------------------------------------------------------------------------------------------------------


def test_what_all_groups_need_together_must_fit_with_a_block_of_each_for_every_running_row() -> None:
    """17 tokens are 5 blocks; a window of 4 needs all 5 too, as prefill segments of 16 go through it."""
    blocks = make_blocks(FULL, window(4), num_usable=14)
    nothing = Prefix(np.zeros((0, 2), np.int32))
    assert blocks.num_needed(17) <= 10
    assert blocks.has_room(17, nothing, num_rows=2)
    assert not blocks.has_room(17, nothing, num_rows=3)
    assert not blocks.has_room(21, nothing, num_rows=2)


def test_padding_takes_no_blocks() -> None:
    assert [make_blocks().num_needed(num_tokens) for num_tokens in (1, 4, 5, 16, 17)] == [1, 1, 2, 4, 5]


def test_of_a_window_no_more_is_asked_for_than_it_ever_holds() -> None:
    """A window of 8 and segments of 16 tokens: 23 tokens, which touch 7 blocks at most."""
    blocks = make_blocks(window(8), num_usable=8)
    nothing = Prefix(NOTHING)
    assert blocks.has_room(200, nothing, num_rows=1)
    assert not blocks.has_room(200, nothing, num_rows=2)
    assert not blocks.has_room(28, nothing, num_rows=2)
    assert blocks.has_room(24, nothing, num_rows=2)


# -- finding -----------------------------------------------------------------------------------------------------------


def test_a_prefix_has_the_null_block_where_a_group_needs_none() -> None:
    blocks = make_blocks(FULL, window(8), chunk(8))
    request = entered(blocks, 25)
    grow(blocks, 0, 6)
    publish(blocks, request, 0, 6)
    prefix = blocks.find_prefix(request)
    assert prefix.num_blocks == 6
    assert prefix.block_ids[:, 0].tolist() == [1, 4, 7, 10, 13, 16]
    assert prefix.block_ids[:, 1].tolist() == [0, 0, 0, 0, 14, 17], "the query at position 24 sees 17 to 24"
    assert prefix.block_ids[:, 2].tolist() == [0] * 6, "and is the first of its chunk"
    assert prefix.held.tolist() == [1, 4, 7, 10, 13, 14, 16, 17]


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_one_without_a_full_block_before_its_last_token_finds_none(num_tokens: int) -> None:
    blocks = make_blocks(FULL, window(8))
    grow(blocks, 0, 6)
    publish(blocks, entered(blocks, 25), 0, 6)
    prefix = blocks.find_prefix(entered(blocks, num_tokens))
    assert (prefix.num_blocks, prefix.block_ids.shape) == (0, (0, 2))


def test_a_window_finds_its_last_blocks_though_those_before_are_reused() -> None:
    blocks = make_blocks(window(8))
    request = entered(blocks, 25)
    grow(blocks, 0, 6)
    publish(blocks, request, 0, 6)
    blocks.cache.forget(np.array([1, 2, 3, 4], np.int32))
    assert blocks.find_prefix(request).block_ids.ravel().tolist() == [0, 0, 0, 0, 5, 6]
    blocks.cache.forget(np.array([5], np.int32))
    assert blocks.find_prefix(request).num_blocks == 0


def test_several_groups_of_one_kind_are_found_together_or_not_at_all() -> None:
    blocks = make_blocks(FULL, window(8), window(8))
    request = entered(blocks, 25)
    grow(blocks, 0, 6)
    publish(blocks, request, 0, 6)
    assert blocks.find_prefix(request).block_ids[4:].tolist() == [[13, 14, 15], [16, 17, 18]]
    blocks.cache.forget(np.array([18], np.int32))
    # Its sibling 17 is lost with it, so the longest hit whose window is whole ends before them.
    assert blocks.find_prefix(request).num_blocks == 5
    assert blocks.find_prefix(request).block_ids[3:].tolist() == [[10, 11, 12], [13, 14, 15]]


def test_groups_that_see_alike_but_stand_apart_are_found_all_the_same() -> None:
    blocks = make_blocks(FULL, window(8), FULL)
    request = entered(blocks, 25)
    grow(blocks, 0, 6)
    publish(blocks, request, 0, 6)
    blocks.cache.forget(np.array([15], np.int32))
    prefix = blocks.find_prefix(request)
    assert prefix.block_ids.tolist() == [[1, 0, 3], [4, 0, 6], [7, 8, 9], [10, 11, 12]]


GROUPS = st.lists(
    st.just(FULL) | st.builds(window, st.integers(1, 14)) | st.builds(chunk, st.integers(1, 14)), min_size=1, max_size=3
).map(tuple)


def naive_hit(groups: tuple[KVCacheGroup, ...], is_cached: list[list[bool]], num_tokens: int, block_size: int) -> int:
    """The most blocks before the last token behind which every group has all that the next query sees, by trying."""
    for num_blocks in range((num_tokens - 1) // block_size, 0, -1):
        position = num_blocks * block_size
        seen_everywhere = all(
            is_cached[index][seen // block_size]
            for index, group in enumerate(groups)
            for seen in range(first_visible(position, group.sliding_window, group.attention_chunk_size), position)
        )
        if seen_everywhere:
            return num_blocks
    return 0


@given(groups=GROUPS, num_tokens=st.integers(1, 40), block_size=st.sampled_from([1, 2, 4]), data=st.data())
@example(groups=(FULL, window(5), window(9)), num_tokens=40, block_size=2, data=None)
def test_hybrid_groups_agree_on_the_longest_common_hit(
    groups: tuple[KVCacheGroup, ...], num_tokens: int, block_size: int, data: st.DataObject | None
) -> None:
    """Against the definition, tried from the longest on; some blocks of some groups are forgotten."""
    blocks = make_blocks(*groups, num_usable=200, block_size=block_size)
    request = entered(blocks, num_tokens)
    num_full, num_groups = num_tokens // block_size, len(groups)
    if num_full:
        grow(blocks, 0, num_full)
        publish(blocks, request, 0, num_full)
    forgotten: list[int] = []
    if data is not None and num_full:
        forgotten = data.draw(st.lists(st.integers(1, num_full * num_groups), max_size=12))
        blocks.cache.forget(np.array(forgotten, np.int32))
    # What is forgotten takes along its logical block's siblings in groups that are cached as one.
    is_cached = [[True] * num_full for _ in groups]
    for block_id in forgotten:
        logical, group = divmod(block_id - 1, num_groups)
        (kind,) = [kind for kind in blocks.kinds if group in range(num_groups)[kind.groups]]
        for sibling in range(num_groups)[kind.groups]:
            is_cached[sibling][logical] = False
    prefix = blocks.find_prefix(request)
    assert prefix.num_blocks == naive_hit(groups, is_cached, num_tokens, block_size)
    for index, seen in enumerate(groups):
        first = first_visible(prefix.num_blocks * block_size, seen.sliding_window, seen.attention_chunk_size)
        first_block = int(first) // block_size
        expected = [0 if j < first_block else 1 + j * num_groups + index for j in range(prefix.num_blocks)]
        assert prefix.block_ids[:, index].tolist() == expected


@given(groups=GROUPS, lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4))
def test_every_second_turn_gives_what_the_first_gave_and_leaves_the_pool_whole(
    groups: tuple[KVCacheGroup, ...], lengths: list[tuple[int, int]]
) -> None:
    scheduler = make_scheduler(usable_blocks=60 * len(groups), block_size=4, groups=groups, tokens=(16,))
    for length, max_tokens in lengths * 2:
        request = make_request("a", length, max_tokens)
        run(scheduler, request)
        assert request.num_tokens == min(length + max_tokens, 64)
        assert is_whole(scheduler)


def test_four_sessions_in_turn_with_a_window_and_room_for_all_hit_at_least_all_but_the_window() -> None:
    """A window of two blocks beside full attention, a pool of four times what the sessions need."""
    num_prompt_tokens, size = 50, 4
    need = 4 * 2 * (-(-(num_prompt_tokens + 8) // size))
    scheduler = make_scheduler(
        usable_blocks=4 * need, block_size=size, groups=(FULL, window(2 * size)), tokens=(16,), max_model_len=128
    )
    sessions = [make_request(str(first), num_prompt_tokens, first=first) for first in (1000, 2000, 3000, 4000)]
    for session in sessions:
        run(scheduler, session)
    for session in sessions:
        turn = make_request("turn", num_prompt_tokens, max_tokens=1)
        turn.token_ids = session.token_ids[:num_prompt_tokens]
        run(scheduler, turn)
        assert turn.num_cached_tokens is not None
        assert turn.num_cached_tokens >= num_prompt_tokens - 2 * size


# -- what rows have in common ------------------------------------------------------------------------------------------


def test_rows_have_in_common_the_leading_blocks_that_are_the_same() -> None:
    blocks = make_blocks(FULL, window(8))
    request = entered(blocks, 17)
    grow(blocks, 0, 5)
    publish(blocks, request, 0, 4)
    blocks.take(1, blocks.find_prefix(request))
    assert blocks.num_common_prefix_blocks(np.array([0])) == [5, 5]
    assert blocks.num_common_prefix_blocks(np.array([0, 1])) == [4, 0], "of the window row 1 lacks what it does not see"
    grow(blocks, 1, 1)
    assert blocks.num_common_prefix_blocks(np.array([1, 0])) == [4, 0]
    grow(blocks, 2, 1)
    assert blocks.num_common_prefix_blocks(np.array([0, 1, 2])) == [0, 0]
    assert blocks.num_common_prefix_blocks(np.array([], np.int64)) == [0, 0]
    assert blocks.num_common_prefix_blocks(np.array([1])) == [5, 0]
