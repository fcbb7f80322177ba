"""The prefix cache by itself: keys, what is found under them, what is forgotten, what a watcher hears."""

from typing import Any

import numpy as np
import pytest
from driving import (
    Watcher,
)
from hypothesis import given
from hypothesis import strategies as st

from blockplane.control_plane.engine.prefix_cache import PrefixCache

B = 4


def make_cache(num_kinds: int = 1, **settings: Any) -> PrefixCache:
    return PrefixCache(20, B, num_kinds, **settings)


def data(token_ids: list[int]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def keys_of(cache: PrefixCache, token_ids: list[int], **extras: str) -> list[bytes]:
    """The keys of full blocks, behind that of their root."""
    keys = [cache.root(extras)]
    cache.extend(keys, data(token_ids))
    return keys


def publish(cache: PrefixCache, keys: list[bytes], token_ids: list[int], *block_ids: int, kind: int = 0) -> None:
    """Publish one block for each of the leading keys."""
    for index, block_id in enumerate(block_ids):
        block = (block_id,), data(token_ids[index * B : (index + 1) * B])
        cache.publish(kind, keys[index + 1], block, keys[index], announce=True)


def run_of(cache: PrefixCache, keys: list[bytes], token_ids: list[int], kind: int = 0) -> list[int]:
    """The blocks of the leading keys that are found, by the run and one by one."""
    found = [block_ids[0] for block_ids in cache.find_run(kind, keys[1:], data(token_ids))]
    one_by_one = []
    for index, key in enumerate(keys[1:]):
        block_ids = cache.find(kind, key, data(token_ids[index * B : (index + 1) * B]))
        if block_ids is None:
            break
        one_by_one.append(block_ids[0])
    assert found == one_by_one
    return found


def test_only_full_blocks_have_keys() -> None:
    cache = make_cache()
    assert [len(keys_of(cache, list(range(n)))) - 1 for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_keys_do_not_depend_on_how_they_were_extended(token_ids: list[int], cuts: list[int]) -> None:
    cache = make_cache()
    keys = [cache.root({})]
    for end in [*sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]:
        cache.extend(keys, data(token_ids[(len(keys) - 1) * B : end]))
    assert keys == keys_of(cache, token_ids)


@given(st.lists(st.integers(0, 1), min_size=12, max_size=12), st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_keys_agree_as_far_as_all_tokens_up_to_there_do(one: list[int], other: list[int]) -> None:
    cache = make_cache()
    agree = [a == b for a, b in zip(keys_of(cache, one), keys_of(cache, other), strict=True)]
    assert agree == [one[: index * B] == other[: index * B] for index in range(4)]


def test_a_block_is_found_behind_its_own_prefix_alone() -> None:
    cache = make_cache()
    token_ids = [1, 1, 1, 1, 2, 2, 2, 2]
    publish(cache, keys_of(cache, token_ids), token_ids, 7, 8)
    assert run_of(cache, keys_of(cache, token_ids), token_ids) == [7, 8]
    for others, found in (([2, 2, 2, 2, 1, 1, 1, 1], []), ([1, 1, 1, 1, 2, 2, 2, 3], [7]), ([2, 2, 2, 2], [])):
        assert run_of(cache, keys_of(cache, others), others) == found


def test_a_run_ends_at_the_first_block_that_is_not_found() -> None:
    cache = make_cache()
    token_ids = list(range(12))
    keys = keys_of(cache, token_ids)
    publish(cache, keys, token_ids, 7, 8, 9)
    cache.forget(np.array([8], np.int32))
    assert run_of(cache, keys, token_ids) == [7]
    assert cache.find(0, keys[3], data(token_ids[8:])) == (9,), "it is there, for a kind that needs no more"


def test_under_a_key_only_its_own_tokens_are_found() -> None:
    cache = make_cache()
    keys = keys_of(cache, [1, 2, 3, 4])
    publish(cache, keys, [1, 2, 3, 4], 7)
    assert cache.find(0, keys[1], data([1, 2, 3, 5])) is None
    assert cache.find_run(0, keys[1:], data([1, 2, 3, 5])) == []


def test_a_run_ends_where_a_key_stands_for_other_tokens() -> None:
    """Only a broken hash brings that about."""
    cache = make_cache()
    token_ids = list(range(12))
    keys = keys_of(cache, token_ids)
    publish(cache, keys, [*token_ids[:4], 9, 9, 9, 9, *token_ids[8:]], 7, 8, 9)
    assert run_of(cache, keys, token_ids) == [7]


def test_the_next_key_is_that_of_the_chain() -> None:
    cache = make_cache()
    root, first, second = keys_of(cache, list(range(8)))
    assert cache.next_key(root, data([0, 1, 2, 3])) == first
    assert cache.next_key(first, data([4, 5, 6, 7])) == second


def test_a_salt_changes_every_key_of_the_chain() -> None:
    cache = make_cache()
    token_ids = list(range(12))
    plain, salted = keys_of(cache, token_ids), keys_of(cache, token_ids, salt="a")
    assert not set(plain) & set(salted)
    assert keys_of(cache, token_ids, salt="a") == salted
    assert keys_of(cache, token_ids, salt="b") != salted


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"adapter": "X"}, {"salt": "X"}),
        ({"adapter": "Xsalt"}, {"adapter": "X", "salt": ""}),
        ({"adapter": "X", "salt": "Y"}, {"adapter": "Y", "salt": "X"}),
        ({"salt": ""}, {}),
        ({"weights": "1"}, {"weights": "2"}),
        ({"weights": "1"}, {"adapter": "1"}),
    ],
)
def test_a_value_of_one_kind_is_none_of_another(one: dict[str, str], other: dict[str, str]) -> None:
    """An adapter, a salt, a weight epoch of the same value: different keys."""
    cache = make_cache()
    assert cache.root(one) != cache.root(other)
    assert cache.root(one) == cache.root(dict(reversed(one.items())))


