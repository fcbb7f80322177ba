"""Attention over a cache of blocks by the C++ kernels, bfloat16 on a CPU. Twins of `kernels.reference`.

What they do not take goes to the twins in torch: other dtypes, an active mask, layouts with gaps. A token's bits depend
neither on the tokens and rows beside it nor on the number of threads.
"""

import torch
from torch import Tensor

from blockplane.kernels import cpu
from blockplane.kernels.native.library import BOOL, FLOAT, INT, POINTER, function, is_there

HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 32, 512
NO_WINDOW = 1 << 60

if is_there():
    _layer_columns = (INT, INT, INT, INT, FLOAT, INT, INT, FLOAT, POINTER)
    _caches = (POINTER, POINTER, POINTER, POINTER, INT)
    _write = function("write_kv", POINTER, INT, POINTER, INT, POINTER, POINTER, POINTER, INT, INT)
    _decode = function("decode_attention", *_caches, POINTER, POINTER, INT, INT, *_layer_columns)
    _prefill = function("segmented_attention", *_caches, POINTER, POINTER, POINTER, INT, INT, BOOL, *_layer_columns)


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference.write_kv`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    tensors = key, value, k_cache, v_cache
    # Tokens may lie apart, as they do where one product gave them.
    are_rows = key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    if not (is_there() and are_rows and _are_bf16(*tensors) and _are_contiguous(k_cache, v_cache, slot_mapping)):
        return cpu.write_kv(key, value, k_cache, v_cache, slot_mapping)
    _write(
        key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), k_cache.data_ptr(), v_cache.data_ptr(),
        slot_mapping.data_ptr(), num_tokens, num_kv_heads * head_dim,
    )  # fmt: skip
    return k_cache, v_cache


def decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    mask_active: Tensor | None = None,
) -> Tensor:
    """As `reference.decode_attention`."""
    if mask_active is not None or not _takes(query, k_cache, v_cache, block_table, scale):
        return cpu.decode_attention(
            query,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            attention_chunk_size=attention_chunk_size,
            soft_cap=soft_cap,
            sinks=sinks,
            mask_active=mask_active,
        )
    output = torch.empty_like(query)
    num_seqs, num_new_tokens, num_heads, head_dim = query.shape
    sinks = None if sinks is None else sinks.float()
    _decode(
        query.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), block_table.stride(0),
        seq_lens.data_ptr(), output.data_ptr(), num_seqs, num_new_tokens, num_heads, k_cache.shape[2], head_dim,
        k_cache.shape[1], scale, sliding_window or NO_WINDOW, attention_chunk_size or 0, soft_cap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )  # fmt: skip
    return output


def segmented_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    prior_tokens: Tensor,
    *,
    kv_segment_size: int,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.segmented_attention`; all prior KV is read at once."""
    if not _takes(query, k_cache, v_cache, block_table, scale):
        return cpu.segmented_attention(
            query,
            k_cache,
            v_cache,
            block_table,
            query_start_loc,
            prior_tokens,
            kv_segment_size=kv_segment_size,
            scale=scale,
            sliding_window=sliding_window,
            attention_chunk_size=attention_chunk_size,
            soft_cap=soft_cap,
            sinks=sinks,
        )
    output = torch.empty_like(query)
    num_tokens, num_heads, head_dim = query.shape
    sinks = None if sinks is None else sinks.float()
    _prefill(
        query.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_table.data_ptr(), block_table.stride(0),
        query_start_loc.data_ptr(), prior_tokens.data_ptr(), output.data_ptr(), num_tokens, len(prior_tokens),
        kv_segment_size > 0, num_heads, k_cache.shape[2], head_dim, k_cache.shape[1], scale,
        sliding_window or NO_WINDOW, attention_chunk_size or 0, soft_cap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )  # fmt: skip
    return output


def _takes(query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, scale: float) -> bool:
    head_dim = query.shape[-1]
    fits = head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM and scale > 0
    return (
        fits
        and is_there()
        and query.dtype == k_cache.dtype == torch.bfloat16
        and query.is_contiguous()
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and block_table.stride(-1) == 1
    )


def _are_bf16(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors)


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)
