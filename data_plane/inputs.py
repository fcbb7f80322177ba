"""A step's tensors, padded to its buckets: pure index arithmetic from rows to what a model is fed. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatches, DecodeBatch, PrefillBatch
from blockplane.data_plane.graphs import Shape, prefill_table_width, table_width
from blockplane.data_plane.packing import has_lone_prefills, max_segments, pack
from blockplane.data_plane.rows import Rows
from blockplane.kernels.slots import PAD_SLOT_ID, slots_of
from blockplane.protos.buckets import choose_bucket
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import first_visible
from blockplane.protos.plan import Int32Array, IntArray

Padding = slice | NDArray[np.bool_]
"""Which of a step's padded tokens are padding, as an index of them."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one graph is fed. Actual and padded counts are apart: arrays below are padded, `rows` are not.

    Attributes:
        shape: the graph's.
        rows: [num_rows], the rows that compute.
        num_scheduled_tokens: int32 [num_rows], actual tokens of each.
        sampled_rows: [num_sampled], the row of each token after which one is sampled, in order: of a prefill the
            rows' last known tokens, of a decode all tokens.
        input_ids, positions: int64 [num_padded_tokens]; padding holds 0.
        logits_indices: int64 [num_sampled], where these tokens stand.
        first_indices: [num_rows], where each row's first token stands.
        batches: the attention's side, per KV cache group.
    """

    shape: Shape
    rows: IntArray
    num_scheduled_tokens: Int32Array
    sampled_rows: IntArray
    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    first_indices: IntArray
    batches: AttentionBatches

    @property
    def num_padding_tokens(self) -> int:
        """Tokens of the graph that are no row's."""
        # After each token of a decode one is sampled, and columns know their length.
        is_decode = self.shape.num_seqs > 0
        return self.shape.num_tokens - (len(self.sampled_rows) if is_decode else int(self.num_scheduled_tokens.sum()))

    @property
    def max_query_len(self) -> int:
        """Actual tokens of the row that has the most."""
        return int(self.num_scheduled_tokens.max())


def decode_inputs(
    rows: Rows, decode_rows: IntArray, num_tokens: Int32Array | None = None, *, is_compiled: bool = False
) -> StepInputs:
    """Each row's newest token and its drafts: `decode_token_threshold` tokens a row, padded along the batch to one of
    `num_seqs_buckets` (seed 000, "Decode Batch Padding").

    A row with fewer tokens has them at the end of its own, behind padding: the kernels count a row's positions back
    from its `seq_lens`, and so need not know how many there are.

    Args:
        decode_rows: [num_rows], at most `max_num_seqs`.
        num_tokens: int32 [num_rows], 1 to `decode_token_threshold`: the newest token and what was proposed after it;
            None = 1 each.
        is_compiled: whether a bucket's tensors all have one shape; see `Backend`.
    """
    configure, num_rows, width = rows.configure, len(decode_rows), rows.configure.decode_token_threshold
    if num_tokens is None:
        num_tokens = np.ones(num_rows, np.int32)
    # Padding rows repeat row 0 until they are blanked, which costs less than copies into longer arrays.
    padded_rows = np.zeros(_bucket(num_rows, configure.num_seqs_buckets), np.int64)
    padded_rows[:num_rows] = decode_rows
    seq_lens = rows.num_computed_tokens[padded_rows]
    seq_lens[:num_rows] += num_tokens
    seq_lens[num_rows:] = 0
    positions, padding = _decode_positions(seq_lens, num_tokens, width)
    actual_indices = np.arange(num_rows) if isinstance(padding, slice) else np.flatnonzero(~padding)
    token_rows = padded_rows if width == 1 else np.repeat(padded_rows, width)
    input_ids, padded_positions, *slot_mappings = _token_columns(rows, token_rows, positions, padding)
    context_len, buckets = int(seq_lens.max()), configure.decode_context_length_buckets
    if buckets or is_compiled:
        context_len = _bucket(context_len, buckets) if buckets else configure.max_model_len
        tables = _trimmed_tables(rows, decode_rows, seq_lens, context_len)
    else:
        lens = torch.from_numpy(seq_lens)
        tables = [(table, lens) for table in _block_tables(rows, decode_rows, len(seq_lens), context_len)]
    return StepInputs(
        shape=Shape(len(positions), len(seq_lens), context_len if buckets else 0),
        rows=decode_rows,
        num_scheduled_tokens=num_tokens,
        sampled_rows=decode_rows if width == 1 else np.repeat(decode_rows, num_tokens),
        input_ids=input_ids,
        positions=padded_positions,
        logits_indices=torch.from_numpy(actual_indices),
        first_indices=actual_indices if width == 1 else np.arange(1, num_rows + 1) * width - num_tokens,
        batches=tuple(
            DecodeBatch(slot_mapping, *table) for slot_mapping, table in zip(slot_mappings, tables, strict=True)
        ),
    )


