"""The worker's rows: what plans change, and that no bad plan is carried out."""

from dataclasses import replace

import numpy as np
import pytest

from blockplane.data_plane.rows import Rows
from blockplane.protos.errors import ProtocolError
from blockplane.protos.kv_cache import KVCacheGroup
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams

CONFIGURE = Configure(4, num_blocks=10, max_model_len=16, num_batched_tokens_buckets=(8,), num_seqs_buckets=(2, 3))


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admit(row: int, num_tokens: int = 5, seed: int = 0) -> Admission:
    return Admission(row, np.arange(1, num_tokens + 1, dtype=np.int32), num_tokens, 0, SamplingParams(1), seed)


def first_plan() -> StepPlan:
    return StepPlan(
        step=1,
        admissions=(admit(1),),
        block_rows=column(1, 1),
        block_ids=column(7, 3),
        prefill_rows=column(1),
        prefill_num_tokens=column(5),
    )


def prefilled_rows() -> Rows:
    """Row 1 with five prompt tokens computed and a sixth sampled."""
    rows = Rows(CONFIGURE)
    rows.apply(first_plan())
    rows.advance(column(1), column(5))
    rows.append(column(1), column(42))
    return rows


def test_an_admitted_row_holds_its_tokens_and_blocks() -> None:
    rows = Rows(CONFIGURE)
    rows.apply(first_plan())
    assert rows.token_ids[1, :5].tolist() == [1, 2, 3, 4, 5]
    assert rows.num_tokens.tolist() == [0, 5, 0]
    assert rows.block_table.block_ids[0, 1, :3].tolist() == [7, 3, 0]


def test_a_sampled_token_is_the_next_input() -> None:
    rows = prefilled_rows()
    assert rows.token_ids[1, 5] == 42
    assert (rows.num_tokens[1], rows.num_computed_tokens[1]) == (6, 5)


def test_the_decode_set_stays_until_a_plan_changes_it() -> None:
    rows = prefilled_rows()
    rows.apply(StepPlan(2, decode_rows=column(1)))
    rows.advance(column(1), column(1))
    rows.append(column(1), column(43))
    rows.apply(StepPlan(3))
    assert rows.decode_rows.tolist() == [1]


def test_rows_that_are_reset_are_as_new_and_count_steps_from_where_they_are_told() -> None:
    rows = prefilled_rows()
    rows.apply(StepPlan(2, decode_rows=column(1)))
    rows.reset(replace(CONFIGURE, last_step=40, epoch=3))
    assert not rows.num_tokens.any()
    assert not rows.block_table.num_blocks.any()
    assert not rows.block_table.block_ids.any()
    assert rows.decode_rows.size == rows.decode_num_tokens.size == 0
    with pytest.raises(ProtocolError, match="step 1 does not follow step 40"):
        rows.apply(first_plan())
    rows.reset(CONFIGURE)
    rows.apply(first_plan())
    assert rows.block_table.block_ids[0, 1, :3].tolist() == [7, 3, 0]


def test_a_released_row_is_free_and_has_no_blocks_left() -> None:
    rows = prefilled_rows()
    rows.apply(StepPlan(2, released_rows=column(1)))
    assert rows.num_tokens[1] == 0
    assert not rows.block_table.block_ids.any()


def test_a_row_released_and_admitted_in_one_plan_starts_afresh() -> None:
    rows = prefilled_rows()
    rows.apply(
        StepPlan(
            2,
            released_rows=column(1),
            admissions=(admit(1, num_tokens=2),),
            block_rows=column(1),
            block_ids=column(9),
            prefill_rows=column(1),
            prefill_num_tokens=column(2),
        )
    )
    assert rows.num_tokens[1] == 2
    assert rows.num_computed_tokens[1] == 0
    assert rows.block_table.block_ids[0, 1, :2].tolist() == [9, 0]


def test_the_token_that_fills_the_context_has_no_place_and_needs_none() -> None:
    rows = full_rows()
    assert rows.num_tokens[0] == 16
    assert rows.token_ids[0, 15] == 16


