"""The reference kernels and their twins against dense attention in float64, in caches full of poison."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poisoned_cache import HEAD_DIM, SCALE, SHAPES, Cache, Shape, assert_close

from blockplane.kernels import cpu, reference, segments
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID

each_twin = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
each_segmented_twin = pytest.mark.parametrize(
    "attention", [reference, segments, cpu], ids=["reference", "segments", "cpu"]
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
KV_DTYPES = st.sampled_from([None, torch.float8_e4m3fn])
POISONS = st.sampled_from([float("nan"), 1e30])
SEGMENT_SIZES = st.sampled_from([1, 2, 5, 8, 16, 512])
RAGGED_SEGMENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=3).filter(
    lambda segments: any(prior + count for prior, count in segments)
)


@each_twin
@settings(max_examples=80, deadline=None)
@given(
    shape=SHAPES,
    seq_lens=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    num_new_tokens=st.integers(1, 5),
    seed=st.integers(0, 999),
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
    poison=POISONS,
)
def test_decode_equals_dense_attention_and_padding_rows_are_zero(
    kernels: ModuleType,
    shape: Shape,
    seq_lens: list[int],
    num_new_tokens: int,
    seed: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    poison: float,
) -> None:
    num_new_tokens = min(num_new_tokens, *seq_lens)
    cache = Cache(kernels, shape, seq_lens, seed, dtype, poison, kv_dtype)
    output = cache.decode(kernels, num_new_tokens, num_padding_rows=2)
    assert output.dtype == dtype
    for row, seq_len in enumerate(seq_lens):
        assert_close(output[row], cache.dense(row, seq_len - num_new_tokens))
    assert not output[-2:].any()
    cache.assert_only_owned_slots_were_written()


@each_twin
@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    seq_lens=st.lists(st.integers(4, 30), min_size=1, max_size=3),
    kind=st.sampled_from(["all ones", "triangle", "random", "none"]),
    mask_dtype=st.sampled_from([torch.bool, torch.float32]),
    seed=st.integers(0, 999),
)
def test_the_active_mask_says_which_new_tokens_see_each_other(
    kernels: ModuleType, shape: Shape, seq_lens: list[int], kind: str, mask_dtype: torch.dtype, seed: int
) -> None:
    """A token that sees neither history nor new tokens yields zero."""
    cache = Cache(kernels, shape, seq_lens, seed)
    ones = torch.ones(len(seq_lens), shape.num_heads, 4, 4)
    random = torch.rand(ones.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = {"all ones": ones, "triangle": ones.tril(), "random": random, "none": 0 * ones}[kind].to(mask_dtype)
    output = cache.decode(kernels, 4, mask_active=mask)
    for row, seq_len in enumerate(seq_lens):
        assert_close(output[row], cache.dense(row, seq_len - 4, mask[row]))


@each_twin
def test_without_an_active_mask_new_tokens_are_a_chain(kernels: ModuleType) -> None:
    cache = Cache(kernels, Shape(4, 2, 2), [9, 21])
    triangle = torch.ones(2, 4, 3, 3).tril()
    torch.testing.assert_close(cache.decode(kernels, 3), cache.decode(kernels, 3, mask_active=triangle))
    assert not torch.allclose(cache.decode(kernels, 3), cache.decode(kernels, 3, mask_active=torch.ones(2, 4, 3, 3)))


@each_twin
@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, seq_len=st.integers(1, 3), is_mask_given=st.booleans())
def test_a_row_with_fewer_tokens_has_them_at_the_end(
    kernels: ModuleType, shape: Shape, seq_len: int, is_mask_given: bool
) -> None:
    """What stands at negative positions is zero, whatever its queries are, and whatever an active mask lets it see."""
    cache = Cache(kernels, shape, [seq_len])
    cache.queries[0] = torch.cat((torch.full((2, shape.num_heads, HEAD_DIM), float("nan")), cache.queries[0]))
    mask = None
    if is_mask_given:
        mask = torch.ones(1, shape.num_heads, 2 + seq_len, 2 + seq_len).tril()
        mask[:, :, :2] = 1
    output = kernels.decode_attention(
        cache.queries[0][None],
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        torch.tensor([seq_len], dtype=torch.int32),
        **cache.settings(),
        mask_active=mask,
    )
    assert not output[0, :2].any()
    cache.queries[0] = cache.queries[0][2:]
    assert_close(output[0, 2:], cache.dense(0, 0))


@each_segmented_twin
@settings(max_examples=80, deadline=None)
@given(
    shape=SHAPES,
    ragged=RAGGED_SEGMENTS,
    kv_segment_size=SEGMENT_SIZES,
    num_padding=st.integers(0, 4),
    seed=st.integers(0, 999),
    dtype=DTYPES,
    kv_dtype=KV_DTYPES,
    poison=POISONS,
)
def test_segments_equal_dense_attention_and_padding_tokens_are_zero(
    attention: ModuleType,
    shape: Shape,
    ragged: list[tuple[int, int]],
    kv_segment_size: int,
    num_padding: int,
    seed: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    poison: float,
) -> None:
    cache = Cache(reference, shape, [prior + count for prior, count in ragged], seed, dtype, poison, kv_dtype)
    output = cache.prefill(attention, [prior for prior, _ in ragged], kv_segment_size, num_padding)
    assert output.dtype == dtype
    parts = output.split([*(count for _, count in ragged), num_padding])
    for row, (prior, _) in enumerate(ragged):
        assert_close(parts[row], cache.dense(row, prior))
    assert not parts[-1].any()
    cache.assert_only_owned_slots_were_written()


@each_segmented_twin
@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, ragged=RAGGED_SEGMENTS, seed=st.integers(0, 999))
def test_the_unsegmented_mode_reads_no_prior_kv(
    attention: ModuleType, shape: Shape, ragged: list[tuple[int, int]], seed: int
) -> None:
    cache = Cache(reference, shape, [prior + count for prior, count in ragged], seed)
    for row, (prior, _) in enumerate(ragged):
        slots = cache.slots(row, torch.arange(prior))
        cache.k_cache.flatten(0, 1)[slots] = cache.v_cache.flatten(0, 1)[slots] = float("nan")
    parts = cache.prefill(attention, [prior for prior, _ in ragged], kv_segment_size=0).split([n for _, n in ragged])
    for row, (prior, _) in enumerate(ragged):
        assert_close(parts[row], cache.dense(row, prior, least=prior))


@each_twin
def test_padding_never_writes_a_slot(kernels: ModuleType) -> None:
    k_cache, v_cache = torch.zeros(3, 2, 1, HEAD_DIM), torch.zeros(3, 2, 1, HEAD_DIM)
    new = torch.ones(3, 1, HEAD_DIM)
    kernels.write_kv(new, 2 * new, k_cache, v_cache, torch.tensor([PAD_SLOT_ID, 3, PAD_SLOT_ID]))
    for cache, value in ((k_cache, 1.0), (v_cache, 2.0)):
        written = cache.flatten(0, 1)[:, 0, 0]
        assert written.tolist() == [0.0, 0.0, 0.0, value, 0.0, 0.0]


@each_twin
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_new_kv_is_cast_to_the_caches_dtype(kernels: ModuleType, dtype: torch.dtype) -> None:
    k_cache, v_cache = torch.zeros(2, 1, 1, HEAD_DIM, dtype=dtype), torch.zeros(2, 1, 1, HEAD_DIM, dtype=dtype)
    new = torch.randn(1, 1, HEAD_DIM)
    kernels.write_kv(new, new, k_cache, v_cache, torch.tensor([1]))
    assert torch.equal(k_cache[1].float(), new.to(dtype).float())
    assert torch.equal(v_cache[1].float(), new.to(dtype).float())


@each_twin
def test_what_fp8_is_too_narrow_for_is_cut_off_and_nan_stays_nan(kernels: ModuleType) -> None:
    k_cache, v_cache = (torch.zeros(2, 1, 1, HEAD_DIM, dtype=torch.float8_e4m3fn) for _ in range(2))
    inf, nan = float("inf"), float("nan")
    new = torch.tensor([448.0, 465.0, 1e30, inf, -449.0, -inf, nan, 0.3]).view(1, 1, HEAD_DIM)
    kernels.write_kv(new, new.bfloat16(), k_cache, v_cache, torch.tensor([1]))
    for cache in (k_cache, v_cache):
        stored = cache[1, 0, 0].float()
        assert stored[:6].tolist() == [448.0] * 4 + [-448.0] * 2
        assert stored[6].isnan()
        assert stored[7] == 0.3125


def test_every_fp8_number_is_read_as_it_is() -> None:
    """The queries' one channel is 0, so that each value weighs the same; one of them is NaN in either sign."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for kernels in (reference, cpu):
        values = numbers.view(256, 1, 1, 1)
        table, seq_lens = torch.arange(256, dtype=torch.int32).view(256, 1), torch.ones(256, dtype=torch.int32)
        keys = torch.zeros_like(values)
        output = kernels.decode_attention(torch.zeros(256, 1, 1, 1), keys, values, table, seq_lens, scale=1.0)
        torch.testing.assert_close(output.flatten(), numbers.float(), rtol=0, atol=0, equal_nan=True)