def test_two_caches_have_unrelated_keys() -> None:
    assert keys_of(make_cache(), [1, 2, 3, 4]) != keys_of(make_cache(), [1, 2, 3, 4])


def test_what_two_blocks_hold_is_found_in_the_first_until_that_is_forgotten() -> None:
    cache = make_cache()
    keys = keys_of(cache, [1, 2, 3, 4])
    publish(cache, keys, [1, 2, 3, 4], 5)
    publish(cache, keys, [1, 2, 3, 4], 6)
    assert run_of(cache, keys, [1, 2, 3, 4]) == [5]
    cache.forget(np.array([6], np.int32))
    assert run_of(cache, keys, [1, 2, 3, 4]) == [5]
    cache.forget(np.array([5, 9], np.int32))
    assert run_of(cache, keys, [1, 2, 3, 4]) == []


def test_kinds_keep_blocks_of_their_own_under_the_same_keys() -> None:
    cache = make_cache(num_kinds=2)
    token_ids = list(range(8))
    keys = keys_of(cache, token_ids)
    publish(cache, keys, token_ids, 1, 2, kind=0)
    publish(cache, keys, token_ids, 3, kind=1)
    assert (run_of(cache, keys, token_ids, 0), run_of(cache, keys, token_ids, 1)) == ([1, 2], [3])
    cache.forget(np.array([3], np.int32))
    assert (run_of(cache, keys, token_ids, 0), run_of(cache, keys, token_ids, 1)) == ([1, 2], [])


def test_blocks_of_one_kinds_groups_are_found_and_forgotten_together() -> None:
    cache = make_cache()
    keys = keys_of(cache, [1, 2, 3, 4])
    cache.publish(0, keys[1], ((5, 6), data([1, 2, 3, 4])))
    assert cache.find(0, keys[1], data([1, 2, 3, 4])) == (5, 6)
    cache.forget(np.array([6, 5], np.int32))
    assert cache.find(0, keys[1], data([1, 2, 3, 4])) is None
    publish(cache, keys, [1, 2, 3, 4], 5)
    cache.forget(np.array([6], np.int32))
    assert run_of(cache, keys, [1, 2, 3, 4]) == [5], "the block that was its sibling is none any more"


def test_after_a_reset_nothing_is_found() -> None:
    cache = make_cache(num_kinds=2)
    token_ids = [1, 2, 3, 4]
    keys = keys_of(cache, token_ids)
    for kind in (0, 1):
        publish(cache, keys, token_ids, 5 + kind, kind=kind)
    cache.reset()
    assert [run_of(cache, keys, token_ids, kind) for kind in (0, 1)] == [[], []]
    publish(cache, keys, token_ids, 9)
    cache.forget(np.array([5, 6], np.int32))
    assert run_of(cache, keys, token_ids) == [9]


def test_a_watcher_hears_once_of_what_is_announced_and_of_what_is_forgotten() -> None:
    watcher = Watcher()
    cache = make_cache(num_kinds=2, watcher=watcher)
    token_ids = list(range(8))
    keys = keys_of(cache, token_ids)
    publish(cache, keys, token_ids, 1, 2)
    publish(cache, keys, token_ids, 3, 4)
    cache.publish(1, keys[1], ((5,), data(token_ids[:4])))
    assert watcher.heard == [("stored", keys[1], keys[0], [0, 1, 2, 3]), ("stored", keys[2], keys[1], [4, 5, 6, 7])]
    watcher.heard.clear()
    cache.forget(np.array([5, 2, 3], np.int32))
    assert watcher.heard == [("removed", keys[2])], "of the first kind alone"
    cache.reset()
    assert watcher.heard[1:] == [("cleared",)]
