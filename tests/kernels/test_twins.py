"""The reference kernels and their twin for CPUs against dense attention in float64, in caches full of NaN."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockplane.kernels import cpu, reference
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID, slots_of

HEAD_DIM = 8
SCALE = 0.3

each_twin = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])


@dataclass(frozen=True)
class Shape:
    block_size: int
    num_kv_heads: int
    group: int
    sliding_window: int | None
    soft_cap: float | None

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


SHAPES = st.builds(
    Shape,
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    sliding_window=st.sampled_from([None, 1, 3, 8, 100]),
    soft_cap=st.sampled_from([None, 0.5, 20.0]),
)


class Cache:
    """The KV of several sequences in scattered blocks; every slot that no sequence owns holds NaN."""

    def __init__(self, kernels: ModuleType, shape: Shape, seq_lens: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        widths = [-(-seq_len // shape.block_size) for seq_len in seq_lens]
        total_blocks = 1 + 2 * sum(widths)
        free = iter((1 + torch.randperm(total_blocks - 1, generator=generator)).tolist())
        self.block_table = torch.full((len(seq_lens), max(widths) + 2), SKIP_BLOCK_ID, dtype=torch.int32)
        for row, width in enumerate(widths):
            self.block_table[row, :width] = torch.tensor([next(free) for _ in range(width)])
        self.keys, self.values, self.queries = (
            [torch.randn(seq_len, heads, HEAD_DIM, generator=generator) for seq_len in seq_lens]
            for heads in (shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
        )
        self.k_cache, self.v_cache = (
            torch.full((total_blocks, shape.block_size, shape.num_kv_heads, HEAD_DIM), float("nan")) for _ in range(2)
        )
        self.owned = torch.zeros(total_blocks * shape.block_size, dtype=torch.bool)
        for row, seq_len in enumerate(seq_lens):
            slots = self.slots(row, torch.arange(seq_len))
            self.owned[slots] = True
            kernels.write_kv(self.keys[row], self.values[row], self.k_cache, self.v_cache, slots)

    def slots(self, row: int, positions: Tensor) -> Tensor:
        return slots_of(self.block_table, torch.full_like(positions, row), positions, self.shape.block_size)

    def dense(self, row: int, first: int) -> Tensor:
        """The right answer in float64 for the queries of a row from position `first` on, one query at a time."""
        shape = self.shape
        outputs = []
        for position in range(first, len(self.queries[row])):
            start = 0 if shape.sliding_window is None else max(0, position - shape.sliding_window + 1)
            for head in range(shape.num_heads):
                keys = self.keys[row][start : position + 1, head // shape.group].double()
                values = self.values[row][start : position + 1, head // shape.group].double()
                scores = keys @ self.queries[row][position, head].double() * SCALE
                if shape.soft_cap is not None:
                    scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
                outputs.append(torch.softmax(scores, dim=0) @ values)
        return torch.stack(outputs).view(-1, shape.num_heads, HEAD_DIM)

    def settings(self) -> dict[str, float | int | None]:
        return {"scale": SCALE, "sliding_window": self.shape.sliding_window, "soft_cap": self.shape.soft_cap}

    def assert_only_owned_slots_are_finite(self) -> None:
        for cache in (self.k_cache, self.v_cache):
            assert torch.equal(cache.flatten(0, 1).isfinite().all(dim=(1, 2)), self.owned)
            assert torch.equal(cache.flatten(0, 1).isnan().any(dim=(1, 2)), ~self.owned)


def assert_close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@each_twin
@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    seq_lens=st.lists(st.integers(3, 20), min_size=1, max_size=3),
    num_new_tokens=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_decode_equals_dense_attention_and_padding_rows_are_zero(kernels, shape, seq_lens, num_new_tokens, seed):
    cache = Cache(kernels, shape, seq_lens, seed)
    padded_table = torch.cat((cache.block_table, torch.full_like(cache.block_table[:1], SKIP_BLOCK_ID)))
    query = torch.stack([queries[-num_new_tokens:] for queries in cache.queries])
    query = torch.cat((query, torch.full_like(query[:1], float("nan"))))
    output = kernels.decode_attention(
        query,
        cache.k_cache,
        cache.v_cache,
        padded_table,
        torch.tensor([*seq_lens, 0], dtype=torch.int32),
        **cache.settings(),
    )
    for row, seq_len in enumerate(seq_lens):
        assert_close(output[row], cache.dense(row, seq_len - num_new_tokens))
    assert not output[-1].any()
    cache.assert_only_owned_slots_are_finite()


@each_twin
@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    segments=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=3),
    num_padding=st.integers(0, 4),
    seed=st.integers(0, 999),
)
def test_segments_equal_dense_attention_and_padding_tokens_are_zero(kernels, shape, segments, num_padding, seed):
    cache = Cache(kernels, shape, [prior + count for prior, count in segments], seed)
    counts = [count for _, count in segments]
    packed = [queries[prior:] for queries, (prior, _) in zip(cache.queries, segments, strict=True)]
    padding = torch.full((num_padding, shape.num_heads, HEAD_DIM), float("nan"))
    query_start_loc = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    output = kernels.segmented_attention(
        torch.cat((*packed, padding)),
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        query_start_loc,
        torch.tensor([prior for prior, _ in segments], dtype=torch.int32),
        **cache.settings(),
    )
    parts = output.split([*counts, num_padding])
    for row, (prior, _) in enumerate(segments):
        assert_close(parts[row], cache.dense(row, prior))
    assert not parts[-1].any()
    cache.assert_only_owned_slots_are_finite()


@each_twin
def test_padding_never_writes_a_slot(kernels):
    k_cache, v_cache = torch.zeros(3, 2, 1, HEAD_DIM), torch.zeros(3, 2, 1, HEAD_DIM)
    new = torch.ones(3, 1, HEAD_DIM)
    kernels.write_kv(new, 2 * new, k_cache, v_cache, torch.tensor([PAD_SLOT_ID, 3, PAD_SLOT_ID]))
    for cache, value in ((k_cache, 1.0), (v_cache, 2.0)):
        written = cache.flatten(0, 1)[:, 0, 0]
        assert written.tolist() == [0.0, 0.0, 0.0, value, 0.0, 0.0]


@each_twin
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_new_kv_is_cast_to_the_caches_dtype(kernels, dtype):
    k_cache, v_cache = torch.zeros(2, 1, 1, HEAD_DIM, dtype=dtype), torch.zeros(2, 1, 1, HEAD_DIM, dtype=dtype)
    new = torch.randn(1, 1, HEAD_DIM)
    kernels.write_kv(new, new, k_cache, v_cache, torch.tensor([1]))
    assert torch.equal(k_cache[1].float(), new.to(dtype).float())
    assert torch.equal(v_cache[1].float(), new.to(dtype).float())


@each_twin
def test_a_skipped_block_is_not_read_and_takes_no_weight(kernels):
    """A row whose middle block is -1 attends as one whose context lacks those tokens."""
    shape = Shape(block_size=2, num_kv_heads=1, group=2, sliding_window=None, soft_cap=None)
    cache = Cache(kernels, shape, [6], seed=0)
    query = cache.queries[0][-1:]
    cache.block_table[0, 1] = SKIP_BLOCK_ID
    output = kernels.decode_attention(
        query[None],
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        torch.tensor([6], dtype=torch.int32),
        **cache.settings(),
    )
    seen = torch.tensor([0, 1, 4, 5])
    scores = torch.einsum("hd,kd->hk", query[0], cache.keys[0][seen, 0]) * SCALE
    torch.testing.assert_close(output[0, 0], torch.softmax(scores, -1) @ cache.values[0][seen, 0])


@each_twin
def test_blocks_before_the_window_need_not_be_there(kernels):
    shape = Shape(block_size=2, num_kv_heads=1, group=1, sliding_window=3, soft_cap=None)
    cache = Cache(kernels, shape, [9], seed=1)
    cache.block_table[0, :3] = SKIP_BLOCK_ID
    output = kernels.decode_attention(
        cache.queries[0][-1:][None],
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        torch.tensor([9], dtype=torch.int32),
        **cache.settings(),
    )
    assert_close(output[0], cache.dense(0, 8))


WINDOWED = st.builds(
    Shape,
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    sliding_window=st.sampled_from([1, 3, 8, 17]),
    soft_cap=st.none(),
)


def poison_what_left_the_window(cache: Cache, row: int, start: int, skipped: bool) -> None:
    """Fill the blocks that no query from position `start` on sees with NaN, as another row's; their entries stay."""
    assert cache.shape.sliding_window is not None
    num_left = max(0, start - cache.shape.sliding_window + 1) // cache.shape.block_size
    for kv in (cache.k_cache, cache.v_cache):
        kv[cache.block_table[row, :num_left]] = float("nan")
    if skipped:
        cache.block_table[row, :num_left] = SKIP_BLOCK_ID


