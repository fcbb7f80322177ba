"""Cases of other engines' faults: caches full of poison, padded batches, idle steps, tables padded in every way."""

from types import ModuleType

import pytest
import torch
from poisoned_cache import HEAD_DIM, Cache, Shape, assert_close
from torch import Tensor

from blockplane.kernels import cpu, reference, segments
from blockplane.kernels.slots import NULL_BLOCK_ID, PAD_SLOT_ID, SKIP_BLOCK_ID

BLOCK_SIZE = 4
SHAPES = {
    "full": Shape(BLOCK_SIZE, 2, 2),
    "window": Shape(BLOCK_SIZE, 2, 2, sliding_window=3),
    "chunks": Shape(BLOCK_SIZE, 2, 2, attention_chunk_size=6),
    "sinks and soft cap": Shape(BLOCK_SIZE, 2, 2, soft_cap=5.0, has_sinks=True),
}

each_twin = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_dtype = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=["float32", "bfloat16", "float32 over FP8", "bfloat16 over FP8"],
)


class Steps:
    """Writes a sequence's KV as steps do, padded, into a cache that holds nothing but poison."""

    def __init__(
        self,
        kernels: ModuleType,
        shape: Shape,
        seq_lens: list[int],
        dtype: torch.dtype,
        poison: float,
        kv_dtype: torch.dtype,
    ) -> None:
        self.kernels = kernels
        self.cache = Cache(kernels, shape, seq_lens, 5, dtype, poison, kv_dtype)
        for kv in (self.cache.k_cache, self.cache.v_cache):
            kv[:] = self.cache.poison
        self.cache.owned[:] = False

    def write(self, tokens: list[tuple[int, int]], num_padding: int) -> None:
        """The KV of each (row, position), and padding that holds NaN."""
        cache = self.cache
        slots = [cache.slots(row, torch.tensor([position])) for row, position in tokens]
        cache.owned[torch.cat(slots) if slots else []] = True
        mapping = torch.cat([*slots, torch.full((num_padding,), PAD_SLOT_ID)])
        padding = torch.full((num_padding, cache.shape.num_kv_heads, HEAD_DIM), float("nan"), dtype=cache.dtype)
        key, value = (
            torch.cat([*(kv[row][[position]] for row, position in tokens), padding])
            for kv in (cache.keys, cache.values)
        )
        self.kernels.write_kv(key, value, cache.k_cache, cache.v_cache, mapping)


@each_twin
@each_shape
@each_dtype
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_steps_in_a_poisoned_cache_equal_dense_attention_and_write_their_own_slots_alone(
    kernels: ModuleType, shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype, poison: float
) -> None:
    """Case 15: prompts of 1 to 2 blocks and a token, a decode of 3 padded to 4, an idle step."""
    for longest in range(3, 2 * BLOCK_SIZE + 2):
        seq_lens = [longest - 2, longest - 1, longest]
        steps = Steps(kernels, shape, seq_lens, dtype, poison, kv_dtype)
        cache = steps.cache
        prompts = [[(row, position) for position in range(n - 1)] for row, n in enumerate(seq_lens)]
        steps.write([token for prompt in prompts for token in prompt], num_padding=3)
        cache.assert_only_owned_slots_were_written()
        steps.write([(row, n - 1) for row, n in enumerate(seq_lens)], num_padding=1)
        cache.assert_only_owned_slots_were_written()
        prefilled = cache.prefill(kernels, [0, 0, 0], kv_segment_size=8, num_padding=3)
        decoded = cache.decode(kernels, 1, num_padding_rows=1)
        before = cache.k_cache.clone(), cache.v_cache.clone()
        steps.write([], num_padding=4)
        for row, part in enumerate(prefilled[: sum(seq_lens)].split(seq_lens)):
            assert_close(part, cache.dense(row, 0))
            assert_close(decoded[row], cache.dense(row, seq_lens[row] - 1))
        assert not prefilled[sum(seq_lens) :].any()
        assert not decoded[3].any()
        for kv, unchanged in zip((cache.k_cache, cache.v_cache), before, strict=True):
            assert torch.equal(kv.view(torch.uint8), unchanged.view(torch.uint8))


@each_twin
@each_dtype
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_an_idle_batch_of_padding_rows_yields_zeros(
    kernels: ModuleType, dtype: torch.dtype, kv_dtype: torch.dtype, poison: float
) -> None:
    cache = Cache(kernels, SHAPES["full"], [5], dtype=dtype, poison=poison, kv_dtype=kv_dtype)
    output = kernels.decode_attention(
        torch.full((4, 1, 4, HEAD_DIM), float("nan"), dtype=dtype),
        cache.k_cache,
        cache.v_cache,
        torch.full((4, 2), SKIP_BLOCK_ID, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        **cache.settings(),
    )
    assert not output.any()
    cache.assert_only_owned_slots_were_written()


def padded_with(table: Tensor, entry: int) -> Tensor:
    return torch.where(table == SKIP_BLOCK_ID, entry, table)


@each_shape
@pytest.mark.parametrize("num_new_tokens", [1, 3])
@each_twin
def test_what_a_decodes_table_is_padded_with_changes_no_bit(
    kernels: ModuleType, shape: Shape, num_new_tokens: int
) -> None:
    """Case 20: entries beyond a row's blocks are null, skipped, or another row's live block."""
    cache = Cache(kernels, shape, [5, 13, 8])
    right, table = cache.decode(kernels, num_new_tokens, num_padding_rows=1), cache.block_table
    for entry in (NULL_BLOCK_ID, int(table[1, 0])):
        cache.block_table = padded_with(table, entry)
        assert torch.equal(cache.decode(kernels, num_new_tokens, num_padding_rows=1), right)


@each_shape
@pytest.mark.parametrize("attention", [reference, segments, cpu], ids=["reference", "segments", "cpu"])
def test_what_a_prefills_table_is_padded_with_changes_no_bit(attention: ModuleType, shape: Shape) -> None:
    cache = Cache(reference, shape, [5, 13, 8])
    right, table = cache.prefill(attention, [4, 8, 0], kv_segment_size=8), cache.block_table
    for entry in (NULL_BLOCK_ID, int(table[1, 0])):
        cache.block_table = padded_with(table, entry)
        assert torch.equal(cache.prefill(attention, [4, 8, 0], kv_segment_size=8), right)
