"""The two layouts of a KV cache, into each other bit for bit."""

import pytest
import torch

from blockplane.kernels.nki.layout import to_head_major, to_token_major


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_both_ways_keep_every_bit(dtype: torch.dtype) -> None:
    shape = (5, 16, 3, 64)
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    cache = bits.view(dtype)
    back = to_token_major(to_head_major(cache))
    assert back.shape == shape
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), bits)


def test_a_heads_block_is_one_contiguous_run() -> None:
    token_major = torch.arange(2 * 4 * 3 * 2).view(2, 4, 3, 2)
    head_major = to_head_major(token_major)
    assert head_major.is_contiguous()
    assert torch.equal(head_major[1, 2], token_major[1, :, 2])
