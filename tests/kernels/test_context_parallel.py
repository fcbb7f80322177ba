"""The parts of 1, 2 or 4 ranks, combined, against the reference over the whole cache; elsewhere is poison."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poisoned_cache import HEAD_DIM, SCALE, SHAPES, Cache, Shape
from torch import Tensor

from blockplane.kernels import context_parallel, reference
from blockplane.kernels.context_parallel import Part, combine
from blockplane.kernels.slots import SKIP_BLOCK_ID, ContextParallel, slots_of

WORLD_SIZES = st.sampled_from([1, 2, 4])
KV_DTYPES = st.sampled_from([None, torch.float8_e4m3fn])
NAN = float("nan")


class SharedCache:
    """A `Cache`'s sequences once more, among ranks: a block of the table spans block_size positions of each of them.

    Of each sequence only what a query from `firsts` on may see is written: all else is poison.
    """

    def __init__(
        self, whole: Cache, world_size: int, firsts: list[int], interleave_size: int = 1, poison: float = NAN
    ) -> None:
        self.whole, self._size = whole, whole.shape.block_size
        self.shares = [ContextParallel(world_size, rank, interleave_size) for rank in range(world_size)]
        seq_lens = [len(keys) for keys in whole.keys]
        widths = [-(-seq_len // (self._size * world_size)) for seq_len in seq_lens]
        order = 1 + torch.randperm(2 * sum(widths), generator=torch.Generator().manual_seed(1))
        self.block_table = torch.full((len(widths), max(widths) + 2), SKIP_BLOCK_ID, dtype=torch.int32)
        for row, (width, blocks) in enumerate(zip(widths, order[: sum(widths)].split(widths), strict=True)):
            self.block_table[row, :width] = blocks
        shape = (1 + 2 * sum(widths), self._size, whole.shape.num_kv_heads, HEAD_DIM)
        poisoned = reference.to_cache_dtype(torch.tensor(poison), whole.kv_dtype)
        self.caches = [[poisoned.expand(shape).clone() for _ in range(2)] for _ in self.shares]
        for row, seq_len in enumerate(seq_lens):
            for share, caches in zip(self.shares, self.caches, strict=True):
                slots = self.slots(row, torch.arange(whole.shape.first_reached(firsts[row]), seq_len), share)
                keys, values = (kv[row][whole.shape.first_reached(firsts[row]) :] for kv in (whole.keys, whole.values))
                reference.write_kv(keys, values, *caches, slots)

    def slots(self, row: int, positions: Tensor, share: ContextParallel) -> Tensor:
        return slots_of(self.block_table, torch.full_like(positions, row), positions, self._size, share)

    def decode(self, num_new_tokens: int, num_padding_rows: int = 0) -> list[Part]:
        query = torch.stack([queries[-num_new_tokens:] for queries in self.whole.queries])
        padding = query[:1].expand(num_padding_rows, -1, -1, -1) * NAN
        table = self.block_table[:1].expand(num_padding_rows, -1) * 0 + SKIP_BLOCK_ID
        seq_lens = [len(queries) for queries in self.whole.queries] + [0] * num_padding_rows
        return [
            context_parallel.decode_attention(
                torch.cat((query, padding)),
                *caches,
                torch.cat((self.block_table, table)),
                torch.tensor(seq_lens, dtype=torch.int32),
                context_parallel=share,
                **self._settings(),
            )
            for share, caches in zip(self.shares, self.caches, strict=True)
        ]

    def prefill(self, priors: list[int], kv_segment_size: int, num_padding: int = 0) -> list[Part]:
        packed = [queries[prior:] for queries, prior in zip(self.whole.queries, priors, strict=True)]
        padding = torch.full((num_padding, self.whole.shape.num_heads, HEAD_DIM), NAN)
        return [
            context_parallel.segmented_attention(
                torch.cat((*packed, padding)),
                *caches,
                self.block_table,
                torch.tensor([0, *map(len, packed)]).cumsum(0).to(torch.int32),
                torch.tensor(priors, dtype=torch.int32),
                context_parallel=share,
                kv_segment_size=kv_segment_size,
                **self._settings(),
            )
            for share, caches in zip(self.shares, self.caches, strict=True)
        ]

    def combined(self, parts: list[Part]) -> Tensor:
        outputs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        return combine(outputs, lses, self.whole.sinks)

    def _settings(self) -> dict[str, float | None]:
        return {name: value for name, value in self.whole.settings().items() if name != "sinks"}


def assert_whole(output: Tensor, expected: Tensor) -> None:
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=120, deadline=None)
@given(
    shape=SHAPES,
    seq_lens=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    num_new_tokens=st.integers(1, 5),
    world_size=WORLD_SIZES,
    interleave_size=st.sampled_from([1, 2, 4]),
    kv_dtype=KV_DTYPES,
    poison=st.sampled_from([NAN, 1e30]),
    seed=st.integers(0, 999),
)
def test_the_ranks_parts_of_a_decode_make_the_whole(
    shape: Shape,
    seq_lens: list[int],
    num_new_tokens: int,
    world_size: int,
    interleave_size: int,
    kv_dtype: torch.dtype | None,
    poison: float,
    seed: int,
) -> None:
    num_new_tokens = min(num_new_tokens, *seq_lens)
    whole = Cache(reference, shape, seq_lens, seed, kv_dtype=kv_dtype)
    firsts = [seq_len - num_new_tokens for seq_len in seq_lens]
    shared = SharedCache(whole, world_size, firsts, min(interleave_size, shape.block_size), poison)
    output = shared.combined(shared.decode(num_new_tokens, num_padding_rows=2))
    assert_whole(output[:-2], whole.decode(reference, num_new_tokens))
    assert not output[-2:].any()


@settings(max_examples=120, deadline=None)
@given(
    shape=SHAPES,
    ragged=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=3).filter(
        lambda segments: any(prior + count for prior, count in segments)
    ),
    kv_segment_size=st.sampled_from([0, 8]),
    num_padding=st.integers(0, 3),
    world_size=WORLD_SIZES,
    kv_dtype=KV_DTYPES,
    poison=st.sampled_from([NAN, 1e30]),
    seed=st.integers(0, 999),
)
def test_the_ranks_parts_of_segments_make_the_whole(
    shape: Shape,
    ragged: list[tuple[int, int]],
    kv_segment_size: int,
    num_padding: int,
    world_size: int,
    kv_dtype: torch.dtype | None,
    poison: float,
    seed: int,
) -> None:
    whole = Cache(reference, shape, [prior + count for prior, count in ragged], seed, kv_dtype=kv_dtype)
    priors = [prior for prior, _ in ragged]
    shared = SharedCache(whole, world_size, priors, poison=poison)
    output = shared.combined(shared.prefill(priors, kv_segment_size, num_padding))
    assert_whole(output, whole.prefill(reference, priors, kv_segment_size, num_padding))
    assert not output[len(output) - num_padding :].any()


@pytest.mark.parametrize("kv_segment_size", [0, 8])
def test_the_unsegmented_mode_reads_no_prior_kv(kv_segment_size: int) -> None:
    shape = Shape(4, 1, 2)
    whole = Cache(reference, shape, [21])
    shared = SharedCache(whole, 2, [0])
    for share, caches in zip(shared.shares, shared.caches, strict=True):
        slots = shared.slots(0, torch.arange(13), share)
        for cache in caches:
            cache.flatten(0, 1)[slots[slots >= 0]] = NAN
    output = shared.combined(shared.prefill([13], kv_segment_size))
    assert bool(output.isfinite().all()) == (kv_segment_size == 0)


def test_a_rank_that_keeps_nothing_that_is_seen_takes_no_weight() -> None:
    whole = Cache(reference, Shape(4, 1, 2, sliding_window=1), [7])
    shared = SharedCache(whole, 4, [6])
    parts = shared.decode(1)
    for rank, (output, lse) in enumerate(parts):
        assert bool((lse == float("-inf")).all()) == (rank != 6 % 4)
        assert bool(output.any()) == (rank == 6 % 4)
    assert_whole(shared.combined(parts), whole.decode(reference, 1))


def test_a_row_with_fewer_tokens_has_them_at_the_end() -> None:
    """What stands at negative positions is zero, whatever its queries are."""
    whole = Cache(reference, Shape(4, 1, 2, has_sinks=True), [3])
    expected = whole.decode(reference, 3)
    whole.queries[0] = torch.cat((torch.full((2, 2, HEAD_DIM), NAN), whole.queries[0]))
    shared = SharedCache(whole, 2, [0])
    parts = context_parallel.decode_attention
    output = shared.combined(
        [
            parts(
                whole.queries[0][None],
                *caches,
                shared.block_table,
                torch.tensor([3], dtype=torch.int32),
                context_parallel=share,
                scale=SCALE,
            )
            for share, caches in zip(shared.shares, shared.caches, strict=True)
        ]
    )
    assert not output[0, :2].any()
    assert_whole(output[:, 2:], expected)


def test_a_skipped_block_is_not_read_and_takes_no_weight() -> None:
    """A row whose middle block is -1 attends as one whose context lacks those tokens."""
    whole = Cache(reference, Shape(block_size=2, num_kv_heads=1, group=2), [12])
    shared = SharedCache(whole, 2, [11])
    shared.block_table[0, 1] = SKIP_BLOCK_ID
    whole.block_table[0, 2:4] = SKIP_BLOCK_ID
    assert_whole(shared.combined(shared.decode(1)), whole.decode(reference, 1))
    assert_whole(shared.combined(shared.prefill([5], 8)), whole.prefill(reference, [5], 8))


def test_what_a_table_is_padded_with_changes_no_bit() -> None:
    whole = Cache(reference, replace(Shape(4, 1, 2), sliding_window=5), [5, 13, 8])
    shared = SharedCache(whole, 2, [0, 0, 0])
    right, table = shared.combined(shared.decode(2)), shared.block_table
    for entry in (0, int(table[1, 0])):
        shared.block_table = torch.where(table == SKIP_BLOCK_ID, entry, table)
        assert torch.equal(shared.combined(shared.decode(2)), right)


def test_a_sink_counts_once() -> None:
    """Two equal parts and a sink as heavy as both: half of the mean."""
    outputs, lses = torch.ones(2, 1, 1, 1), torch.zeros(2, 1, 1)
    sunk = combine(outputs, lses, torch.tensor([2.0]).log())
    torch.testing.assert_close(sunk, torch.full((1, 1, 1), 0.5))
    torch.testing.assert_close(combine(outputs, lses), torch.ones(1, 1, 1))


def test_parts_that_saw_nothing_combine_to_zero_and_what_is_not_finite_stays_so() -> None:
    nothing = torch.full((2, 1, 1), float("-inf"))
    for sinks in (None, torch.zeros(1)):
        assert combine(torch.zeros(2, 1, 1, 1), nothing, sinks).tolist() == [[[0.0]]]
    broken = torch.tensor([0.0, NAN]).view(2, 1, 1)
    assert bool(combine(torch.ones(2, 1, 1, 1), broken).isnan().all())
    assert combine(torch.ones(2, 1, 1, 1), torch.tensor([300.0, -300.0]).view(2, 1, 1)).tolist() == [[[1.0]]]
