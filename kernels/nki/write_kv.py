"""Scatters new KV into head-major caches by slot ids, on a NeuronCore; knows no request and no position.

Written against the public NKI 0.6.0 documentation and run on this repository's emulator alone: never compiled by
neuronx-cc, never run under AWS's simulator or on a device. That what a scatter skips stays untouched on hardware, and
that VectorE's minimum and maximum keep a NaN, is as untested as the rest.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from blockplane.kernels.nki import fp8

NUM_PARTITIONS = 128


@nki.jit
def write_kv(
    key: nl.NkiTensor,
    value: nl.NkiTensor,
    k_cache: nl.NkiTensor,
    v_cache: nl.NkiTensor,
    slot_mapping: nl.NkiTensor,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Write each token's key and value into its slot; slot -1 writes nothing. Returns the caches, changed in place.

    Of a logical core's two cores the first writes keys, the second values.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], block_size a power of two; of uint8, they
            hold FP8, and what is too wide for this generation's becomes its greatest or least number.
        slot_mapping: int32 [num_tokens, 1].
    """
    assert k_cache.shape[2] & (k_cache.shape[2] - 1) == 0, "block_size must be a power of two"
    num_cores, core = nl.num_programs(0), nl.program_id(0)
    for which in range(core, 2, num_cores):
        if which == 0:
            _write(key, k_cache, slot_mapping)
        else:
            _write(value, v_cache, slot_mapping)
    return k_cache, v_cache


def _write(kv: nl.NkiTensor, cache: nl.NkiTensor, slot_mapping: nl.NkiTensor) -> None:
    num_tokens, num_kv_heads, head_dim = kv.shape
    block_size = cache.shape[2]
    cache_rows = fp8.as_numbers(cache).reshape((cache.shape[0] * num_kv_heads * block_size, head_dim))
    kv_rows = kv.reshape((num_tokens, num_kv_heads * head_dim))
    for start in range(0, num_tokens, NUM_PARTITIONS):
        count = min(NUM_PARTITIONS, num_tokens - start)
        loaded = nl.ndarray((count, num_kv_heads * head_dim), dtype=kv.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=kv_rows[start : start + count, :])
        stored = _to_cache_dtype(loaded, cache, cache_rows)
        slots = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=slots, src=slot_mapping[start : start + count, :])
        first_rows = _rows_of_first_head(slots, block_size, num_kv_heads)
        for head in range(num_kv_heads):
            nisa.dma_copy(
                dst=cache_rows.ap(
                    pattern=[[head_dim, count], [1, head_dim]],
                    vector_offset=_add(first_rows, head * block_size),
                    indirect_dim=0,
                ),
                src=stored[:, head * head_dim : (head + 1) * head_dim],
                oob_mode=nisa.oob_mode.skip,
            )


def _to_cache_dtype(loaded: nl.NkiTensor, cache: nl.NkiTensor, cache_rows: nl.NkiTensor) -> nl.NkiTensor:
    """[num_tokens, num_kv_heads * head_dim] in the cache's dtype, in SBUF."""
    if loaded.dtype == cache_rows.dtype:
        return loaded
    stored = nl.ndarray(loaded.shape, dtype=cache_rows.dtype, buffer=nl.sbuf)
    if cache.dtype == nl.uint8:
        greatest = fp8.greatest()
        nisa.tensor_scalar(stored, loaded, op0=nl.minimum, operand0=greatest, op1=nl.maximum, operand1=-greatest)
    else:
        nisa.tensor_copy(stored, loaded)
    return stored


def _rows_of_first_head(slots: nl.NkiTensor, block_size: int, num_kv_heads: int) -> nl.NkiTensor:
    """int32 [num_tokens, 1], the row of head 0: block * num_kv_heads * block_size + offset, in exact integers.

    A slot is block * block_size + offset, so the row is the slot and num_kv_heads - 1 times its block's first slot.
    Of slot -1 that is less than -(num_kv_heads - 1) * block_size, negative for every head: skipped.
    """
    first_slots = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(first_slots, slots, op0=nl.bitwise_and, operand0=-block_size)
    other_heads = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(other_heads, num_kv_heads - 1)
    rows = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(rows, first_slots, other_heads, op=nl.multiply)
    nisa.tensor_tensor(rows, rows, slots, op=nl.add)
    return rows


def _add(rows: nl.NkiTensor, constant: int) -> nl.NkiTensor:
    """A fresh tile, since a DMA reads its indices after the next one's may have been written."""
    constants = nl.ndarray(rows.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(constants, constant)
    total = nl.ndarray(rows.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(total, rows, constants, op=nl.add)
    return total
