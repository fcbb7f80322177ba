"""A step's tensors against the plainest way to say what they hold."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockplane.data_plane.attention import DecodeBatch, PrefillBatch
from blockplane.data_plane.inputs import decode_inputs, prefill_inputs
from blockplane.data_plane.rows import Rows
from blockplane.protos.plan import Admission, Configure, StepPlan

BLOCK_SIZE = 4


@st.composite
def occupied_rows(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    """Rows of random lengths, partly computed, in random blocks; and some of them in random order."""
    configure = Configure(BLOCK_SIZE, 200, 40, (8, 16, 64, 200), (1, 2, 4, 8))
    num_tokens = draw(st.lists(st.integers(1, 39), min_size=1, max_size=5))
    blocks = draw(st.permutations(range(1, 60)))
    rows = Rows(configure)
    places = draw(st.permutations(range(8)))[: len(num_tokens)]
    block_rows = [row for row, tokens in zip(places, num_tokens, strict=True) for _ in range(-(-tokens // BLOCK_SIZE))]
    rows.apply(
        StepPlan(
            1,
            admissions=tuple(
                Admission(
                    row, np.array(draw(st.lists(st.integers(1, 999), min_size=n, max_size=n)), np.int32), n, 0, 0, 0
                )
                for row, n in zip(places, num_tokens, strict=True)
            ),
            block_rows=np.array(block_rows, np.int32),
            block_ids=np.array(blocks[: len(block_rows)], np.int32),
        )
    )
    return rows, draw(st.lists(st.sampled_from(places), min_size=1, unique=True))


def slot(rows: Rows, row: int, position: int) -> int:
    return int(rows.block_table.block_ids[row][position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


@settings(deadline=None)
@given(occupied_rows())
def test_decode_inputs_are_each_row_s_next_token_and_then_padding(case: tuple[Rows, list[int]]) -> None:
    rows, chosen = case
    for row in chosen:
        rows.num_computed_tokens[row] = rows.num_tokens[row] - 1
    inputs = decode_inputs(rows, np.array(chosen, np.int32))
    batch = inputs.batch
    assert isinstance(batch, DecodeBatch)
    num_padding = len(inputs.input_ids) - len(chosen)
    assert len(inputs.input_ids) == min(bucket for bucket in (1, 2, 4, 8) if bucket >= len(chosen))
    last = [int(rows.num_tokens[row]) - 1 for row in chosen]
    assert (
        inputs.input_ids.tolist()
        == [rows.token_ids[row, at] for row, at in zip(chosen, last, strict=True)] + [0] * num_padding
    )
    assert inputs.positions.tolist() == last + [0] * num_padding
    assert (
        batch.slot_mapping.tolist()
        == [slot(rows, row, at) for row, at in zip(chosen, last, strict=True)] + [-1] * num_padding
    )
    assert batch.seq_lens.tolist() == [at + 1 for at in last] + [0] * num_padding
    assert (batch.block_table[len(chosen) :] == -1).all()
    check_block_table(rows, chosen, batch.block_table, [at + 1 for at in last])


@settings(deadline=None)
@given(occupied_rows(), st.data())
def test_prefill_inputs_are_the_segments_end_to_end_and_then_padding(
    case: tuple[Rows, list[int]], data: st.DataObject
) -> None:
    rows, chosen = case
    segments = []
    for row in chosen:
        total = int(rows.num_tokens[row])
        prior = data.draw(st.integers(0, (total - 1) // BLOCK_SIZE)) * BLOCK_SIZE
        rows.num_computed_tokens[row] = prior
        segments.append(data.draw(st.integers(1, total - prior)))
    inputs = prefill_inputs(rows, np.array(chosen, np.int32), np.array(segments, np.int32))
    batch = inputs.batch
    assert isinstance(batch, PrefillBatch)
    priors = [int(rows.num_computed_tokens[row]) for row in chosen]
    tokens = [
        (row, prior + offset)
        for row, prior, segment in zip(chosen, priors, segments, strict=True)
        for offset in range(segment)
    ]
    num_padding = len(inputs.input_ids) - len(tokens)
    assert len(inputs.input_ids) == min(bucket for bucket in (8, 16, 64, 200) if bucket >= len(tokens))
    assert inputs.input_ids.tolist() == [rows.token_ids[row, at] for row, at in tokens] + [0] * num_padding
    assert inputs.positions.tolist() == [at for _, at in tokens] + [0] * num_padding
    assert batch.slot_mapping.tolist() == [slot(rows, row, at) for row, at in tokens] + [-1] * num_padding
    assert batch.query_start_loc.tolist() == np.cumsum([0, *segments]).tolist()
    assert batch.prior_tokens.tolist() == priors
    ends = [prior + segment for prior, segment in zip(priors, segments, strict=True)]
    reaching = [index for index, row in enumerate(chosen) if ends[index] == rows.num_tokens[row]]
    assert inputs.sampled_rows.tolist() == [chosen[index] for index in reaching]
    assert inputs.logits_indices.tolist() == [int(batch.query_start_loc[index + 1]) - 1 for index in reaching]
    check_block_table(rows, chosen, batch.block_table, ends)


def check_block_table(rows: Rows, chosen: list[int], block_table: torch.Tensor, contexts: list[int]) -> None:
    """Every row's context lies in blocks that the table names; no entry is the null block."""
    assert block_table.dtype == torch.int32
    assert (block_table != 0).all()
    for index, (row, context) in enumerate(zip(chosen, contexts, strict=True)):
        num_blocks = -(-context // BLOCK_SIZE)
        assert block_table[index, :num_blocks].tolist() == rows.block_table.block_ids[row, :num_blocks].tolist()
