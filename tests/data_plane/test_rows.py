"""The worker's rows: what plans change, and that no bad plan is carried out."""

from dataclasses import replace

import numpy as np
import pytest

from blockplane.data_plane.rows import Rows
from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Admission, Configure, StepPlan

CONFIGURE = Configure(4, num_blocks=10, max_model_len=16, num_batched_tokens_buckets=(8,), num_seqs_buckets=(2, 3))


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admit(row: int, num_tokens: int = 5, seed: int = 0) -> Admission:
    return Admission(row, np.arange(1, num_tokens + 1, dtype=np.int32), num_tokens, 0, 0.5, seed)


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


def test_an_admitted_row_holds_its_tokens_blocks_and_sampling() -> None:
    rows = Rows(CONFIGURE)
    plan = first_plan()
    rows.apply(replace(plan, admissions=(replace(plan.admissions[0], seed=2**64 - 1),)))
    assert rows.token_ids[1, :5].tolist() == [1, 2, 3, 4, 5]
    assert rows.num_tokens.tolist() == [0, 5, 0]
    assert rows.block_table.block_ids[1, :3].tolist() == [7, 3, 0]
    assert rows.temperature[1] == np.float32(0.5)
    assert int(rows.seed[1]) == 2**64 - 1


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
    assert rows.block_table.block_ids[1, :2].tolist() == [9, 0]


def test_the_token_that_fills_the_context_has_no_place_and_needs_none() -> None:
    rows = Rows(CONFIGURE)
    rows.apply(StepPlan(1, admissions=(admit(0, num_tokens=16),)))
    rows.append(column(0), column(5))
    assert rows.num_tokens[0] == 16


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
    "more blocks than a row is wide": StepPlan(2, block_rows=column(*[1] * 40), block_ids=column(*[5] * 40)),
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


def test_a_bad_plan_writes_no_other_row() -> None:
    for plan in [plan for plan in BAD_PLANS.values() if plan.step == 2]:
        rows = prefilled_rows()
        rows.apply(StepPlan(2, admissions=(admit(2),)))
        before = rows.token_ids[2].copy(), rows.block_table.block_ids[2].copy()
        with pytest.raises(ProtocolError):
            rows.apply(replace(plan, step=3))
        assert (rows.token_ids[2] == before[0]).all()
        assert (rows.block_table.block_ids[2] == before[1]).all()