def test_a_row_that_filled_the_context_may_be_decoded_by_the_plan_in_flight_and_computes_its_last_token_again() -> None:
    rows = full_rows()
    for step in (2, 3):
        rows.apply(StepPlan(step, decode_rows=column(0)))
        assert rows.num_computed_tokens[0] == 15
        rows.advance(column(0), column(1))
        rows.append(column(0), column(6))
    assert rows.token_ids[0].tolist() == list(range(1, 17))


def test_a_row_that_failed_may_be_decoded_by_the_plan_in_flight_and_goes_on_from_token_0() -> None:
    rows = Rows(CONFIGURE)
    rows.apply(first_plan())
    rows.advance(column(1), column(5))
    rows.token_ids[1, 5] = 77
    rows.append(column(1), column(-1))
    rows.apply(StepPlan(2, decode_rows=column(1)))
    assert (rows.token_ids[1, 5], rows.num_tokens[1]) == (0, 6)


def full_rows() -> Rows:
    """Row 0 with a prompt as long as the context, and a token sampled."""
    rows = Rows(CONFIGURE)
    plan = StepPlan(
        1, admissions=(admit(0, num_tokens=16),), block_rows=column(0, 0, 0, 0), block_ids=column(1, 2, 3, 4)
    )
    rows.apply(plan)
    for _ in range(2):
        rows.advance(column(0), column(8))
    rows.append(column(0), column(5))
    return rows


# -- KV cache groups ---------------------------------------------------------------------------------------------------

HYBRID = replace(CONFIGURE, kv_cache_groups=(KVCacheGroup(), KVCacheGroup(sliding_window=5)))


