"""Decode attention of NeuronCores against the reference's in float32, in caches full of poison."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefilled_cache import PrefilledCache
from simulated import Traced, simulated
from torch import Tensor

from blockplane.kernels import reference
from blockplane.kernels.nki.attention import NkiAttention
from blockplane.kernels.nki.layout import to_head_major
from blockplane.kernels.nki.unsupported import UnsupportedByKernelError
from blockplane.kernels.slots import SKIP_BLOCK_ID

TOLERANCE = 1e-2
"""Absolute, of bfloat16 on data of unit variance; of an FP8 cache too, whose numbers bfloat16 holds exactly."""


class Batch:
    """Rows of so many tokens, 0 = padding, and queries of their last `num_new_tokens`; what stands before a row's first
    token is NaN."""

    def __init__(
        self, seq_lens: list[int], num_new_tokens: int = 1, table_len: int | None = None, **shape: Any
    ) -> None:
        self.cache = PrefilledCache([(0, seq_len) for seq_len in seq_lens], **shape)
        block_size, num_kv_heads, head_dim = self.cache.k_cache.shape[1:]
        self.block_table = self.cache.block_table
        if table_len is not None:
            missing = table_len // block_size - self.block_table.shape[1]
            self.block_table = torch.nn.functional.pad(self.block_table, (0, missing), value=SKIP_BLOCK_ID)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        generator = torch.Generator().manual_seed(1)
        heads = num_kv_heads * shape.get("group", 1)
        self.query = torch.randn(len(seq_lens), num_new_tokens, heads, head_dim, generator=generator).bfloat16()
        for row, seq_len in enumerate(seq_lens):
            self.query[row, : max(0, num_new_tokens - seq_len)] = math.nan

    def expected(self, **settings: Any) -> Tensor:
        caches = self.cache.k_cache.float(), self.cache.v_cache.float()
        settings = {"scale": self.cache.scale} | settings
        return reference.decode_attention(self.query.float(), *caches, self.block_table, self.seq_lens, **settings)

    def output(self, run: Callable[..., Any], **settings: Any) -> Tensor:
        """The kernel's answer, bfloat16. Raises AssertionError where it touched a cache."""
        caches = to_head_major(self.cache.k_cache), to_head_major(self.cache.v_cache)
        before = [cache.clone() for cache in caches]
        settings = {"scale": self.cache.scale} | settings
        output = NkiAttention(run).decode_attention(self.query, *caches, self.block_table, self.seq_lens, **settings)
        for cache, copy in zip(caches, before, strict=True):
            assert torch.equal(cache.view(torch.uint8), copy.view(torch.uint8))
        return output


def assert_equals_reference(batch: Batch, run: Callable[..., Any] | None = None, **settings: Any) -> None:
    """Within the tolerance; zero exactly where the reference has zero, such as in padding rows."""
    expected = batch.expected(**settings)
    output = batch.output(run or simulated(), **settings).float()
    error = (output - expected).abs().max()
    assert error <= TOLERANCE, f"greatest error {error}"
    assert not output[expected == 0].any()


def kv_bytes(run: Traced) -> int:
    """What gathers read: a row or a token of a cache each, and not the block ids of 4 bytes."""
    transfers = [each.transfer for each in run.trace.instructions if each.transfer is not None]
    return sum(each.num_bytes for each in transfers if each.dge == "swdge" and each.element_bytes > 4)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "num_kv_heads", "group", "num_new_tokens", "seq_lens"),
    [
        (16, 64, 1, 1, 1, [100, 16]),
        (16, 128, 1, 8, 4, [257, 40, 0]),
        (16, 256, 2, 2, 2, [70, 130]),
        (32, 64, 2, 4, 8, [300, 9, 128]),
        (32, 128, 3, 2, 1, [129, 500]),
        (64, 64, 1, 8, 5, [700, 64]),
        (64, 256, 1, 4, 1, [513]),
        (128, 128, 1, 1, 3, [1000, 130]),
        (128, 128, 2, 8, 8, [384]),
        (64, 32, 1, 4, 2, [450]),
        (64, 96, 1, 4, 1, [450]),
    ],
)
def test_decode_equals_the_reference(
    block_size: int, head_dim: int, num_kv_heads: int, group: int, num_new_tokens: int, seq_lens: list[int]
) -> None:
    shape = {"block_size": block_size, "head_dim": head_dim, "num_kv_heads": num_kv_heads, "group": group}
    assert_equals_reference(Batch(seq_lens, num_new_tokens, **shape))