def attention_over(cache: Cache, seen: list[int]) -> torch.Tensor:
    """Row 0's last query, one KV head, over the positions `seen` alone."""
    scores = torch.einsum("hd,kd->hk", cache.queries[0][-1], cache.keys[0][seen, 0]) * SCALE
    return torch.softmax(scores, -1) @ cache.values[0][seen, 0]


@each_twin
def test_a_skipped_block_is_not_read_and_takes_no_weight(kernels: ModuleType) -> None:
    """A row whose middle block is -1 attends as one whose context lacks those tokens."""
    cache = Cache(kernels, Shape(block_size=2, num_kv_heads=1, group=2), [6])
    cache.block_table[0, 1] = SKIP_BLOCK_ID
    torch.testing.assert_close(cache.decode(kernels, 1)[0, 0], attention_over(cache, [0, 1, 4, 5]))


@each_segmented_twin
def test_a_prefill_skips_blocks_as_well(attention: ModuleType) -> None:
    cache = Cache(reference, Shape(block_size=2, num_kv_heads=1, group=2), [6])
    cache.block_table[0, 1] = SKIP_BLOCK_ID
    torch.testing.assert_close(cache.prefill(attention, [5], 4)[0], attention_over(cache, [0, 1, 4, 5]))


def test_a_sink_of_great_weight_takes_nearly_all_and_gives_nothing() -> None:
    cache = Cache(reference, Shape(block_size=4, num_kv_heads=1, group=2), [9])
    plain = cache.decode(reference, 1)
    sunk = cache.decode(reference, 1, sinks=torch.tensor([50.0, -50.0]))
    assert sunk[0, 0, 0].abs().max() < 1e-15
    torch.testing.assert_close(sunk[0, 0, 1], plain[0, 0, 1])


