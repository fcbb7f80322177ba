"""Decodes of several tokens a row, as drafts will make them: rows, inputs, and a forward over them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_oracle import continue_greedily

from blockplane.data_plane.attention import DecodeBatch
from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.graphs import Shape, idle_tensors
from blockplane.data_plane.inputs import StepInputs, decode_inputs
from blockplane.data_plane.kv_cache import bind_kv_caches
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.data_plane.rows import Rows
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Admission, Configure, Int32Array, StepPlan
from blockplane.protos.sampling import SamplingParams

NUM_DRAFTS, BLOCK_SIZE = 3, 4
WIDTH = 1 + NUM_DRAFTS
CONFIGURE = Configure(BLOCK_SIZE, 100, 40, (64,), (2, 4), num_draft_tokens=NUM_DRAFTS)


def column(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def decoding_rows(texts: dict[int, list[int]], configure: Configure = CONFIGURE) -> Rows:
    """Rows that have computed all but the last token of their texts, with blocks for all that they may be granted."""
    rows = Rows(configure)
    num_blocks = {
        row: -(-min(len(text) + NUM_DRAFTS, configure.max_model_len) // BLOCK_SIZE) for row, text in texts.items()
    }
    block_rows = column(*[row for row, count in num_blocks.items() for _ in range(count)])
    params = SamplingParams(1)
    rows.apply(
        StepPlan(
            1,
            admissions=tuple(
                Admission(row, column(*text), len(text), len(text) - 1, params, 0) for row, text in texts.items()
            ),
            block_rows=block_rows,
            block_ids=np.random.default_rng(len(block_rows))
            .permutation(np.arange(1, configure.num_blocks))[: len(block_rows) * len(configure.kv_cache_groups)]
            .astype(np.int32),
            decode_rows=column(*texts),
        )
    )
    return rows


def slot(rows: Rows, row: int, position: int) -> int:
    return int(rows.block_table.block_ids[0, row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 3), st.integers(1, 36), min_size=1), st.data())
def test_a_row_s_tokens_stand_at_the_end_of_its_own_behind_padding(
    lengths: dict[int, int], data: st.DataObject
) -> None:
    texts = {row: list(range(100 * row + 1, 100 * row + 1 + length)) for row, length in lengths.items()}
    rows, chosen = decoding_rows(texts), list(texts)
    counts = [data.draw(st.integers(1, WIDTH)) for _ in chosen]
    drafts = np.arange(1000, 1000 + len(chosen) * NUM_DRAFTS, dtype=np.int32).reshape(-1, NUM_DRAFTS)
    rows.propose(column(*chosen), drafts, column(*counts) - 1)
    inputs = decode_inputs(rows, column(*chosen), column(*counts))
    num_seqs = 2 if len(chosen) <= 2 else 4
    ids, positions, slots, indices, sampled = [], [], [], [], []
    for index, (row, count) in enumerate(zip(chosen, counts, strict=True)):
        padding, start = WIDTH - count, len(texts[row]) - 1
        ids += [0] * padding + [texts[row][-1], *drafts[index, : count - 1].tolist()]
        positions += [0] * padding + [start + offset for offset in range(count)]
        slots += [-1] * padding + [slot(rows, row, start + offset) for offset in range(count)]
        indices += [index * WIDTH + padding + offset for offset in range(count)]
        sampled += [row] * count
    rest = WIDTH * (num_seqs - len(chosen))
    (batch,) = inputs.batches
    assert isinstance(batch, DecodeBatch)
    assert inputs.shape == Shape(WIDTH * num_seqs, num_seqs)
    assert inputs.input_ids.tolist() == ids + [0] * rest
    assert inputs.positions.tolist() == positions + [0] * rest
    assert batch.slot_mapping.tolist() == slots + [-1] * rest
    lens = [len(texts[row]) - 1 + count for row, count in zip(chosen, counts, strict=True)]
    assert batch.seq_lens.tolist() == lens + [0] * (num_seqs - len(chosen))
    assert inputs.logits_indices.tolist() == indices
    assert inputs.sampled_rows.tolist() == sampled
    assert inputs.num_scheduled_tokens.tolist() == counts
    assert inputs.max_query_len == max(counts)
    assert inputs.positions.dtype == batch.slot_mapping.dtype == inputs.logits_indices.dtype == torch.int64
    assert batch.seq_lens.dtype == batch.block_table.dtype == torch.int32


def test_four_tokens_from_the_last_but_one_place_of_a_block_go_to_two_blocks() -> None:
    """Case 19: positions B - 2 to B + 1."""
    rows = decoding_rows({1: list(range(1, BLOCK_SIZE))})
    slot_mapping = decode_inputs(rows, column(1), column(WIDTH)).batches[0].slot_mapping[:WIDTH].tolist()
    first, second = rows.block_table.block_ids[0, 1, :2].tolist()
    assert [slot // BLOCK_SIZE for slot in slot_mapping] == [first, first, second, second]
    assert [slot % BLOCK_SIZE for slot in slot_mapping] == [BLOCK_SIZE - 2, BLOCK_SIZE - 1, 0, 1]


@pytest.mark.parametrize("fill", [float("nan"), 1e30])
def test_every_token_of_a_forward_sees_what_it_would_alone(fill: float) -> None:
    """Rows whose drafts are right: the model goes on from each token as from the text up to there."""
    prompts = {3: [5, 6, 7], 0: [9], 2: list(range(20, 33))}
    counts = column(4, 2, 1)
    model = SyntheticModel("float32")
    bind_kv_caches(model, CONFIGURE, CPU)
    for attention in model.attentions:
        for cache in attention.caches or ():
            cache.fill_(fill)
    rows = decoding_rows(prompts)
    for row, prompt in prompts.items():
        for length in range(1, len(prompt)):
            rows.num_computed_tokens[row] = length - 1
            forward(model, decode_inputs(rows, column(row)))
        rows.num_computed_tokens[row] = len(prompt) - 1
    right = {row: continue_greedily(prompt, WIDTH, ignore_eos=True) for row, prompt in prompts.items()}
    rows.propose(column(*prompts), np.array([ids[:NUM_DRAFTS] for ids in right.values()], np.int32), counts - 1)
    inputs = decode_inputs(rows, column(*prompts), counts)
    expected = [token for ids, count in zip(right.values(), counts, strict=True) for token in ids[:count]]
    assert forward(model, inputs) == expected
    rows.advance(inputs.rows, counts)
    rows.append(inputs.rows, np.array(expected, np.int32), counts)
    for (row, prompt), count in zip(prompts.items(), counts, strict=True):
        assert rows.token_ids[row, : len(prompt) + count].tolist() == prompt + right[row][:count]
        assert rows.num_tokens[row] == rows.num_computed_tokens[row] + 1 == len(prompt) + count


def forward(model: SyntheticModel, inputs: StepInputs) -> list[int]:
    hidden = model.forward(inputs.input_ids, inputs.positions, inputs.batches)
    return model.logits(hidden[inputs.logits_indices]).argmax(dim=-1).tolist()


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_grant_stays_until_a_plan_changes_it_and_a_new_decode_set_is_granted_one_token_each() -> None:
    rows = decoding_rows({0: [1, 2], 1: [3]})
    rows.apply(StepPlan(2, decode_num_tokens=column(4, 2)))
    assert rows.decode_num_tokens.tolist() == [4, 2]
    rows.apply(StepPlan(3))
    assert rows.decode_num_tokens.tolist() == [4, 2]
    rows.apply(StepPlan(4, decode_rows=column(1, 0)))
    assert rows.decode_num_tokens.tolist() == [1, 1]


def test_tokens_that_have_no_place_in_the_context_are_lost_and_the_row_stays_at_its_newest() -> None:
    rows = decoding_rows({0: list(range(1, 39)), 1: [7]})
    rows.advance(column(0, 1), column(4, 2))
    rows.append(column(0, 1), column(50, 51, 52, 53, 60, 61), column(4, 2))
    assert rows.token_ids[0, 37:].tolist() == [38, 50, 51]
    assert (rows.num_tokens[0], rows.num_computed_tokens[0]) == (40, 39)
    assert rows.token_ids[1, :3].tolist() == [7, 60, 61]
    assert (rows.num_tokens[1], rows.num_computed_tokens[1]) == (3, 2)


def test_a_failed_token_among_several_becomes_0() -> None:
    rows = decoding_rows({0: [1]})
    rows.advance(column(0), column(2))
    rows.append(column(0), column(5, -1), column(2))
    assert rows.token_ids[0, :3].tolist() == [1, 5, 0]


BAD_GRANTS = {
    "none": StepPlan(2, decode_num_tokens=column(0)),
    "more than drafts are configured": StepPlan(2, decode_num_tokens=column(WIDTH + 1)),
    "of two rows": StepPlan(2, decode_num_tokens=column(1, 1)),
}


@pytest.mark.parametrize("fault", BAD_GRANTS)
def test_a_bad_grant_is_refused(fault: str) -> None:
    with pytest.raises(ProtocolError, match="bad plan"):
        decoding_rows({0: [1]}).apply(BAD_GRANTS[fault])


def test_a_grant_beyond_the_row_s_blocks_or_the_context_is_refused() -> None:
    for length, message in (4, "no block"), (37, "beyond max_model_len"):
        rows = decoding_rows(
            {0: list(range(1, length + 1))}, replace(CONFIGURE, max_model_len=40 if length == 4 else 38)
        )
        if length == 4:
            rows.block_table.num_blocks[0] = 1
        with pytest.raises(ProtocolError, match=message):
            rows.apply(StepPlan(2, decode_num_tokens=column(4)))


# -- contexts as shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "bucket"), [(5, 8), (6, 16), (13, 16), (14, 40), (37, 40)])
def test_where_contexts_are_shapes_the_table_is_as_wide_as_the_bucket_of_the_longest(length: int, bucket: int) -> None:
    configure = replace(CONFIGURE, decode_context_length_buckets=(8, 16, 40))
    rows = decoding_rows({0: [1], 2: list(range(length))}, configure)
    inputs = decode_inputs(rows, column(0, 2), column(1, 4))
    (batch,) = inputs.batches
    assert isinstance(batch, DecodeBatch)
    assert inputs.shape == Shape(2 * WIDTH, 2, bucket)
    assert batch.block_table.shape == (2, bucket // BLOCK_SIZE)
    num_blocks = int(rows.block_table.num_blocks[2])
    width = min(num_blocks, bucket // BLOCK_SIZE)
    assert batch.block_table[1, :width].tolist() == rows.block_table.block_ids[0, 2, :width].tolist()
    assert (batch.block_table[1, num_blocks:] == -1).all()


@st.composite
def windowed_rows(draw: st.DrawFn) -> tuple[Rows, list[int], list[int]]:
    """Decoding rows with a full group between groups of two windows, which rows decode, and by how many tokens."""
    windows = draw(st.tuples(st.integers(1, 12), st.integers(1, 45)))
    groups = tuple(KVCacheGroup(sliding_window=window) for window in (windows[0], None, windows[1]))
    configure = replace(
        CONFIGURE,
        kv_cache_groups=draw(st.sampled_from([groups, groups[:1]])),
        num_blocks=200,
        decode_context_length_buckets=(8, 24, 40),
    )
    lengths = draw(st.dictionaries(st.integers(0, 3), st.integers(1, 37), min_size=1, max_size=3))
    rows = decoding_rows({row: list(range(length)) for row, length in lengths.items()}, configure)
    return rows, list(lengths), draw(st.lists(st.integers(1, WIDTH), min_size=len(lengths), max_size=len(lengths)))


@settings(deadline=None)
@given(windowed_rows())
def test_where_contexts_are_shapes_a_windows_table_is_its_tail_and_holds_all_that_is_seen(
    case: tuple[Rows, list[int], list[int]],
) -> None:
    rows, chosen, num_tokens = case
    inputs = decode_inputs(rows, np.array(chosen), column(*num_tokens))
    idle = idle_tensors(inputs.shape, rows.configure)
    for group, (batch, idle_batch) in enumerate(zip(inputs.batches, idle[2], strict=True)):
        assert isinstance(batch, DecodeBatch)
        assert isinstance(idle_batch, DecodeBatch)
        assert batch.block_table.shape == idle_batch.block_table.shape
        assert batch.block_table.shape[1] * BLOCK_SIZE <= inputs.shape.context_len
        window = rows.configure.kv_cache_groups[group].sliding_window
        if window is not None:
            assert batch.block_table.shape[1] * BLOCK_SIZE < window - 1 + WIDTH + 2 * BLOCK_SIZE
        for index, (row, count) in enumerate(zip(chosen, num_tokens, strict=True)):
            seq_len = int(rows.num_computed_tokens[row]) + count
            num_left, rest = divmod(seq_len - int(batch.seq_lens[index]), BLOCK_SIZE)
            assert rest == 0
            assert num_left * BLOCK_SIZE <= max(0, seq_len - WIDTH - (window or seq_len) + 1)
            held = rows.block_table.block_ids[group, row, num_left : -(-seq_len // BLOCK_SIZE)]
            assert batch.block_table[index, : len(held)].tolist() == held.tolist()
        assert not batch.seq_lens[len(chosen) :].any()
        assert (batch.block_table[len(chosen) :] == -1).all()
