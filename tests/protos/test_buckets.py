"""Buckets: the smallest that holds the items, and which lists of them are taken."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos.buckets import check_buckets, choose_bucket
from blockplane.protos.errors import ConfigurationError

buckets_lists = st.sets(st.integers(1, 300), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes)))


@given(num_items=st.integers(0, 320), buckets=buckets_lists)
def test_chosen_bucket_is_the_smallest_that_holds_the_items(num_items: int, buckets: tuple[int, ...]) -> None:
    holding = [bucket for bucket in buckets if bucket >= num_items]
    assert choose_bucket(num_items, buckets) == min(holding, default=None)


@given(buckets=buckets_lists)
def test_a_full_bucket_holds_its_own_size_and_the_last_is_the_limit(buckets: tuple[int, ...]) -> None:
    assert [choose_bucket(bucket, buckets) for bucket in buckets] == list(buckets)
    assert choose_bucket(buckets[-1] + 1, buckets) is None


@given(buckets=st.lists(st.integers(-2, 12), max_size=5).map(tuple))
def test_lists_are_taken_if_and_only_if_they_are_positive_and_strictly_ascending(buckets: tuple[int, ...]) -> None:
    if buckets and min(buckets) > 0 and list(buckets) == sorted(set(buckets)):
        check_buckets("num_seqs_buckets", buckets)
    else:
        with pytest.raises(ConfigurationError, match=rf"^num_seqs_buckets is {re.escape(str(list(buckets)))}; .*\.$"):
            check_buckets("num_seqs_buckets", buckets)
