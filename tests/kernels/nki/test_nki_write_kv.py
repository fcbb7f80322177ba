"""The KV write of NeuronCores against the reference, bit for bit, in caches full of poison."""

import math
from typing import Any

import pytest
import torch
from simulated import Traced, simulated
from torch import Tensor

from blockplane.kernels import reference
from blockplane.kernels.nki.attention import NkiAttention
from blockplane.kernels.nki.layout import to_head_major, to_token_major
from blockplane.kernels.nki.unsupported import UnsupportedByKernelError
from blockplane.kernels.slots import PAD_SLOT_ID, slots_of

GREATEST = {"trn2": 240.0, "trn3": 448.0}
"""Of FP8: float8_e4m3's, and float8_e4m3fn's."""


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def poisoned(shape: tuple[int, ...], poison: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Token-major caches of [num_blocks, block_size, num_kv_heads, head_dim]."""
    full = reference.to_cache_dtype(torch.tensor(poison), dtype).expand(shape)
    return full.clone(), full.clone()


def random_kv(num_tokens: int, num_kv_heads: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator).bfloat16() for _ in range(2))
    return key, value


def assert_equals_reference(
    twin: NkiAttention, key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    """The whole caches, so that what lies outside the written slots counts too."""
    head_major = tuple(map(to_head_major, caches))
    twin.write_kv(key, value, *head_major, slots)
    reference.write_kv(key, value, *caches, slots)
    for written, expected in zip(head_major, caches, strict=True):
        assert torch.equal(bits(to_token_major(written)), bits(expected))


@pytest.mark.parametrize("poison", [math.nan, 1e30])
@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize(
    ("num_tokens", "block_size", "num_kv_heads", "head_dim"),
    [(1, 16, 1, 64), (127, 32, 2, 128), (128, 64, 1, 256), (129, 128, 8, 64), (300, 16, 3, 128)],
)
def test_written_caches_equal_the_references(
    num_tokens: int, block_size: int, num_kv_heads: int, head_dim: int, num_cores: int, poison: float
) -> None:
    """A third of the tokens is padding."""
    num_blocks = 2 * num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[2::3] = PAD_SLOT_ID
    caches = poisoned((num_blocks, block_size, num_kv_heads, head_dim), poison, torch.bfloat16)
    key, value = random_kv(num_tokens, num_kv_heads, head_dim)
    assert_equals_reference(NkiAttention(simulated(num_cores)), key, value, caches, slots)


def test_padding_alone_writes_nothing() -> None:
    caches = poisoned((3, 16, 2, 64), math.nan, torch.bfloat16)
    before = bits(to_head_major(caches[0]))
    head_major = tuple(map(to_head_major, caches))
    NkiAttention(simulated()).write_kv(*random_kv(140, 2, 64), *head_major, torch.full((140,), PAD_SLOT_ID))
    assert all(torch.equal(bits(cache), before) for cache in head_major)


def test_no_tokens_write_nothing() -> None:
    caches = poisoned((3, 16, 2, 64), math.nan, torch.bfloat16)
    assert_equals_reference(NkiAttention(simulated()), *random_kv(0, 2, 64), caches, torch.empty(0, dtype=torch.int64))


def test_a_write_may_cross_into_the_next_block() -> None:
    """Case 19: positions B - 2 to B + 1 go to blocks j, j, j + 1, j + 1."""
    block_size, table = 16, torch.tensor([[4, 2]], dtype=torch.int32)
    positions = torch.arange(block_size - 2, block_size + 2)
    slots = slots_of(table, torch.zeros_like(positions), positions, block_size)
    caches = poisoned((6, block_size, 2, 64), math.nan, torch.bfloat16)
    assert_equals_reference(NkiAttention(simulated()), *random_kv(4, 2, 64), caches, slots)
    is_written = ~caches[0].isnan().any(-1).any(-1)
    assert is_written.nonzero().tolist() == [[2, 0], [2, 1], [4, 14], [4, 15]]


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_fp8_is_clamped_to_what_the_generation_has(target: str) -> None:
    """NaN stays NaN, and slots that are not written keep their bytes."""
    numbers = torch.tensor([0.0, 1.25, -3.5, 239.0, 247.0, 300.0, -460.0, 1e4, -math.inf, math.nan, 2**-9, -0.0])
    key = numbers.repeat(6)[:64].expand(3, 2, 64).bfloat16()
    caches = tuple(torch.full((2, 2, 16, 64), 77, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2))
    NkiAttention(simulated(target=target)).write_kv(key, -key, *caches, torch.tensor([17, PAD_SLOT_ID, 5]))
    limit = GREATEST[target]
    # As bytes: the NaN of float8_e4m3 is a number of float8_e4m3fn.
    expected = key[0].float().clamp(-limit, limit).to(torch.float8_e4m3fn)
    is_number = ~key[0].isnan()
    for cache, sign in zip(caches, (1.0, -1.0), strict=True):
        for block, offset in ((1, 1), (0, 5)):
            written = cache[block, :, offset]
            assert torch.equal(written.float()[is_number], sign * expected.float()[is_number])
            assert (bits(written)[~is_number] & 0x78 == 0x78).all()
            assert (bits(written)[~is_number] & 0x07 != 0).all()
        untouched = torch.ones(2, 16, dtype=torch.bool)
        untouched[1, 1] = untouched[0, 5] = False
        assert (bits(cache).transpose(1, 2)[untouched] == 77).all()


def test_a_wider_key_is_rounded_to_the_caches_dtype() -> None:
    caches = poisoned((3, 16, 2, 64), 0.0, torch.bfloat16)
    key, value = torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    assert_equals_reference(NkiAttention(simulated()), key, value, caches, torch.arange(20) + 9)


def test_row_ids_beyond_float32s_whole_numbers_are_exact() -> None:
    """Rows 2^24 + 1, 2^24 + 3, ... have no float32 of their own."""
    block_size, num_kv_heads, num_blocks = 128, 3, 2**24 // (128 * 3) + 3
    caches = tuple(torch.zeros(num_blocks, num_kv_heads, block_size, 1, dtype=torch.uint8) for _ in range(2))
    slots = torch.tensor([num_blocks * block_size - 1, PAD_SLOT_ID, (num_blocks - 1) * block_size + 3])
    key = torch.full((3, num_kv_heads, 1), 2.0, dtype=torch.bfloat16)
    NkiAttention(simulated()).write_kv(key, key, *(cache.view(torch.float8_e4m3fn) for cache in caches), slots)
    written = [[num_blocks - 1, head, offset, 0] for head in range(num_kv_heads) for offset in (3, block_size - 1)]
    assert all(cache.nonzero().tolist() == written for cache in caches)


def test_the_bits_do_not_depend_on_what_memory_held() -> None:
    key, value = random_kv(130, 2, 64)
    slots = torch.randperm(160)[:130]
    slots[::4] = PAD_SLOT_ID
    written = []
    for poison in (math.nan, 1e4):
        caches = tuple(map(to_head_major, poisoned((10, 16, 2, 64), 1e30, torch.bfloat16)))
        NkiAttention(Traced(poison)).write_kv(key, value, *caches, slots)
        written.append(torch.cat([bits(cache) for cache in caches]))
    assert torch.equal(*written)


def _writes_hbm(instruction: Any) -> bool:
    return bool(instruction.writes) and instruction.writes[0].buffer == "hbm"


def test_padding_costs_no_write() -> None:
    slots = torch.full((130,), PAD_SLOT_ID)
    slots[7] = 3
    run = Traced()
    caches = tuple(map(to_head_major, poisoned((10, 16, 2, 64), 0.0, torch.bfloat16)))
    NkiAttention(run).write_kv(*random_kv(130, 2, 64), *caches, slots)
    writes = [each for each in run.trace.instructions if _writes_hbm(each)]
    assert sum(each.transfer.num_bytes for each in writes) == 2 * 2 * 64 * 2
    assert sum(each.transfer.num_skipped for each in writes) == 2 * 2 * 129


def test_of_two_cores_one_writes_keys_and_the_other_values() -> None:
    run = Traced(num_cores=2)
    caches = tuple(map(to_head_major, poisoned((10, 16, 2, 64), 0.0, torch.bfloat16)))
    NkiAttention(run).write_kv(*random_kv(130, 2, 64), *caches, torch.arange(130))
    writes = [{each.writes[0].storage for each in run.trace.of_core(core) if _writes_hbm(each)} for core in range(2)]
    assert [len(written) for written in writes] == [1, 1]
    assert writes[0] != writes[1]


def test_blocks_of_no_power_of_two_are_refused() -> None:
    caches = poisoned((3, 2, 48, 64), 0.0, torch.bfloat16)
    with pytest.raises(UnsupportedByKernelError, match="block_size is 48"):
        NkiAttention(simulated()).write_kv(*random_kv(1, 2, 64), *caches, torch.tensor([0]))


def test_a_cache_with_too_many_rows_is_refused() -> None:
    cache = torch.empty(2**24, 2, 128, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UnsupportedByKernelError, match="4294967296 rows"):
        NkiAttention(simulated()).write_kv(*random_kv(1, 2, 64), cache, cache, torch.tensor([0]))