@pytest.mark.slow
@pytest.mark.parametrize("num_new_tokens", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_every_size_equals_the_reference(block_size: int, head_dim: int, group: int, num_new_tokens: int) -> None:
    shape = {"block_size": block_size, "head_dim": head_dim, "num_kv_heads": 2, "group": group}
    assert_equals_reference(Batch([2 * block_size - 1, 0, 900, block_size + 1], num_new_tokens, 1024, **shape))


@pytest.mark.parametrize(
    ("seq_lens", "shape", "num_new_tokens"),
    [
        ([8192], {"head_dim": 128, "group": 8}, 1),
        # More than SBUF holds at once, and more scores than PSUM does.
        ([9000, 40], {"head_dim": 128, "group": 2, "block_size": 128}, 1),
        ([3000], {"head_dim": 128, "group": 16}, 8),
    ],
)
def test_long_contexts_equal_the_reference(seq_lens: list[int], shape: dict[str, int], num_new_tokens: int) -> None:
    assert_equals_reference(Batch(seq_lens, num_new_tokens, **shape))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_full_batch_of_long_contexts_equals_the_reference(head_dim: int, num_cores: int, target: str) -> None:
    seq_lens = [8000, 8192, 4097, 1, 0, 12000, 333, 8191]
    assert_equals_reference(Batch(seq_lens, 2, head_dim=head_dim, group=4), simulated(num_cores, target))


@pytest.mark.parametrize("num_new_tokens", [1, 4])
@pytest.mark.parametrize("block_size", [16, 64])
def test_lengths_around_a_block_equal_the_reference(block_size: int, num_new_tokens: int) -> None:
    """Cases 13 and 15: k blocks, one token less and one more, and fewer tokens than are new; tokens cross a block."""
    around = [blocks * block_size + delta for blocks in (1, 2, 3) for delta in (-1, 0, 1)]
    seq_lens = [*range(1, num_new_tokens + 2), *around]
    assert_equals_reference(Batch(seq_lens, num_new_tokens, block_size=block_size, group=2))


def test_new_tokens_on_both_sides_of_a_block_end_are_read() -> None:
    """Case 19: 4 tokens from position 62 on, in blocks of 64."""
    assert_equals_reference(Batch([66, 130, 194], 4, block_size=64, group=2))


def test_outputs_do_not_depend_on_what_pads_the_block_table() -> None:
    """Case 20: 0, -1 or a block that another row owns."""
    outputs = []
    for padding in (0, SKIP_BLOCK_ID, None):
        batch = Batch([70, 300, 0], 2, 512, block_size=32, group=2)
        padded = batch.block_table < 0
        batch.block_table[padded] = batch.block_table[1, 3] if padding is None else padding
        outputs.append(batch.output(simulated()))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_block_that_is_missing_inside_a_context_is_hidden() -> None:
    batch = Batch([300, 200], 2, block_size=32, group=2)
    batch.block_table[0, 2] = batch.block_table[0, 9] = batch.block_table[1, 0] = SKIP_BLOCK_ID
    assert_equals_reference(batch)


@pytest.mark.parametrize("kv_poison", [math.nan, 1e30])
def test_slots_of_nobody_reach_no_output(kv_poison: float) -> None:
    """Case 15: the null block among them."""
    seq_lens = [33, 1, 0, 65, 250]
    assert_equals_reference(Batch(seq_lens, 3, 256, block_size=32, group=2, num_kv_heads=2, poison=kv_poison))


def test_nan_of_one_request_reaches_no_other() -> None:
    """They share gathers' buffers, banks of scores and matrix products."""
    seq_lens, shape = [200, 250, 130], {"block_size": 32, "group": 2}
    batch, sick = Batch(seq_lens, 2, 256, **shape), Batch(seq_lens, 2, 256, **shape)
    slots = sick.cache.slots(1, 0, 250)
    sick.cache.k_cache.flatten(0, 1)[slots] = sick.cache.v_cache.flatten(0, 1)[slots] = math.nan
    sick.query[1] = math.nan
    healthy = [0, 2]
    output = sick.output(simulated())
    assert output[1].isnan().all()
    assert torch.equal(output[healthy], batch.output(simulated())[healthy])


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 70}, {"soft_cap": 3.0}])
def test_uninitialised_memory_reaches_no_output(settings: dict[str, Any], num_cores: int) -> None:
    batch = Batch([500, 40, 0], 2, 512, head_dim=128, group=2)
    runs = [Traced(poison, num_cores) for poison in (math.nan, 1e4, -3e4)]
    first, *others = [batch.output(run, **settings) for run in runs]
    for other in others:
        assert torch.equal(first, other)