def poison_what_is_out_of_reach(cache: Cache, row: int, start: int, is_skipped: bool) -> None:
    """Fill the blocks that no query from position `start` on sees with NaN, as another row's; their entries stay."""
    num_left = cache.shape.first_reached(start) // cache.shape.block_size
    for kv in (cache.k_cache, cache.v_cache):
        kv[cache.block_table[row, :num_left]] = float("nan")
    if is_skipped:
        cache.block_table[row, :num_left] = SKIP_BLOCK_ID


LIMITED = SHAPES.filter(lambda shape: shape.sliding_window or shape.attention_chunk_size)


@each_twin
@settings(max_examples=50, deadline=None)
@given(
    shape=LIMITED,
    seq_lens=st.lists(st.integers(3, 60), min_size=1, max_size=3),
    num_new_tokens=st.integers(1, 3),
    is_skipped=st.booleans(),
)
def test_decode_reads_nothing_through_entries_out_of_reach(
    kernels: ModuleType, shape: Shape, seq_lens: list[int], num_new_tokens: int, is_skipped: bool
) -> None:
    cache = Cache(kernels, shape, seq_lens, seed=3)
    for row, seq_len in enumerate(seq_lens):
        poison_what_is_out_of_reach(cache, row, seq_len - num_new_tokens, is_skipped)
    output = cache.decode(kernels, num_new_tokens)
    for row, seq_len in enumerate(seq_lens):
        assert_close(output[row], cache.dense(row, seq_len - num_new_tokens))


@each_segmented_twin
@settings(max_examples=50, deadline=None)
@given(
    shape=LIMITED,
    ragged=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 24)), min_size=1, max_size=3),
    kv_segment_size=SEGMENT_SIZES,
    is_skipped=st.booleans(),
)
def test_prefill_reads_nothing_through_entries_out_of_reach(
    attention: ModuleType, shape: Shape, ragged: list[tuple[int, int]], kv_segment_size: int, is_skipped: bool
) -> None:
    cache = Cache(reference, shape, [prior + count for prior, count in ragged], seed=4)
    for row, (prior, _) in enumerate(ragged):
        poison_what_is_out_of_reach(cache, row, prior, is_skipped)
    output = cache.prefill(attention, [prior for prior, _ in ragged], kv_segment_size)
    for row, (part, (prior, _)) in enumerate(zip(output.split([n for _, n in ragged]), ragged, strict=True)):
        assert_close(part, cache.dense(row, prior))