def hybrid_plan(num_computed_tokens: int, *block_ids: int) -> StepPlan:
    """A row of ten tokens and its blocks: pairs of ids, the full group's first."""
    admission = replace(admit(1, num_tokens=10), num_computed_tokens=num_computed_tokens)
    return StepPlan(
        1, admissions=(admission,), block_rows=column(*[1] * (len(block_ids) // 2)), block_ids=column(*block_ids)
    )


def test_a_new_block_s_ids_stand_side_by_side_and_each_goes_to_its_group() -> None:
    rows = Rows(HYBRID)
    other = replace(admit(0), num_computed_tokens=0)
    plan = hybrid_plan(0)
    rows.apply(
        replace(
            plan,
            admissions=(*plan.admissions, other),
            block_rows=column(1, 0, 1),
            block_ids=column(7, 3, 4, 8, 9, 2),
        )
    )
    assert rows.block_table.block_ids[:, 1, :3].tolist() == [[7, 9, 0], [3, 2, 0]]
    assert rows.block_table.block_ids[:, 0, :2].tolist() == [[4, 0], [8, 0]]
    assert rows.block_table.num_blocks.tolist() == [1, 2, 0]


def test_a_window_group_takes_the_null_block_for_what_the_next_token_does_not_see() -> None:
    rows = Rows(HYBRID)
    rows.apply(hybrid_plan(8, 1, 0, 2, 3))
    assert rows.block_table.block_ids[:, 1, :2].tolist() == [[1, 2], [0, 3]]
    assert rows.block_table.gather(np.array([1]), 2, 3).tolist() == [
        [[1, 2, -1], [-1, -1, -1]],
        [[-1, 3, -1], [-1, -1, -1]],
    ]


def test_a_chunked_group_takes_the_null_block_for_earlier_chunks_only() -> None:
    chunked = replace(HYBRID, kv_cache_groups=(KVCacheGroup(), KVCacheGroup(attention_chunk_size=4)))
    for num_computed_tokens, accepted in ((4, True), (3, False)):
        rows = Rows(chunked)
        plan = hybrid_plan(num_computed_tokens, 1, 0)
        if accepted:
            rows.apply(plan)
            assert rows.block_table.block_ids[:, 1, 0].tolist() == [1, 0]
        else:
            with pytest.raises(ProtocolError, match="null block"):
                rows.apply(plan)


@pytest.mark.parametrize(
    ("num_computed_tokens", "block_ids"),
    [(8, (0, 0)), (7, (1, 0)), (8, (1, 0, 2, 0)), (8, (1, 3, 2, 0)), (0, (1, 0))],
    ids=["in a full group", "one token too early", "twice", "after a block", "where tokens are to be written"],
)
def test_a_null_block_that_would_still_be_seen_or_written_is_refused(
    num_computed_tokens: int, block_ids: tuple[int, ...]
) -> None:
    with pytest.raises(ProtocolError, match="null block"):
        Rows(HYBRID).apply(hybrid_plan(num_computed_tokens, *block_ids))


def test_a_null_block_is_judged_by_its_place_in_the_row_and_not_in_the_plan() -> None:
    rows = Rows(HYBRID)
    rows.apply(hybrid_plan(8, 1, 0, 2, 3))
    with pytest.raises(ProtocolError, match="null block"):
        rows.apply(StepPlan(2, block_rows=column(1), block_ids=column(4, 0)))


def test_a_released_row_has_no_blocks_left_in_any_group() -> None:
    rows = Rows(HYBRID)
    rows.apply(hybrid_plan(0, 1, 2, 3, 4))
    rows.apply(StepPlan(2, released_rows=column(1)))
    assert not rows.block_table.block_ids.any()


@pytest.mark.parametrize("block_ids", [(1,), (1, 2, 3), (1, 2, 3, 4)])
def test_a_block_has_exactly_one_id_per_group(block_ids: tuple[int, ...]) -> None:
    plan = replace(hybrid_plan(0), block_rows=column(1), block_ids=column(*block_ids))
    with pytest.raises(ProtocolError, match="do not belong together"):
        Rows(HYBRID).apply(plan)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_one_token_for_each_decode_row_may_be_said() -> None:
    rows = prefilled_rows()
    rows.apply(StepPlan(2, decode_rows=column(1), decode_num_tokens=column(1)))
    assert rows.decode_rows.tolist() == [1]


@pytest.mark.parametrize("num_tokens", [0, 2, -1])
def test_any_other_number_of_decode_tokens_is_refused_where_no_drafts_are_configured(num_tokens: int) -> None:
    with pytest.raises(ProtocolError, match="another number of tokens than 1 to 1"):
        prefilled_rows().apply(StepPlan(2, decode_rows=column(1), decode_num_tokens=column(num_tokens)))
    rows = prefilled_rows()
    rows.apply(StepPlan(2, decode_rows=column(1)))
    rows.advance(column(1), column(1))
    rows.append(column(1), column(43))
    with pytest.raises(ProtocolError, match="another number of tokens than 1 to 1"):
        rows.apply(StepPlan(3, decode_num_tokens=column(num_tokens)))


BAD_PLANS = {
    "a step that does not follow": StepPlan(3),
    "a step again": StepPlan(1),
    "a release of a free row": StepPlan(2, released_rows=column(0)),
    "a release out of range": StepPlan(2, released_rows=column(3)),
    "a release of a negative row": StepPlan(2, released_rows=column(-2)),
    "a double release": StepPlan(2, released_rows=column(1, 1)),
    "an admission to an occupied row": StepPlan(2, admissions=(admit(1),)),
    "a double admission": StepPlan(2, admissions=(admit(0), admit(0))),
    "an admission out of range": StepPlan(2, admissions=(admit(3),)),
    "an admission to a negative row": StepPlan(2, admissions=(admit(-1),)),
    "an admission without tokens": StepPlan(2, admissions=(admit(0, num_tokens=0),)),
    "an admission beyond the context": StepPlan(2, admissions=(admit(0, num_tokens=17),)),
    "the null block": StepPlan(2, block_rows=column(1), block_ids=column(0)),
    "a block that does not exist": StepPlan(2, block_rows=column(1), block_ids=column(10)),
    "a negative block": StepPlan(2, block_rows=column(1), block_ids=column(-1)),
    "a block for a free row": StepPlan(2, block_rows=column(0), block_ids=column(1)),
    "a block for a row out of range": StepPlan(2, block_rows=column(9), block_ids=column(1)),
    "block columns of two lengths": StepPlan(2, block_rows=column(1), block_ids=column(1, 2)),
    "more blocks than a row is wide": StepPlan(2, block_rows=column(*[1] * 31), block_ids=column(*[5] * 31)),
    "an admission that claims all its tokens computed": StepPlan(
        2, admissions=(replace(admit(0), num_computed_tokens=5),)
    ),
    "an admission that claims a negative number computed": StepPlan(
        2, admissions=(replace(admit(0), num_computed_tokens=-1),)
    ),
    "decode columns of two lengths": StepPlan(2, decode_rows=column(1), decode_num_tokens=column(1, 1)),
    "a decode of a row with two tokens to compute": StepPlan(
        2, admissions=(admit(0, num_tokens=2),), block_rows=column(0), block_ids=column(1), decode_rows=column(0)
    ),
    "a decode of a free row": StepPlan(2, decode_rows=column(0)),
    "a decode out of range": StepPlan(2, decode_rows=column(3)),
    "a double decode": StepPlan(2, decode_rows=column(1, 1)),
    "a row decoded and prefilled": StepPlan(
        2, decode_rows=column(1), prefill_rows=column(1), prefill_num_tokens=column(1)
    ),
    "a segment of unknown tokens": StepPlan(2, prefill_rows=column(1), prefill_num_tokens=column(2)),
    "an empty segment": StepPlan(2, prefill_rows=column(1), prefill_num_tokens=column(0)),
    "a negative segment": StepPlan(2, prefill_rows=column(1), prefill_num_tokens=column(-1)),
    "prefill columns of two lengths": StepPlan(2, prefill_rows=column(1), prefill_num_tokens=column()),
    "tokens without a block": StepPlan(2, admissions=(admit(0),), prefill_rows=column(0), prefill_num_tokens=column(5)),
    "more prefill than the last bucket": StepPlan(
        2,
        admissions=(admit(0, num_tokens=9),),
        block_rows=column(0, 0, 0),
        block_ids=column(1, 2, 4),
        prefill_rows=column(0),
        prefill_num_tokens=column(9),
    ),
}


@pytest.mark.parametrize("fault", BAD_PLANS)
def test_a_bad_plan_is_refused(fault: str) -> None:
    rows = prefilled_rows()
    with pytest.raises(ProtocolError, match="bad plan"):
        rows.apply(BAD_PLANS[fault])


@pytest.mark.parametrize(("kv_segment_size", "is_taken"), [(512, True), (0, False)])
def test_a_prefill_behind_computed_tokens_is_taken_only_where_it_reads_them(
    kv_segment_size: int, is_taken: bool
) -> None:
    """Unsegmented, `kv_segment_size` 0, it does not."""
    rows = Rows(replace(CONFIGURE, kv_segment_size=kv_segment_size))
    rows.apply(replace(first_plan(), prefill_num_tokens=column(4)))
    rows.advance(column(1), column(4))
    rest = StepPlan(2, prefill_rows=column(1), prefill_num_tokens=column(1))
    if is_taken:
        rows.apply(rest)
        return
    with pytest.raises(ProtocolError, match=r"kv_segment_size is 0, and it prefills a row .* computed already"):
        rows.apply(rest)


def test_a_bad_plan_writes_no_other_row() -> None:
    for plan in [plan for plan in BAD_PLANS.values() if plan.step == 2]:
        rows = prefilled_rows()
        rows.apply(StepPlan(2, admissions=(admit(2),)))
        before = rows.token_ids[2].copy(), rows.block_table.block_ids[:, 2].copy()
        with pytest.raises(ProtocolError):
            rows.apply(replace(plan, step=3))
        assert (rows.token_ids[2] == before[0]).all()
        assert (rows.block_table.block_ids[:, 2] == before[1]).all()