def test_padding_rows_are_zero_and_read_no_kv() -> None:
    batch = Batch([500, 0, 0, 0], 1, 512, block_size=32, group=2)
    padded, alone = Traced(), Traced()
    output = batch.output(padded)
    Batch([500], 1, 512, block_size=32, group=2).output(alone)
    assert not output[1:].any()
    assert kv_bytes(padded) == kv_bytes(alone) == 2 * 500 * 64 * 2


@pytest.mark.parametrize("block_size", [16, 128])
def test_kv_is_read_once_and_hardly_anything_else(block_size: int) -> None:
    seq_lens = [1000, 517, 64, 1]
    run = Traced()
    Batch(seq_lens, 1, 1024, block_size=block_size, head_dim=128, group=8).output(run)
    useful = 2 * sum(seq_lens) * 128 * 2
    assert kv_bytes(run) == useful
    moved = sum(each.transfer.num_bytes for each in run.trace.instructions if each.transfer is not None)
    assert moved <= 1.05 * useful


def test_a_window_reads_its_own_rows_alone() -> None:
    """And computes with them alone: the table is 32 times as long."""
    windowed, whole = Traced(), Traced()
    batch = Batch([4000], 1, 4096, block_size=32, group=2)
    batch.output(windowed, sliding_window=128)
    batch.output(whole)
    assert kv_bytes(windowed) <= 2 * (128 + 32) * 64 * 2
    products = [sum(each.opcode == "nc_matmul" for each in run.trace.instructions) for run in (windowed, whole)]
    assert products[0] < products[1] / 5


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 1},
        {"sliding_window": 20},
        {"sliding_window": 128},
        {"sliding_window": 700},
        {"sliding_window": 5000},
        {"attention_chunk_size": 1},
        {"attention_chunk_size": 64},
        {"attention_chunk_size": 512},
        {"attention_chunk_size": 32, "sliding_window": 3},
        {"soft_cap": 0.5},
        {"soft_cap": 30.0, "sliding_window": 100},
        {"sinks": torch.tensor([3.0, -4.0, 0.0, 90.0])},
        {"sinks": torch.tensor([3.0, -4.0, 0.0, 1.0]), "soft_cap": 2.0, "attention_chunk_size": 256},
    ],
)
def test_layers_of_every_kind_equal_the_reference(settings: dict[str, Any]) -> None:
    batch = Batch([1500, 515, 3, 0, 64], 4, 2048, block_size=32, num_kv_heads=2, group=2)
    assert_equals_reference(batch, **settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"sliding_window": 2}, {"sliding_window": 30}, {"attention_chunk_size": 4}, {"attention_chunk_size": 64}],
)
def test_a_mask_of_new_tokens_decides_among_them(settings: dict[str, Any]) -> None:
    """One that lets tokens see later ones, and some of them nothing."""
    batch = Batch([66, 300, 5], 5, 320, block_size=32, num_kv_heads=2, group=2)
    mask = torch.rand(3, 4, 5, 5, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[2, 1, 3] = False
    assert_equals_reference(batch, mask_active=mask, **settings)


def test_a_query_before_the_first_token_is_zero_whatever_its_mask_says() -> None:
    batch = Batch([2, 40], 4, block_size=32, group=2)
    output = batch.output(simulated(), mask_active=torch.ones(2, 2, 4, 4))
    assert not output[0, :2].any()
    assert output[0, 2:].isfinite().all()


def test_large_logits_of_either_sign_are_as_exact_as_small_ones() -> None:
    """The greatest score is what weights are relative to, though it is rounded to bfloat16 for that."""
    batch = Batch([300, 40], 1, block_size=32, group=2)
    batch.cache.k_cache += 1.0
    for factor in (40.0, -40.0):
        batch.query = (torch.full_like(batch.query, factor) + batch.query).bfloat16()
        assert_equals_reference(batch)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp8_caches_equal_the_reference(head_dim: int, target: str) -> None:
    shape = {"block_size": 64, "head_dim": head_dim, "num_kv_heads": 2, "group": 2}
    batch = Batch([700, 65, 0], 3, 768, kv_dtype=torch.float8_e4m3fn, **shape)
    assert_equals_reference(batch, simulated(target=target))


def test_fp8_caches_move_half_the_bytes() -> None:
    read = []
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        run = Traced()
        Batch([512], 1, 512, kv_dtype=kv_dtype, head_dim=128).output(run)
        read.append(kv_bytes(run))
    assert read[0] == 2 * read[1]


@pytest.mark.parametrize(
    ("seq_lens", "num_kv_heads", "settings"),
    [
        ([300, 40], 1, {}),
        ([300, 0, 77], 2, {"sliding_window": 60}),
        # These share every item.
        ([1500], 1, {}),
        ([700, 40, 0], 1, {"soft_cap": 4.0}),
        ([9000], 1, {"sinks": torch.tensor([2.0, -1.0])}),
        ([2000], 1, {"sliding_window": 300}),
        ([40], 1, {"attention_chunk_size": 16}),
    ],
)
def test_two_cores_equal_the_reference(seq_lens: list[int], num_kv_heads: int, settings: dict[str, Any]) -> None:
    batch = Batch(seq_lens, 2, head_dim=128, num_kv_heads=num_kv_heads, group=2)
    assert_equals_reference(batch, simulated(num_cores=2), **settings)


@pytest.mark.parametrize("seq_lens", [[300, 40], [300, 40, 9]])
def test_two_cores_do_not_depend_on_which_is_first(seq_lens: list[int]) -> None:
    batch = Batch(seq_lens, 2, group=2)
    outputs = [batch.output(Traced(num_cores=2, first_core=core)) for core in (0, 1)]
    assert torch.equal(*outputs)


def test_trn3_equals_the_reference() -> None:
    batch = Batch([1500, 515, 3, 0], 2, 2048, head_dim=128, group=4)
    assert_equals_reference(batch, simulated(target="trn3"))


@pytest.mark.parametrize(
    ("shape", "settings", "sentence"),
    [
        ({}, {"scale": 0.0}, "scale is 0.0"),
        ({}, {"attention_chunk_size": 48}, "attention_chunk_size is 48"),
        ({"block_size": 24}, {}, "block_size is 24"),
        ({"block_size": 256}, {}, "block_size is 256"),
        ({"head_dim": 80}, {}, "head_dim is 80"),
        ({"head_dim": 192}, {}, "head_dim is 192"),
        ({"group": 65}, {}, "130 queries of a request"),
    ],
)
def test_what_the_kernel_cannot_compute_is_refused(
    shape: dict[str, int], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedByKernelError, match=sentence):
        Batch([40], 2, **shape).output(simulated(), **settings)


def test_queries_of_four_bytes_are_refused() -> None:
    batch = Batch([40])
    batch.query = batch.query.float()
    with pytest.raises(UnsupportedByKernelError, match=r"torch\.float32"):
        batch.output(simulated())
