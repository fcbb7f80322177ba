"""How many blocks a request needs: small cases worked out by hand, and the two functions against each other."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.kv_needs import longest_fit, num_blocks_needed
from blockplane.protos.kv_cache import KVCacheGroup, first_visible

FULL = KVCacheGroup()
WINDOW = KVCacheGroup(sliding_window=64)
CHUNK = KVCacheGroup(attention_chunk_size=32)

reaches = st.none() | st.integers(1, 100)
groups_lists = st.lists(
    st.builds(KVCacheGroup, sliding_window=reaches) | st.builds(KVCacheGroup, attention_chunk_size=reaches),
    min_size=1,
    max_size=4,
).map(tuple)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (10_000, 625)])
def test_full_attention_holds_every_token(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_needed([FULL], num_tokens, 16) == num_blocks


@pytest.mark.parametrize(
    ("group", "num_segment_tokens", "most"),
    [
        # 63 tokens before the query's own fill 4 blocks with it, and may touch a fifth.
        (WINDOW, 1, 5),
        # 63 tokens before a segment of 16: 79 fill 5.
        (WINDOW, 16, 6),
        (WINDOW, 128, 13),
        (CHUNK, 1, 3),
        (CHUNK, 16, 4),
    ],
)
def test_a_window_or_chunk_group_needs_no_more_than_it_reaches(
    group: KVCacheGroup, num_segment_tokens: int, most: int
) -> None:
    assert num_blocks_needed([group], 10_000, 16, num_segment_tokens) == most
    assert num_blocks_needed([group], 16 * most, 16, num_segment_tokens) == most
    assert num_blocks_needed([group], 16 * (most - 1), 16, num_segment_tokens) == most - 1


def test_groups_need_what_each_needs() -> None:
    assert num_blocks_needed([FULL, WINDOW, WINDOW, CHUNK], 160, 16) == 10 + 5 + 5 + 3


@given(
    window=reaches,
    chunk=reaches,
    block_size=st.integers(1, 32),
    start=st.integers(0, 300),
    num_segment_tokens=st.integers(1, 50),
)
def test_no_segment_sees_or_writes_more_blocks_than_are_said_to_suffice(
    window: int | None, chunk: int | None, block_size: int, start: int, num_segment_tokens: int
) -> None:
    group = KVCacheGroup(sliding_window=window, attention_chunk_size=chunk)
    end = start + num_segment_tokens
    first = first_visible(start, window, chunk)
    num_touched = (end - 1) // block_size - first // block_size + 1
    assert num_touched <= num_blocks_needed([group], end, block_size, num_segment_tokens)


@given(groups=groups_lists, usable=st.integers(0, 60), block_size=st.integers(1, 32), segment=st.integers(1, 40))
def test_the_longest_fit_fits_and_one_token_more_does_not(
    groups: tuple[KVCacheGroup, ...], usable: int, block_size: int, segment: int
) -> None:
    longest = longest_fit(groups, usable, block_size, segment)
    if longest == sys.maxsize:
        assert all(group.sliding_window or group.attention_chunk_size for group in groups)
        assert num_blocks_needed(groups, 1 << 40, block_size, segment) <= usable
        return
    assert num_blocks_needed(groups, longest, block_size, segment) <= usable
    assert num_blocks_needed(groups, longest + 1, block_size, segment) > usable


def test_windows_alone_fit_for_ever_once_the_blocks_hold_what_they_reach() -> None:
    assert longest_fit([WINDOW, CHUNK], 5 + 3, 16) == sys.maxsize
    assert longest_fit([WINDOW, CHUNK], 5 + 3 - 1, 16) == 4 * 16
    assert longest_fit([WINDOW, CHUNK, FULL], 5 + 3, 16) == 2 * 16
