"""A step's tensors, padded to its buckets: pure index arithmetic from rows to what a model is fed. Decides nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatches, DecodeBatch, PrefillBatch
from blockplane.data_plane.rows import Rows
from blockplane.kernels.slots import PAD_SLOT_ID, slots_of
from blockplane.protos.buckets import choose_bucket
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Int32Array


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one graph is fed. Actual and padded counts are apart: arrays below are padded, `rows` are not.

    Attributes:
        rows: int32 [num_rows], the rows that compute.
        num_scheduled_tokens: int32 [num_rows], actual tokens of each.
        sampled_rows: int32 [num_sampled], those of `rows` that reach their last known token, in order.
        input_ids, positions: int64 [num_padded_tokens]; padding holds 0.
        logits_indices: int64 [num_sampled], where in the tokens the last one of each sampled row stands.
        batches: the attention's side, per KV cache group.
    """

    rows: Int32Array
    num_scheduled_tokens: Int32Array
    sampled_rows: Int32Array
    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    batches: AttentionBatches


def decode_inputs(rows: Rows, decode_rows: Int32Array) -> StepInputs:
    """One token per row, padded along the batch to one of `num_seqs_buckets` (seed 000, "Decode Batch Padding")."""
    num_rows = len(decode_rows)
    num_seqs = _bucket(num_rows, rows.configure.num_seqs_buckets)
    positions = rows.num_computed_tokens[decode_rows].astype(np.int64)
    seq_lens = _padded(positions + 1, num_seqs, np.int32)
    return StepInputs(
        rows=decode_rows,
        num_scheduled_tokens=np.ones(num_rows, np.int32),
        sampled_rows=decode_rows,
        input_ids=_padded(rows.token_ids[decode_rows, positions], num_seqs),
        positions=_padded(positions, num_seqs),
        logits_indices=torch.arange(num_rows),
        batches=tuple(
            DecodeBatch(slot_mapping, block_table, seq_lens)
            for slot_mapping, block_table in _slots_and_tables(
                rows, decode_rows, num_seqs, decode_rows, positions, num_seqs
            )
        ),
    )


def prefill_inputs(rows: Rows, prefill_rows: Int32Array, num_tokens: Int32Array) -> StepInputs:
    """Segments packed end to end, padded to one of `num_batched_tokens_buckets` (seed 000, "Prefill Padding").

    Args:
        prefill_rows, num_tokens: int32 [num_segments], each segment's row and how many tokens it computes.
    """
    query_start_loc = np.concatenate((np.zeros(1, np.int32), np.cumsum(num_tokens, dtype=np.int32)))
    num_padded = _bucket(int(query_start_loc[-1]), rows.configure.num_batched_tokens_buckets)
    prior_tokens = rows.num_computed_tokens[prefill_rows]
    token_rows = np.repeat(prefill_rows, num_tokens)
    offsets = np.arange(query_start_loc[-1], dtype=np.int64) - np.repeat(query_start_loc[:-1], num_tokens)
    positions = np.repeat(prior_tokens, num_tokens) + offsets
    seq_lens = prior_tokens + num_tokens
    reaches_end = seq_lens == rows.num_tokens[prefill_rows]
    return StepInputs(
        rows=prefill_rows,
        num_scheduled_tokens=num_tokens,
        sampled_rows=prefill_rows[reaches_end],
        input_ids=_padded(rows.token_ids[token_rows, positions], num_padded),
        positions=_padded(positions, num_padded),
        logits_indices=torch.from_numpy(query_start_loc[1:][reaches_end].astype(np.int64) - 1),
        batches=tuple(
            PrefillBatch(slot_mapping, block_table, torch.from_numpy(query_start_loc), torch.from_numpy(prior_tokens))
            for slot_mapping, block_table in _slots_and_tables(
                rows, prefill_rows, len(prefill_rows), token_rows, positions, num_padded
            )
        ),
    )


def _bucket(num_items: int, buckets: tuple[int, ...]) -> int:
    bucket = choose_bucket(num_items, buckets)
    if bucket is None:
        raise ProtocolError(f"{num_items} exceeds the last of the buckets {buckets}; the engine must plan within them.")
    return bucket


def _padded(values: np.ndarray, length: int, dtype: type = np.int64, pad: int = 0) -> Tensor:
    """Copy [n] values into a new [length] tensor whose rest is `pad`."""
    padded: np.ndarray = np.full(length, pad, dtype)
    padded[: len(values)] = values
    return torch.from_numpy(padded)


def _slots_and_tables(
    rows: Rows,
    table_rows: Int32Array,
    num_rows_padded: int,
    token_rows: Int32Array,
    positions: np.ndarray,
    num_tokens_padded: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per KV cache group, where the KV of `table_rows` lies and where that of the tokens goes.

    Yields:
        slot_mapping: int64 [num_tokens_padded]: each token's slot, then -1, which is never written.
        block_table: int32 [num_rows_padded, width], as wide as the longest context needs.
    """
    block_size = rows.configure.block_size
    width = int(positions.max()) // block_size + 1
    tables = torch.from_numpy(rows.block_table.gather(table_rows, num_rows_padded, width))
    for block_ids, block_table in zip(rows.block_table.block_ids, tables, strict=True):
        slots = slots_of(block_ids, token_rows, positions, block_size)
        yield _padded(slots, num_tokens_padded, pad=PAD_SLOT_ID), block_table
