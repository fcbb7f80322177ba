"""Small runs of each kernel that say whether their result is the reference's; knows no bug.

Each is as small as lets what it is named for matter: several requests and heads, a partial last block, padding, poison
in every slot that nobody owns.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefilled_cache import PrefilledCache
from simulated import Traced, simulated
from torch import Tensor

from blockplane.kernels import reference
from blockplane.kernels.nki import decode_plan
from blockplane.kernels.nki.attention import NkiAttention
from blockplane.kernels.nki.layout import to_head_major, to_token_major
from blockplane.kernels.slots import PAD_SLOT_ID, SKIP_BLOCK_ID

TOLERANCE = 1e-2


def is_close(output: Tensor, expected: Tensor) -> bool:
    """Within the tolerance everywhere; NaN is not."""
    return bool(((output.float() - expected).abs() <= TOLERANCE).all())


def prefill(
    requests: list[tuple[int, int]], segment: int = 512, num_cores: int = 1, target: str = "trn2", **settings: Any
) -> bool:
    shape = {name: settings.pop(name) for name in ("head_dim", "num_kv_heads", "group", "kv_dtype") if name in settings}
    cache = PrefilledCache(requests, **shape)
    expected = cache.expected(segment, **settings)
    return is_close(cache.output(simulated(num_cores, target), segment, **settings), expected)


def decode(
    seq_lens: list[int], num_new_tokens: int = 1, table_len: int = 512, num_cores: int = 1, **settings: Any
) -> bool:
    """Rows of so many tokens, 0 for padding; what stands before a request's first token in `query` is NaN."""
    shape = {"num_kv_heads": 2, "group": 2, "block_size": 32}
    shape |= {name: settings.pop(name) for name in ("head_dim", "num_kv_heads", "group") if name in settings}
    cache, query = decode_inputs(seq_lens, num_new_tokens, table_len, **shape)
    settings = {"scale": cache.scale} | settings
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    expected = reference.decode_attention(
        query.float(), cache.k_cache.float(), cache.v_cache.float(), cache.block_table, lengths, **settings
    )
    caches = to_head_major(cache.k_cache), to_head_major(cache.v_cache)
    twin = NkiAttention(simulated(num_cores))
    return is_close(twin.decode_attention(query, *caches, cache.block_table, lengths, **settings), expected)


def decode_inputs(
    seq_lens: list[int], num_new_tokens: int, table_len: int, **shape: Any
) -> tuple[PrefilledCache, Tensor]:
    cache = PrefilledCache([(0, seq_len) for seq_len in seq_lens], **shape)
    width = table_len // shape["block_size"]
    padding = (0, width - cache.block_table.shape[1])
    cache.block_table = torch.nn.functional.pad(cache.block_table, padding, value=SKIP_BLOCK_ID)
    heads, head_dim = shape["num_kv_heads"] * shape["group"], cache.k_cache.shape[3]
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(seq_lens), num_new_tokens, heads, head_dim, generator=generator).bfloat16()
    for row, seq_len in enumerate(seq_lens):
        query[row, : max(0, num_new_tokens - seq_len)] = torch.nan
    return cache, query


def write(
    num_tokens: int = 130, num_cores: int = 1, greatest: float | None = None, num_blocks: int = 20, head_dim: int = 64
) -> bool:
    """Every third token is padding. With `greatest`, the limit of Trn2's FP8, the cache is FP8 and numbers are wide."""
    generator = torch.Generator().manual_seed(0)
    spread = 1.0 if greatest is None else 200.0
    key, value = ((torch.randn(num_tokens, 2, head_dim, generator=generator) * spread).bfloat16() for _ in range(2))
    slots = torch.arange(num_blocks * 16 - num_tokens, num_blocks * 16).flip(0)
    slots[2::3] = PAD_SLOT_ID
    dtype = torch.bfloat16 if greatest is None else torch.float8_e4m3fn
    caches = tuple(torch.full((num_blocks, 16, 2, head_dim), 3.0).to(dtype) for _ in range(2))
    head_major = tuple(map(to_head_major, caches))
    NkiAttention(simulated(num_cores)).write_kv(key, value, *head_major, slots)
    if greatest is not None:
        key, value = key.clamp(-greatest, greatest), value.clamp(-greatest, greatest)
    reference.write_kv(key, value, *caches, slots)
    return all(
        torch.equal(to_token_major(written).view(torch.uint8), expected.view(torch.uint8))
        for written, expected in zip(head_major, caches, strict=True)
    )