@each_twin
@settings(max_examples=50, deadline=None)
@given(
    shape=WINDOWED,
    seq_lens=st.lists(st.integers(3, 60), min_size=1, max_size=3),
    num_new_tokens=st.integers(1, 3),
    skipped=st.booleans(),
)
def test_decode_reads_nothing_through_entries_left_of_the_window(kernels, shape, seq_lens, num_new_tokens, skipped):
    cache = Cache(kernels, shape, seq_lens, seed=3)
    for row, seq_len in enumerate(seq_lens):
        poison_what_left_the_window(cache, row, seq_len - num_new_tokens, skipped)
    output = kernels.decode_attention(
        torch.stack([queries[-num_new_tokens:] for queries in cache.queries]),
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        torch.tensor(seq_lens, dtype=torch.int32),
        **cache.settings(),
    )
    for row, seq_len in enumerate(seq_lens):
        assert_close(output[row], cache.dense(row, seq_len - num_new_tokens))


@each_twin
@settings(max_examples=50, deadline=None)
@given(
    shape=WINDOWED,
    segments=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 24)), min_size=1, max_size=3),
    skipped=st.booleans(),
)
def test_prefill_reads_nothing_through_entries_left_of_the_window(kernels, shape, segments, skipped):
    cache = Cache(kernels, shape, [prior + count for prior, count in segments], seed=4)
    for row, (prior, _) in enumerate(segments):
        poison_what_left_the_window(cache, row, prior, skipped)
    counts = [count for _, count in segments]
    output = kernels.segmented_attention(
        torch.cat([queries[prior:] for queries, (prior, _) in zip(cache.queries, segments, strict=True)]),
        cache.k_cache,
        cache.v_cache,
        cache.block_table,
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        torch.tensor([prior for prior, _ in segments], dtype=torch.int32),
        **cache.settings(),
    )
    for row, (part, (prior, _)) in enumerate(zip(output.split(counts), segments, strict=True)):
        assert_close(part, cache.dense(row, prior))
