"""The C++ attention against the reference in float32, in every variant, in caches whose unowned slots are NaN."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_variants import native  # noqa: F401 - a fixture
from torch import Tensor

from blockplane.kernels import cpu, reference
from blockplane.kernels.native import attention, library
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID

NAN = float("nan")
each_variant = pytest.mark.usefixtures("native")
of_every_variant = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
# Around the kernels' tiles and splits.
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 129, 255, 257, 300, 513, 640]))


@pytest.fixture
def modules():
    return (attention,)


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 1
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    block_size=st.sampled_from([1, 16, 24, 32, 128]),
    sliding_window=st.sampled_from([None, None, 1, 3, 64, 100, 512]),
    attention_chunk_size=st.sampled_from([None, None, None, 8, 100, 256]),
    soft_cap=st.sampled_from([None, None, 3.0, 30.0]),
    has_sinks=st.booleans(),
)
LIMITS = [Shape(), Shape(sliding_window=100), Shape(attention_chunk_size=100), Shape(soft_cap=5.0, has_sinks=True)]
each_limit = pytest.mark.parametrize("shape", LIMITS, ids=["full", "window", "chunks", "cap and sinks"])


@dataclass
class Rows:
    """Sequences of random tokens in scattered blocks, some of them skipped; every slot that is not theirs is NaN."""

    shape: Shape
    seq_lens: list[int]
    seed: int = 0
    skipped: float = 0.0
    block_table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self._generator = torch.Generator().manual_seed(self.seed)
        widths = [-(-seq_len // shape.block_size) for seq_len in self.seq_lens]
        self.block_table = torch.full((len(widths), max(widths) + 1), SKIP_BLOCK_ID, dtype=torch.int32)
        free = iter(torch.randperm(sum(widths) + 2, generator=self._generator).tolist())
        caches = (sum(widths) + 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.k_cache, self.v_cache = (torch.full(caches, NAN, dtype=torch.bfloat16) for _ in range(2))
        for row, width in enumerate(widths):
            for index in range(width):
                block, held = next(free), min(shape.block_size, self.seq_lens[row] - index * shape.block_size)
                for cache in (self.k_cache, self.v_cache):
                    cache[block, :held] = self.random(held, shape.num_kv_heads, shape.head_dim)
                if torch.rand(1, generator=self._generator) >= self.skipped:
                    self.block_table[row, index] = block
        self.sinks = self.random(shape.num_heads) if shape.has_sinks else None

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self._generator).bfloat16()

    def settings(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "scale": 2 * shape.head_dim**-0.5,
            "sliding_window": shape.sliding_window,
            "attention_chunk_size": shape.attention_chunk_size,
            "soft_cap": shape.soft_cap,
            "sinks": self.sinks,
        }

    def decode(self, query: Tensor, kernels: Any = attention, rows: list[int] | None = None, **more: Any) -> Tensor:
        """`query`: [len(rows), num_new_tokens, num_heads, head_dim]; rows None = all, -1 = a padding row."""
        rows = list(range(len(self.seq_lens))) if rows is None else rows
        table = torch.stack([self.block_table[row] if row >= 0 else self.block_table[0] for row in rows])
        lens = torch.tensor([self.seq_lens[row] if row >= 0 else 0 for row in rows], dtype=torch.int32)
        return kernels.decode_attention(query, self.k_cache, self.v_cache, table, lens, **self.settings() | more)

    def prefill(self, query: Tensor, priors: list[int], kernels: Any = attention, kv_segment_size: int = 512) -> Tensor:
        """All tokens of every row behind its prior ones, packed; what the query has beyond them is padding."""
        counts = [seq_len - prior for seq_len, prior in zip(self.seq_lens, priors, strict=True)]
        return kernels.segmented_attention(
            query,
            self.k_cache,
            self.v_cache,
            self.block_table,
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            torch.tensor(priors, dtype=torch.int32),
            kv_segment_size=kv_segment_size,
            **self.settings(),
        )


def assert_rounded(output: Tensor, exact: Tensor) -> None:
    """`exact` is in float32; of `output` the weights of values up to 5 were rounded to bfloat16, and then their sum."""
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, rtol=2**-8, atol=2**-8 + 5 * 2**-9)


@each_variant
@of_every_variant
@given(
    shape=SHAPES,
    seq_lens=st.lists(LENGTHS, min_size=1, max_size=3),
    num_new_tokens=st.integers(1, 5),
    skipped=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.integers(0, 999),
)
def test_decode_equals_the_reference(
    shape: Shape, seq_lens: list[int], num_new_tokens: int, skipped: float, seed: int
) -> None:
    """Rows of fewer tokens than are new stand among them."""
    rows = Rows(shape, seq_lens, seed, skipped)
    query = rows.random(len(seq_lens), num_new_tokens, shape.num_heads, shape.head_dim)
    assert_rounded(rows.decode(query), rows.decode(query.float(), reference))


@each_variant
@of_every_variant
@given(
    shape=SHAPES,
    segments=st.lists(st.tuples(st.integers(0, 300), LENGTHS), min_size=1, max_size=3),
    kv_segment_size=st.sampled_from([0, 512, 512]),
    skipped=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.integers(0, 999),
)
def test_prefill_equals_the_reference(
    shape: Shape, segments: list[tuple[int, int]], kv_segment_size: int, skipped: float, seed: int
) -> None:
    priors = [prior for prior, _ in segments]
    rows = Rows(shape, [prior + count for prior, count in segments], seed, skipped)
    query = rows.random(sum(count for _, count in segments), shape.num_heads, shape.head_dim)
    exact = rows.prefill(query.float(), priors, reference, kv_segment_size)
    assert_rounded(rows.prefill(query, priors, kv_segment_size=kv_segment_size), exact)


@each_variant
@each_limit
def test_a_rows_bits_do_not_depend_on_its_batch(shape: Shape) -> None:
    """Nor on how many threads there are, nor on the drafts that others bring."""
    rows = Rows(shape, [5, 640, 333, 64, 1])
    query = rows.random(5, 3, shape.num_heads, shape.head_dim)
    together = rows.decode(query)
    for num_threads in (1, 2, 3):
        library.set_num_threads(num_threads)
        for row in range(5):
            assert torch.equal(rows.decode(query[[row]], rows=[row])[0], together[row])
            alone = rows.decode(query[[row], 2:].contiguous(), rows=[row])
            assert torch.equal(alone[0, 0], together[row, 2])
        order = [4, 2, -1, 0, 2]
        assert torch.equal(rows.decode(query[order], rows=order)[[0, 1, 3, 4]], together[[4, 2, 0, 2]])


@each_variant
@each_limit
def test_a_tokens_bits_do_not_depend_on_its_segment(shape: Shape) -> None:
    """Wherever a prompt is cut, and whatever is packed with it."""
    seq_len = 700
    rows = Rows(shape, [seq_len, 40])
    query = rows.random(seq_len + 40, shape.num_heads, shape.head_dim)
    whole = rows.prefill(query, [0, 0])[:seq_len]
    for prior in (1, 64, 130, 256, 699):
        rest = query[prior:].contiguous()
        assert torch.equal(rows.prefill(rest, [prior, 0])[: seq_len - prior], whole[prior:])
        alone = Rows(shape, [seq_len])
        alone.block_table, alone.k_cache, alone.v_cache = rows.block_table[:1], rows.k_cache, rows.v_cache
        alone.sinks = rows.sinks
        assert torch.equal(alone.prefill(query[prior:seq_len].contiguous(), [prior]), whole[prior:])


@each_variant
@each_limit
def test_padding_yields_zeros_and_is_not_read(shape: Shape) -> None:
    """Rows of length 0, tokens beyond the last segment, segments of no blocks, and queries before position 0."""
    rows = Rows(shape, [40, 2])
    query = torch.full((3, 4, shape.num_heads, shape.head_dim), NAN, dtype=torch.bfloat16)
    query[0] = rows.random(4, shape.num_heads, shape.head_dim)
    query[1, 2:] = rows.random(2, shape.num_heads, shape.head_dim)
    decoded = rows.decode(query, rows=[0, 1, -1])
    assert not decoded[2].any()
    assert not decoded[1, :2].any()
    assert decoded[0].isfinite().all()
    assert decoded[1, 2:].all()
    packed = torch.full((50, shape.num_heads, shape.head_dim), NAN, dtype=torch.bfloat16)
    packed[:40] = rows.random(40, shape.num_heads, shape.head_dim)
    rows.block_table[1] = SKIP_BLOCK_ID
    prefilled = rows.prefill(packed, [0, 0])
    assert prefilled[:40].all()
    assert not prefilled[40:].any()


@each_variant
@pytest.mark.parametrize("shape", LIMITS[1:3], ids=["window", "chunks"])
def test_nothing_is_read_through_entries_out_of_reach(shape: Shape) -> None:
    """They may name blocks that are another row's now, or the table's padding."""
    rows = Rows(shape, [640])
    query = rows.random(1, 3, shape.num_heads, shape.head_dim)
    right = rows.decode(query), rows.prefill(query[0], [637])
    first = 638 - 100 if shape.sliding_window else 600
    for kv in (rows.k_cache, rows.v_cache):
        kv[rows.block_table[0, : first // shape.block_size].long()] = NAN
    assert torch.equal(rows.decode(query), right[0])
    assert torch.equal(rows.prefill(query[0], [637]), right[1])
    rows.block_table[0, : first // shape.block_size] = SKIP_BLOCK_ID
    assert torch.equal(rows.decode(query), right[0])
    assert torch.equal(rows.prefill(query[0], [637]), right[1])


@each_variant
@pytest.mark.parametrize("poisoned", ["k_cache", "v_cache"])
def test_a_number_that_is_none_ends_its_own_row_alone(poisoned: str) -> None:
    rows = Rows(Shape(), [300, 300])
    getattr(rows, poisoned)[rows.block_table[0, 3], 0] = NAN
    decoded = rows.decode(rows.random(2, 1, 4, 64))
    assert decoded[0].isnan().all()
    assert decoded[1].isfinite().all()
    prefilled = rows.prefill(rows.random(200, 4, 64), [200, 200])
    assert prefilled[:100].isnan().all()
    assert prefilled[100:].isfinite().all()


@each_variant
@pytest.mark.parametrize("sign", [-1, 1])
def test_great_logits_overflow_nothing(sign: int) -> None:
    rows = Rows(Shape(), [200])
    query = sign * rows.random(1, 1, 4, 64)
    assert_rounded(rows.decode(query, scale=1e4), rows.decode(query.float(), reference, scale=1e4))


@each_variant
def test_padding_never_writes_a_slot_and_keys_may_lie_apart() -> None:
    cache = torch.full((3, 16, 2, 64), NAN, dtype=torch.bfloat16)
    k_cache, v_cache = cache.clone(), cache.clone()
    kv = torch.randn(40, 300).bfloat16()
    key, value = kv[:, 5:133].view(40, 2, 64), kv[:, 140:268].view(40, 2, 64)
    slots = torch.randperm(48)[:40]
    slots[::3] = PAD_SLOT_ID
    written = attention.write_kv(key, value, k_cache, v_cache, slots)
    assert written[0] is k_cache
    assert written[1] is v_cache
    for own, new in ((k_cache, key), (v_cache, value)):
        expected = cache.clone()
        expected.flatten(0, 1)[slots[slots >= 0]] = new[slots >= 0]
        assert torch.equal(own.view(torch.int16), expected.view(torch.int16))


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), dim=-1).flatten(-2)[..., ::2]


CACHES = {
    "FP8 caches": lambda cache: reference.to_cache_dtype(cache, torch.float8_e4m3fn),
    "float32 caches": Tensor.float,
    "caches with gaps": with_gaps,
}


@pytest.mark.parametrize("case", ["float32", "queries with gaps", "odd heads", "no library", *CACHES])
def test_what_the_kernels_do_not_take_goes_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(Shape(head_dim=72 if case == "odd heads" else 64), [70, 9])
    query, packed = (rows.random(*sizes, 4, rows.shape.head_dim) for sizes in ((2, 1), (79,)))
    if case == "float32":
        query, packed = query.float(), packed.float()
    if case == "queries with gaps":
        query, packed = with_gaps(query), with_gaps(packed)
    if case == "no library":
        monkeypatch.setattr(attention, "is_there", lambda: False)
    rows.k_cache, rows.v_cache = (CACHES.get(case, Tensor.clone)(cache) for cache in (rows.k_cache, rows.v_cache))
    assert torch.equal(rows.decode(query), rows.decode(query, cpu))
    assert torch.equal(rows.prefill(packed, [0, 0]), rows.prefill(packed, [0, 0], cpu))
    attention.write_kv(packed[:2, :1], packed[:2, 1:2], rows.k_cache, rows.v_cache, torch.tensor([0, PAD_SLOT_ID]))
    for cache, head in ((rows.k_cache, 0), (rows.v_cache, 1)):
        assert torch.equal(cache[0, 0, 0].float(), reference.to_cache_dtype(packed[0, head], cache.dtype).float())


def test_an_active_mask_goes_to_torch() -> None:
    rows = Rows(Shape(), [70])
    query, mask = rows.random(1, 3, 4, 64), torch.ones(1, 4, 3, 3)
    assert torch.equal(rows.decode(query, mask_active=mask), rows.decode(query, cpu, mask_active=mask))