def decode_in_pieces() -> bool:
    """Three pieces, each with so little of SBUF that it holds one gather."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_plan, "PIECE_BYTES", 2048)
        return decode([3000], 1, 3072, num_kv_heads=1, head_dim=128)


def decode_kv_bytes(seq_lens: list[int], **settings: Any) -> int:
    """Bytes of keys and values that decode reads: all that is gathered by rows or slots, but for the block ids.

    What pads the table is a live block, of 64 numbers a position.
    """
    cache, query = decode_inputs(seq_lens, 1, 512, num_kv_heads=1, group=2, block_size=32)
    cache.block_table[cache.block_table == SKIP_BLOCK_ID] = cache.block_table[0, 0]
    run = Traced()
    caches = to_head_major(cache.k_cache), to_head_major(cache.v_cache)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    NkiAttention(run).decode_attention(query, *caches, cache.block_table, lengths, scale=cache.scale, **settings)
    gathers = [each.transfer for each in run.trace.instructions if each.transfer and each.transfer.dge == "swdge"]
    return sum(gather.num_bytes for gather in gathers if gather.element_bytes >= cache.k_cache.shape[3])


CASES: dict[str, Callable[[], bool]] = {
    "write": write,
    "write on two cores": lambda: write(num_cores=2),
    "write fp8": lambda: write(greatest=240.0),
    "write far": lambda: write(num_tokens=5, num_blocks=2**19 + 3, head_dim=1, greatest=240.0),
    "prefill": lambda: prefill([(320, 20), (64, 9)], num_kv_heads=2, group=2),
    "prefill two segments": lambda: prefill([(1088, 20), (512, 9)]),
    "prefill a wide segment": lambda: prefill([(1216, 20)], segment=2048),
    "prefill a wide head": lambda: prefill([(64, 20)], head_dim=256),
    "prefill past the table": lambda: prefill([(1152, 20), (1216, 9)], sliding_window=700),
    "prefill a window": lambda: prefill([(576, 300)], sliding_window=100),
    "prefill a chunk": lambda: prefill([(576, 200)], attention_chunk_size=64),
    "prefill a cap": lambda: prefill([(64, 40)], soft_cap=2.0),
    "prefill sinks": lambda: prefill([(64, 40)], sinks=torch.tensor([2.0])),
    "prefill on two cores": lambda: prefill([(64, 140)], group=3, num_cores=2),
    "decode": lambda: decode([300, 77, 0, 511]),
    "decode drafts": lambda: decode([511, 2, 130], num_new_tokens=3),
    "decode a window": lambda: decode([300, 40, 500], num_new_tokens=2, sliding_window=70),
    "decode a late window": lambda: decode([1500, 2000], 2, 2048, sliding_window=70),
    "decode a chunk": lambda: decode([300, 260], num_new_tokens=2, attention_chunk_size=64),
    "decode a cap": lambda: decode([300, 50], soft_cap=2.0),
    "decode sinks": lambda: decode([300, 50], sinks=torch.tensor([2.0, -1.0, 0.5, 3.0])),
    "decode a wide head": lambda: decode([300], head_dim=256, num_kv_heads=1),
    "decode in pieces": decode_in_pieces,
    "decode halves": lambda: decode([1900], 1, 2048, num_cores=2, num_kv_heads=1, head_dim=128),
    "decode on two cores": lambda: decode([300, 77, 130], num_cores=2),
    "decode padding reads nothing": lambda: decode_kv_bytes([500, 0]) == decode_kv_bytes([500]),
    "decode reads its window": lambda: decode_kv_bytes([500], sliding_window=64) == 2 * 64 * 64 * 2,
}