def prefill_inputs(
    rows: Rows, prefill_rows: Int32Array, num_tokens: Int32Array, *, is_compiled: bool = False
) -> StepInputs:
    """Segments packed end to end, each from a multiple of `prefill_multiple_of` on, padded to one of
    `num_batched_tokens_buckets` (seed 000, "Prefill Padding").

    Args:
        prefill_rows, num_tokens: int32 [num_segments], each segment's row and how many tokens it computes.
        is_compiled: as for `decode_inputs`.
    """
    configure, prior_tokens = rows.configure, rows.num_computed_tokens[prefill_rows]
    num_packed = int(configure.num_bucket_tokens(num_tokens).sum())
    num_padded = _bucket(num_packed, configure.num_batched_tokens_buckets)
    is_lone = len(prefill_rows) == 1 and has_lone_prefills(num_padded, configure)
    num_segments = 1 if is_lone else max_segments(num_padded, configure) if is_compiled else None
    packing = pack(configure, num_tokens, prior_tokens, num_segments)
    token_rows, positions = np.zeros((2, num_padded), np.int64)
    token_rows[packing.token_indices] = np.repeat(prefill_rows, num_tokens)
    positions[packing.token_indices] = np.repeat(prior_tokens, num_tokens) + packing.offsets
    padding = np.ones(num_padded, np.bool_)
    padding[packing.token_indices] = False
    input_ids, padded_positions, *slot_mappings = _token_columns(rows, token_rows, positions, padding)
    seq_lens = prior_tokens + num_tokens
    reaches_end = seq_lens == rows.num_tokens[prefill_rows]
    width = prefill_table_width(configure, None if is_compiled else int(seq_lens.max()))
    block_tables = packing.spread(rows.block_table.gather(prefill_rows, len(prefill_rows), width), configure)
    bounds, priors = torch.from_numpy(packing.query_start_loc), torch.from_numpy(packing.prior_tokens)
    return StepInputs(
        shape=Shape(num_padded, is_lone=is_lone),
        rows=prefill_rows,
        num_scheduled_tokens=num_tokens,
        sampled_rows=prefill_rows[reaches_end],
        input_ids=input_ids,
        positions=padded_positions,
        logits_indices=torch.from_numpy((packing.starts + num_tokens - 1)[reaches_end].astype(np.int64)),
        first_indices=packing.starts,
        batches=tuple(
            PrefillBatch(slot_mapping, block_table, bounds, priors, configure.kv_segment_size)
            for slot_mapping, block_table in zip(slot_mappings, torch.from_numpy(block_tables).unbind(), strict=True)
        ),
    )


def _bucket(num_items: int, buckets: tuple[int, ...]) -> int:
    bucket = choose_bucket(num_items, buckets)
    if bucket is None:
        raise ProtocolError(f"{num_items} exceeds the last of the buckets {buckets}; the engine must plan within them.")
    return bucket


def _decode_positions(seq_lens: Int32Array, num_tokens: Int32Array, width: int) -> tuple[NDArray[np.int64], Padding]:
    """Each row's last `width` positions before its `seq_lens`, row by row: int64 [num_seqs * width], 0 on padding."""
    num_rows = len(num_tokens)
    padding: Padding = slice(num_rows, None)
    if width == 1:
        positions = np.subtract(seq_lens, 1, dtype=np.int64)
    else:
        offsets = np.arange(-width, 0)
        positions = (seq_lens[:, None] + offsets).ravel()
        is_padding = np.ones((len(seq_lens), width), np.bool_)
        is_padding[:num_rows] = offsets < -num_tokens[:, None]
        padding = is_padding.ravel()
    positions[padding] = 0
    return positions, padding


def _token_columns(
    rows: Rows, token_rows: NDArray[np.int64], positions: NDArray[np.int64], padding: Padding
) -> tuple[Tensor, ...]:
    """Each token's id, its position, and its slot in each KV cache group: 2 + num_groups of int64 [num_tokens].

    They are the rows of one array, which goes to the device in one copy.

    Args:
        token_rows, positions: [num_tokens], of any row's first token on padding.
    """
    block_table = rows.block_table
    columns = np.empty((2 + len(block_table.entries), len(positions)), np.int64)
    columns[0] = rows.token_ids[token_rows, positions]
    columns[0, padding] = 0
    columns[1] = positions
    columns[2:] = slots_of(
        block_table.entries, token_rows, positions, block_table.block_size, block_table.context_parallel
    )
    columns[2:, padding] = PAD_SLOT_ID
    return torch.from_numpy(columns).unbind()


def _block_tables(
    rows: Rows, table_rows: IntArray, num_rows_padded: int, context_len: int, groups: Sequence[int] | None = None
) -> tuple[Tensor, ...]:
    """The blocks of `context_len` tokens in each of the groups, None = all: int32 [num_rows_padded, width], parts of
    one array."""
    width = -(-context_len // rows.configure.block_size)
    return torch.from_numpy(rows.block_table.gather(table_rows, num_rows_padded, width, groups)).unbind()


def _trimmed_tables(
    rows: Rows, decode_rows: IntArray, seq_lens: Int32Array, context_len: int
) -> list[tuple[Tensor, Tensor]]:
    """Each group's block table and `seq_lens`, where contexts are shapes: tables are cut behind `context_len` tokens,
    and those of windows before what the first of a row's tokens sees as well."""
    widths = [table_width(group, context_len, rows.configure) for group in rows.configure.kv_cache_groups]
    whole = [group for group, width in enumerate(widths) if width * rows.configure.block_size >= context_len]
    heads, lens = iter(_block_tables(rows, decode_rows, len(seq_lens), context_len, whole)), torch.from_numpy(seq_lens)
    return [
        (next(heads), lens) if group in whole else _tail(rows, group, decode_rows, seq_lens, width)
        for group, width in enumerate(widths)
    ]


def _tail(rows: Rows, group: int, decode_rows: IntArray, seq_lens: Int32Array, width: int) -> tuple[Tensor, Tensor]:
    """A window's block table from the first block on that a row's tokens see, and `seq_lens` from there on."""
    configure = rows.configure
    first_seen = first_visible(
        seq_lens - configure.decode_token_threshold, configure.kv_cache_groups[group].sliding_window, None
    )
    first_blocks = first_seen // configure.block_size
    table = rows.block_table.gather_tails(group, decode_rows, len(seq_lens), first_blocks[: len(decode_rows)], width)
    return torch.from_numpy(table), torch.from_numpy(seq_lens - first_blocks * configure.block_size)
