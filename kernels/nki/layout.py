"""Converts a KV cache between the layout that workers exchange and the one that NeuronCores read; torch alone.

    token-major  [num_blocks, block_size, num_kv_heads, head_dim]   of blocks that move, and of `reference`
    head-major   [num_blocks, num_kv_heads, block_size, head_dim]   of the kernels here

Both directions copy, bit for bit. Head-major, a block of one KV head is one run for a DMA: `block_size * head_dim`
elements at once instead of `head_dim`.
"""

from torch import Tensor


def to_head_major(cache: Tensor) -> Tensor:
    """Contiguous [num_blocks, num_kv_heads, block_size, head_dim] of a token-major cache, or of some blocks of one."""
    return cache.transpose(1, 2).contiguous()


def to_token_major(cache: Tensor) -> Tensor:
    """Contiguous [num_blocks, block_size, num_kv_heads, head_dim] of a head-major cache, or of some blocks of one."""
    return cache.transpose(1, 2).contiguous()
