"""Buckets, the compiled shapes: how one is chosen and what a list of them must be; knows no backend."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm

from blockplane.protos.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class BucketRules:
    """What a backend asks of the bucket lists beyond order; each constraint of seed 001 is kept or lifted by it.

    Attributes:
        kv_segment_sizes: the sizes that its kernel has; none = any.
        kv_segment_holds_whole_blocks: kv_segment_size is a multiple of block_size.
        prefill_equals_kv_segment: every prefill bucket is one of the segment sizes.
        prefill_multiple_of: tokens; every prefill bucket, and every segment but a prompt's last, is a multiple of it.
        context_is_a_shape: decode graphs are compiled per context length, so these have buckets too.
    """

    kv_segment_sizes: tuple[int, ...] = ()
    kv_segment_holds_whole_blocks: bool = False
    prefill_equals_kv_segment: bool = False
    prefill_multiple_of: int = 1
    context_is_a_shape: bool = False


SEED_RULES = BucketRules(
    kv_segment_sizes=(512, 1024, 2048, 4096),
    kv_segment_holds_whole_blocks=True,
    prefill_equals_kv_segment=True,
    context_is_a_shape=True,
)
"""Seed 001, "Current Kernel Constraints"."""


def choose_bucket(num_items: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds `num_items`, or None where none does (seed 000, "Decode Batch Padding")."""
    index = bisect_left(buckets, num_items)
    return buckets[index] if index < len(buckets) else None


def check_buckets(name: str, buckets: tuple[int, ...]) -> None:
    """Raise ConfigurationError unless `buckets` are positive and strictly ascending."""
    if not buckets or buckets[0] < 1 or any(low >= high for low, high in pairwise(buckets)):
        raise ConfigurationError(f"{name} is {list(buckets)}; give positive sizes in ascending order, such as 1,2,4,8.")


def check_rules(
    rules: BucketRules,
    *,
    block_size: int,
    max_model_len: int,
    num_batched_tokens_buckets: tuple[int, ...],
    kv_segment_size: int,
    decode_context_length_buckets: tuple[int, ...],
) -> None:
    """Raise ConfigurationError unless the lists, each good by `check_buckets`, are what the backend can compile.

    Args:
        max_model_len: tokens; what the last of decode_context_length_buckets holds.
        kv_segment_size: tokens; 0 = unsegmented, and nothing is asked of it.
        decode_context_length_buckets: tokens; none = contexts are data.
    """
    _check_prefill_multiple(rules, num_batched_tokens_buckets)
    if kv_segment_size:
        _check_kv_segment(rules, kv_segment_size, block_size, num_batched_tokens_buckets)
        _check_room_for_a_segment(rules, block_size, num_batched_tokens_buckets[-1])
    if decode_context_length_buckets:
        check_context_buckets(decode_context_length_buckets, block_size, max_model_len)
    elif rules.context_is_a_shape:
        raise ConfigurationError(
            "decode_context_length_buckets is [] and the backend compiles decode graphs for a context length each;"
            f" give lengths in multiples of block_size, {block_size}, of which the last holds max_model_len,"
            f" {max_model_len}."
        )


def check_context_buckets(buckets: tuple[int, ...], block_size: int, max_model_len: int) -> None:
    """Raise ConfigurationError unless decode context buckets hold whole blocks and the last holds max_model_len."""
    check_buckets("decode_context_length_buckets", buckets)
    for bucket in buckets:
        if bucket % block_size:
            raise ConfigurationError(
                f"decode_context_length_buckets has {bucket}, which is no multiple of block_size, {block_size};"
                f" make it {_round_up(bucket, block_size)}."
            )
    if buckets[-1] < max_model_len:
        enough = _round_up(max_model_len, block_size)
        raise ConfigurationError(
            f"the last of decode_context_length_buckets is {buckets[-1]}, less than max_model_len, {max_model_len}: a"
            f" longer request would have no graph; append {enough} or lower max_model_len."
        )


def default_context_buckets(max_model_len: int, block_size: int) -> tuple[int, ...]:
    """Decode contexts for a backend that compiles each: 512 tokens, doubling, up to one that just holds max_model_len.

    All are whole blocks. Doubling reads at most twice the context that is there, with few graphs.
    """
    last = _round_up(max_model_len, block_size)
    buckets = [_round_up(_LEAST_CONTEXT, block_size)]
    while buckets[-1] < last:
        buckets.append(2 * buckets[-1])
    return (*buckets[:-1], last)


def num_kv_segments(prior_tokens: int, kv_segment_size: int) -> int:
    """Segments of prior KV that a prefill iterates over, a partial last one included (seed 001, "Partial KV Segment
    Handling")."""
    return -(-prior_tokens // kv_segment_size)


def num_partial_segment_tokens(prior_tokens: int, kv_segment_size: int) -> int:
    """Valid tokens in the partial last segment, the rest of which is masked; 0 = all segments are full."""
    return prior_tokens % kv_segment_size


def _check_prefill_multiple(rules: BucketRules, num_batched_tokens_buckets: tuple[int, ...]) -> None:
    for bucket in num_batched_tokens_buckets:
        if bucket % rules.prefill_multiple_of:
            raise ConfigurationError(
                f"num_batched_tokens_buckets has {bucket}, and the backend takes multiples of"
                f" {rules.prefill_multiple_of}; make it {_round_up(bucket, rules.prefill_multiple_of)}."
            )


def _check_kv_segment(
    rules: BucketRules, kv_segment_size: int, block_size: int, num_batched_tokens_buckets: tuple[int, ...]
) -> None:
    if rules.kv_segment_sizes and kv_segment_size not in rules.kv_segment_sizes:
        raise ConfigurationError(
            f"kv_segment_size_buckets is [{kv_segment_size}], and the backend has kernels for"
            f" {', '.join(map(str, rules.kv_segment_sizes))}; choose one of these."
        )
    if rules.kv_segment_holds_whole_blocks and kv_segment_size % block_size:
        raise ConfigurationError(
            f"kv_segment_size_buckets is [{kv_segment_size}], which is no multiple of block_size, {block_size};"
            f" choose a block_size that divides it, such as {gcd(kv_segment_size, block_size)}."
        )
    if rules.prefill_equals_kv_segment and num_batched_tokens_buckets != (kv_segment_size,):
        raise ConfigurationError(
            f"num_batched_tokens_buckets is {list(num_batched_tokens_buckets)} and kv_segment_size_buckets is"
            f" [{kv_segment_size}], and the backend's prefill is as long as a KV segment; make the lists equal."
        )


def _check_room_for_a_segment(rules: BucketRules, block_size: int, max_num_batched_tokens: int) -> None:
    multiple = lcm(block_size, rules.prefill_multiple_of)
    if max_num_batched_tokens < multiple:
        raise ConfigurationError(
            f"the last of num_batched_tokens_buckets is {max_num_batched_tokens}, and a prompt is cut at multiples of"
            f" {multiple}, which block_size, {block_size}, and the backend's {rules.prefill_multiple_of} divide: no"
            " segment would fit; raise the bucket or change block_size."
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_LEAST_CONTEXT = 512
