"""Buckets: the smallest that holds the items, which lists of them are taken, and what a backend asks of them."""

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos.buckets import (
    SEED_RULES,
    BucketRules,
    check_buckets,
    check_context_buckets,
    check_rules,
    choose_bucket,
    default_context_buckets,
    num_kv_segments,
    num_partial_segment_tokens,
)
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


# -- what a backend asks -----------------------------------------------------------------------------------------------

GOOD = {
    "block_size": 128,
    "max_model_len": 4096,
    "num_batched_tokens_buckets": (1024,),
    "kv_segment_size": 1024,
    "decode_context_length_buckets": (2048, 4096),
}
SHAPES = BucketRules(context_is_a_shape=True)


def test_what_the_seed_shows_as_valid_is_taken() -> None:
    check_rules(SEED_RULES, **GOOD)
    check_rules(SEED_RULES, **{**GOOD, "num_batched_tokens_buckets": (2048,), "kv_segment_size": 2048})


@pytest.mark.parametrize(
    ("rules", "changed", "sentence"),
    [
        (
            SEED_RULES,
            {"kv_segment_size": 256},
            r"^kv_segment_size_buckets is \[256\], .* 512, 1024, 2048, 4096; choose .*\.$",
        ),
        (
            SEED_RULES,
            {"block_size": 96},
            r"^kv_segment_size_buckets is \[1024\], .* block_size, 96; choose a block_size .* such as 32\.$",
        ),
        (
            SEED_RULES,
            {"num_batched_tokens_buckets": (512, 1024)},
            r"^num_batched_tokens_buckets is \[512, 1024\] and kv_segment_size_buckets is \[1024\], .* equal\.$",
        ),
        (
            SEED_RULES,
            {"num_batched_tokens_buckets": (512,)},
            r"^num_batched_tokens_buckets is \[512\] and kv_segment_size_buckets is \[1024\], .* equal\.$",
        ),
        (
            BucketRules(prefill_multiple_of=128),
            {"num_batched_tokens_buckets": (128, 317)},
            r"^num_batched_tokens_buckets has 317, .* multiples of 128; make it 384\.$",
        ),
        (
            BucketRules(prefill_multiple_of=128),
            {"num_batched_tokens_buckets": (128, 256), "block_size": 96, "decode_context_length_buckets": ()},
            r"num_batched_tokens_buckets is 256, .* multiples of 384, .* block_size, 96, .* 128 divide.*\.$",
        ),
        (
            SHAPES,
            {"decode_context_length_buckets": ()},
            r"^decode_context_length_buckets is \[\] .* block_size, 128, .* max_model_len, 4096\.$",
        ),
        (
            SHAPES,
            {"decode_context_length_buckets": (2000, 4096)},
            r"^decode_context_length_buckets has 2000, .* block_size, 128; make it 2048\.$",
        ),
        (
            BucketRules(),
            {"max_model_len": 4097},
            r"decode_context_length_buckets is 4096, less than max_model_len, 4097: .* append 4224 or .*\.$",
        ),
    ],
)
def test_a_violation_names_the_setting_both_numbers_and_what_to_change(
    rules: BucketRules, changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_rules(rules, **{**GOOD, **changed})


@pytest.mark.parametrize(
    ("lifted", "changed"),
    [
        ({"kv_segment_sizes": ()}, {"kv_segment_size": 256, "num_batched_tokens_buckets": (256,)}),
        ({"kv_segment_holds_whole_blocks": False}, {"block_size": 96, "decode_context_length_buckets": (4128,)}),
        ({"prefill_equals_kv_segment": False}, {"num_batched_tokens_buckets": (128, 2048)}),
        ({"context_is_a_shape": False}, {"decode_context_length_buckets": ()}),
    ],
)
def test_each_constraint_of_the_seed_is_lifted_by_itself(lifted: dict[str, Any], changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        check_rules(SEED_RULES, **{**GOOD, **changed})
    fields = {name: getattr(SEED_RULES, name) for name in BucketRules.__dataclass_fields__}
    check_rules(BucketRules(**{**fields, **lifted}), **{**GOOD, **changed})


def test_a_last_bucket_that_just_holds_one_segment_is_taken() -> None:
    segment = {"block_size": 96, "num_batched_tokens_buckets": (384,), "decode_context_length_buckets": ()}
    check_rules(BucketRules(prefill_multiple_of=128), **{**GOOD, **segment})


def test_unsegmented_prefill_is_asked_nothing_of_segments() -> None:
    unsegmented = {"kv_segment_size": 0, "num_batched_tokens_buckets": (100, 777), "block_size": 96}
    check_rules(SEED_RULES, **{**GOOD, **unsegmented, "decode_context_length_buckets": (4128,)})


# -- decode contexts ---------------------------------------------------------------------------------------------------


def test_default_contexts_double_from_512_and_the_last_just_holds_the_longest_request() -> None:
    assert default_context_buckets(4096, 128) == (512, 1024, 2048, 4096)
    assert default_context_buckets(3000, 16) == (512, 1024, 2048, 3008)
    assert default_context_buckets(5, 16) == (16,)
    assert default_context_buckets(1000, 96) == (576, 1056)


@given(max_model_len=st.integers(1, 200_000), block_size=st.integers(1, 600))
def test_default_contexts_satisfy_the_check_and_never_more_than_double(max_model_len: int, block_size: int) -> None:
    buckets = default_context_buckets(max_model_len, block_size)
    check_context_buckets(buckets, block_size, max_model_len)
    assert buckets[-1] - block_size < max_model_len
    assert all(high <= 2 * low for low, high in pairwise(buckets))


# -- segments of prior KV ----------------------------------------------------------------------------------------------


@given(prior_tokens=st.integers(0, 20_000), kv_segment_size=st.integers(1, 4096))
def test_full_segments_and_the_partial_one_hold_the_prior_tokens_exactly(
    prior_tokens: int, kv_segment_size: int
) -> None:
    partial = num_partial_segment_tokens(prior_tokens, kv_segment_size)
    num_full = num_kv_segments(prior_tokens, kv_segment_size) - (partial > 0)
    assert num_full * kv_segment_size + partial == prior_tokens
    assert 0 <= partial < kv_segment_size
