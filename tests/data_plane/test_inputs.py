"""A step's tensors against the plainest way to say what they hold."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockplane.data_plane.attention import DecodeBatch, PrefillBatch
from blockplane.data_plane.inputs import decode_inputs, prefill_inputs
from blockplane.data_plane.rows import Rows
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

BLOCK_SIZE = 4


@st.composite
def occupied_rows(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    """Rows of random lengths, partly computed, in random blocks of one to three groups; and some of them shuffled."""
    groups = (KVCacheGroup(),) * draw(st.integers(1, 3))
    configure = Configure(BLOCK_SIZE, 200, 40, (8, 16, 64, 200), (1, 2, 4, 8), groups)
    num_tokens = draw(st.lists(st.integers(1, 39), min_size=1, max_size=5))
    blocks = draw(st.permutations(range(1, 200)))
    rows = Rows(configure)
    places = draw(st.permutations(range(8)))[: len(num_tokens)]
    block_rows = [row for row, tokens in zip(places, num_tokens, strict=True) for _ in range(-(-tokens // BLOCK_SIZE))]
    rows.apply(
        StepPlan(
            1,
            admissions=tuple(
                Admission(
                    row,
                    np.array(draw(st.lists(st.integers(1, 999), min_size=n, max_size=n)), np.int32),
                    n,
                    0,
                    SamplingParams(1),
                    0,
                )
                for row, n in zip(places, num_tokens, strict=True)
            ),
            block_rows=np.array(block_rows, np.int32),
            block_ids=np.array(blocks[: len(block_rows) * len(groups)], np.int32),
        )
    )
    return rows, draw(st.lists(st.sampled_from(places), min_size=1, unique=True))


def slot(rows: Rows, group: int, row: int, position: int) -> int:
    block_id = int(rows.block_table.block_ids[group][row][position // BLOCK_SIZE])
    return block_id * BLOCK_SIZE + position % BLOCK_SIZE


@settings(deadline=None)
@given(occupied_rows())
def test_decode_inputs_are_each_row_s_next_token_and_then_padding(case: tuple[Rows, list[int]]) -> None:
    rows, chosen = case
    for row in chosen:
        rows.num_computed_tokens[row] = rows.num_tokens[row] - 1
    inputs = decode_inputs(rows, np.array(chosen, np.int32))
    num_padding = len(inputs.input_ids) - len(chosen)
    assert len(inputs.input_ids) == min(bucket for bucket in (1, 2, 4, 8) if bucket >= len(chosen))
    last = [int(rows.num_tokens[row]) - 1 for row in chosen]
    assert (
        inputs.input_ids.tolist()
        == [rows.token_ids[row, at] for row, at in zip(chosen, last, strict=True)] + [0] * num_padding
    )
    assert inputs.positions.tolist() == last + [0] * num_padding
    assert len(inputs.batches) == len(rows.configure.kv_cache_groups)
    for group, batch in enumerate(inputs.batches):
        assert isinstance(batch, DecodeBatch)
        slots = [slot(rows, group, row, at) for row, at in zip(chosen, last, strict=True)]
        assert batch.slot_mapping.tolist() == slots + [-1] * num_padding
        assert batch.seq_lens.tolist() == [at + 1 for at in last] + [0] * num_padding
        assert (batch.block_table[len(chosen) :] == -1).all()
        check_block_table(rows, group, chosen, batch.block_table, [at + 1 for at in last])


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
    ends = [prior + segment for prior, segment in zip(priors, segments, strict=True)]
    reaching = [index for index, row in enumerate(chosen) if ends[index] == rows.num_tokens[row]]
    assert inputs.sampled_rows.tolist() == [chosen[index] for index in reaching]
    bounds = np.cumsum([0, *segments]).tolist()
    assert inputs.logits_indices.tolist() == [bounds[index + 1] - 1 for index in reaching]
    assert len(inputs.batches) == len(rows.configure.kv_cache_groups)
    for group, batch in enumerate(inputs.batches):
        assert isinstance(batch, PrefillBatch)
        slots = [slot(rows, group, row, at) for row, at in tokens]
        assert batch.slot_mapping.tolist() == slots + [-1] * num_padding
        assert batch.query_start_loc.tolist() == bounds
        assert batch.prior_tokens.tolist() == priors
        check_block_table(rows, group, chosen, batch.block_table, ends)


def check_block_table(
    rows: Rows, group: int, chosen: list[int], block_table: torch.Tensor, contexts: list[int]
) -> None:
    """Every row's context lies in the group's blocks that the table names; no entry is the null block."""
    assert block_table.dtype == torch.int32
    assert (block_table != 0).all()
    for index, (row, context) in enumerate(zip(chosen, contexts, strict=True)):
        num_blocks = -(-context // BLOCK_SIZE)
        assert block_table[index, :num_blocks].tolist() == rows.block_table.block_ids[group, row, :num_blocks].tolist()
