"""The scheduler against small cases worked out by hand, one plan at a time: prefill, decode, ends, refusals."""

import numpy as np
import pytest
from driving import (
    EOS,
    VOCAB_SIZE,
    answer,
    finish,
    is_whole,
    make_request,
    make_scheduler,
    outcomes,
    plan_step,
    run,
    run_step,
    tokens,
)

from blockplane.protos.errors import CapacityError, InvalidRequestError, ModelOutputError, ProtocolError
from blockplane.protos.plan import StepResult


def names(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def test_nothing_to_do_is_no_plan() -> None:
    assert make_scheduler().schedule() is None


def test_a_prompt_is_prefilled_and_then_decodes_until_max_tokens() -> None:
    scheduler, request = make_scheduler(), make_request("a", 5, max_tokens=3)
    scheduler.add([request])
    first, outputs = run_step(scheduler)
    assert [admission.token_ids.tolist() for admission in first.admissions] == [[1, 2, 3, 4, 5]]
    assert first.prefill_num_tokens.tolist() == [5]
    assert first.decode_rows is None, "no row decodes, as before"
    assert (tokens(outputs, request), outcomes(outputs)) == ([7], {})
    second, _ = run_step(scheduler)
    assert second.decode_rows is not None
    assert second.decode_rows.tolist() == first.prefill_rows.tolist()
    _, outputs = run_step(scheduler)
    assert (tokens(outputs, request), outcomes(outputs)) == ([7], {"a": "length"})
    assert request.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 7, 7]
    assert scheduler.schedule() is None
    assert is_whole(scheduler)


def test_steps_are_numbered_and_columns_are_int32() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_request("a", 5)])
    for step in (1, 2, 3):
        plan, outputs = run_step(scheduler)
        assert plan.step == step
        columns = [plan.released_rows, plan.block_rows, plan.block_ids, plan.prefill_rows, plan.prefill_num_tokens]
        columns += [outputs.owners, outputs.stream_ids, outputs.token_ids]
        columns += [] if plan.decode_rows is None else [plan.decode_rows]
        assert {column.dtype for column in columns} == {np.dtype(np.int32)}


def test_an_admission_carries_what_the_worker_must_know() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 5, params={"temperature": 0.5})
    request.seed = 2**63 + 1
    scheduler.add([request])
    (admission,) = plan_step(scheduler).admissions
    assert (admission.params, admission.seed) == (request.params, 2**63 + 1)
    assert (admission.num_prompt_tokens, admission.num_computed_tokens) == (5, 0)


def test_tokens_carry_their_requests_owner_and_stream() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_request("a", 3, owner=4, stream_id=9), make_request("b", 3, first=50, owner=5, stream_id=9)])
    for _ in range(2):
        _, outputs = run_step(scheduler)
        assert list(zip(outputs.owners.tolist(), outputs.stream_ids.tolist(), strict=True)) == [(4, 9), (5, 9)]


def test_an_unchanged_decode_set_is_not_sent_again() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_request("a", 2)])
    run_step(scheduler)
    assert run_step(scheduler)[0].decode_rows is not None
    steady, _ = run_step(scheduler)
    assert steady.decode_rows is None
    assert steady.decode_num_tokens is None
    assert steady.admissions == ()
    assert steady.prefill_rows.size == 0


def test_a_row_that_ends_leaves_the_decode_set_of_the_next_plan() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_request("a", 2, max_tokens=2), make_request("b", 2, first=50)])
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert plan.decode_rows is not None
    assert plan.decode_rows.tolist() == [0, 1]
    plan, _ = run_step(scheduler)
    assert plan.decode_rows is not None
    assert (plan.decode_rows.tolist(), plan.released_rows.tolist()) == ([1], [0])
    assert run_step(scheduler)[0].released_rows.size == 0, "told once"


# -- prefill -----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_never_hides_the_decodes() -> None:
    scheduler = make_scheduler(tokens=(8,))
    decoding = make_request("decoding", 3, max_tokens=20, first=50)
    scheduler.add([decoding])
    run_step(scheduler)
    scheduler.add([make_request("long", 40)])
    for _ in range(5):
        plan, outputs = run_step(scheduler)
        assert plan.prefill_num_tokens.tolist() == [8]
        assert tokens(outputs, decoding) == [7]


def test_only_the_last_segment_of_a_prompt_may_end_inside_a_block() -> None:
    scheduler = make_scheduler(tokens=(10,), block_size=4)
    scheduler.add([make_request("a", 21)])
    assert [run_step(scheduler)[0].prefill_num_tokens.tolist() for _ in range(3)] == [[8], [8], [5]]


def test_segments_inside_a_prompt_are_multiples_of_what_the_backend_asks_for() -> None:
    """A block of 4 and a tile of 6: a multiple of 12."""
    scheduler = make_scheduler(tokens=(18,), block_size=4, configure={"prefill_multiple_of": 6})
    scheduler.add([make_request("a", 30)])
    assert [run_step(scheduler)[0].prefill_num_tokens.tolist() for _ in range(2)] == [[12], [18]]


def test_only_a_segment_that_ends_its_prompt_gives_a_token() -> None:
    scheduler = make_scheduler(tokens=(8,))
    request = make_request("a", 17)
    scheduler.add([request])
    assert [tokens(run_step(scheduler)[1], request) for _ in range(4)] == [[], [], [7], [7]]


def test_several_prefills_share_a_step() -> None:
    scheduler = make_scheduler(tokens=(16,))
    requests = [
        make_request(name, num, first=first) for name, num, first in (("a", 5, 100), ("b", 6, 200), ("c", 30, 300))
    ]
    scheduler.add(requests)
    plan, outputs = run_step(scheduler)
    assert plan.prefill_num_tokens.tolist() == [5, 6, 4]
    assert [tokens(outputs, request) for request in requests] == [[7], [7], []]
    plan, _ = run_step(scheduler)
    assert plan.prefill_num_tokens.tolist() == [16], "the one inside its prompt goes on with the whole budget"


def test_no_more_than_one_row_stands_inside_its_prompt() -> None:
    """What the end of one prompt leaves of the budget goes to the next one only if that fills a multiple or ends."""
    scheduler = make_scheduler(tokens=(12,), block_size=8, configure={"prefill_multiple_of": 4})
    scheduler.add([make_request("long", 25), make_request("also long", 25, first=100)])
    scheduler.add([make_request("short", 3, first=200)])
    segments = [run_step(scheduler)[0].prefill_num_tokens.tolist() for _ in range(5)]
    assert segments == [[8], [8], [9], [8, 3], [8]]


def test_what_a_segment_leaves_of_the_budget_goes_to_one_that_ends_in_it() -> None:
    scheduler = make_scheduler(tokens=(12,), block_size=8, configure={"prefill_multiple_of": 4})
    scheduler.add([make_request("long", 25), make_request("short", 3, first=200)])
    plan, _ = run_step(scheduler)
    assert (plan.prefill_rows.tolist(), plan.prefill_num_tokens.tolist()) == ([0, 1], [8, 3])


def test_segments_of_one_step_fit_their_bucket_with_the_padding_behind_each() -> None:
    """Of 32 tokens a prompt of 3 takes a tile of 16, and so does the next: a third one waits, though it has 3 too."""
    scheduler = make_scheduler(tokens=(32,), configure={"prefill_multiple_of": 16})
    scheduler.add([make_request(str(first), 3, first=first) for first in (100, 200, 300)])
    assert [run_step(scheduler)[0].prefill_num_tokens.tolist() for _ in range(2)] == [[3, 3], [3]]


def test_a_step_never_prefills_more_than_the_last_bucket_holds() -> None:
    scheduler = make_scheduler(tokens=(16,))
    scheduler.add([make_request(str(first), 7, first=first) for first in (100, 200, 300, 400)])
    assert [run_step(scheduler)[0].prefill_num_tokens.tolist() for _ in range(2)] == [[7, 7], [7, 7]]


def test_blocks_are_taken_for_tokens_and_not_for_padding() -> None:
    scheduler = make_scheduler(tokens=(64,), block_size=4)
    scheduler.add([make_request("a", 9)])
    plan, _ = run_step(scheduler)
    assert plan.block_rows.tolist() == [0, 0, 0]
    assert plan.block_ids.tolist() == [1, 2, 3]


def test_what_is_computed_advances_by_tokens_and_not_by_the_bucket() -> None:
    """Five tokens in a bucket of eight: the next step decodes at position five, in the second block of four."""
    scheduler = make_scheduler(tokens=(8,), block_size=4)
    scheduler.add([make_request("a", 5)])
    run_step(scheduler)
    assert scheduler.rows.num_granted[0] == 5
    assert plan_step(scheduler).block_ids.size == 0
    assert scheduler.rows.num_granted[0] == 6


def test_a_decode_takes_a_block_only_when_it_crosses_into_one() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add([make_request("a", 3)])
    run_step(scheduler)
    assert [len(run_step(scheduler)[0].block_ids) for _ in range(6)] == [0, 1, 0, 0, 0, 1]


def test_the_last_token_needs_no_block() -> None:
    """Four tokens of prompt and one of output: the output's KV is never asked for."""
    scheduler = make_scheduler(block_size=4)
    plans = run(scheduler, make_request("a", 3, max_tokens=2))
    assert [len(plan.block_ids) for plan in plans] == [1, 0]


def test_without_segments_a_prompt_is_computed_whole_and_nothing_is_shared() -> None:
    scheduler = make_scheduler(tokens=(16,), configure={"kv_segment_size": 0})
    plans = run(scheduler, make_request("a", 16, max_tokens=1)) + run(
        scheduler, make_request("a again", 16, max_tokens=1)
    )
    assert [plan.prefill_num_tokens.tolist() for plan in plans] == [[16], [16]]
    scheduler.add([make_request("b", 9), make_request("c", 9, first=50), make_request("d", 3, first=80)])
    assert run_step(scheduler)[0].prefill_num_tokens.tolist() == [9], "what does not fit waits, and keeps its place"
    assert run_step(scheduler)[0].prefill_num_tokens.tolist() == [9, 3]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_text_and_is_delivered() -> None:
    scheduler, request = make_scheduler(), make_request("a", 3, params={"stop_token_ids": (5,)})
    scheduler.add([request])
    _, outputs = run_step(scheduler, token_id=5)
    assert (tokens(outputs, request), outcomes(outputs)) == ([5], {"a": "stop"})


def test_a_stop_id_is_its_own_requests_alone() -> None:
    scheduler = make_scheduler()
    stops = make_request("stops", 3, params={"stop_token_ids": (0, 5)})
    goes_on = make_request("goes on", 3, first=50, params={"stop_token_ids": (6,)})
    scheduler.add([stops, goes_on])
    _, outputs = run_step(scheduler, token_id=0)
    assert outcomes(outputs) == {"stops": "stop"}
    assert tokens(outputs, goes_on) == [0]
    _, outputs = run_step(scheduler, token_id=5)
    assert outcomes(outputs) == {}, "nobody stops at 5 any more"
    assert outcomes(run_step(scheduler, token_id=6)[1]) == {"goes on": "stop"}


def test_end_of_text_ends_unless_the_request_goes_on_past_it() -> None:
    scheduler = make_scheduler()
    scheduler.add([make_request("ends", 3), make_request("goes on", 3, first=50, params={"ignore_eos": True})])
    assert outcomes(run_step(scheduler, token_id=EOS)[1]) == {"ends": "stop"}


def test_the_model_context_bounds_prompt_and_output_together() -> None:
    scheduler = make_scheduler(max_model_len=6)
    scheduler.add([make_request("a", 4, max_tokens=50)])
    assert [outcomes(run_step(scheduler)[1]) for _ in range(2)] == [{}, {"a": "length"}]
    assert scheduler.schedule() is None


def test_a_full_cache_ends_a_lone_request_with_its_own_reason() -> None:
    """Two blocks of four tokens, a prompt of six: tokens 7 and 8 fill the cache, token 9 needs no KV."""
    scheduler = make_scheduler(usable_blocks=2, block_size=4)
    scheduler.add([make_request("a", 6, max_tokens=8)])
    assert [outcomes(run_step(scheduler)[1]) for _ in range(3)] == [{}, {}, {"a": "cache_full"}]
    run(scheduler, make_request("next", 6, max_tokens=1))
    assert is_whole(scheduler)


def test_token_0_is_a_token_like_any_other() -> None:
    scheduler, request = make_scheduler(), make_request("a", 3)
    scheduler.add([request])
    _, outputs = run_step(scheduler, token_id=0)
    assert (tokens(outputs, request), outcomes(outputs)) == ([0], {})


def test_a_row_whose_output_is_not_finite_ends_alone() -> None:
    scheduler = make_scheduler()
    bad, good = make_request("bad", 3), make_request("good", 3, first=50)
    scheduler.add([bad, good])
    plan = plan_step(scheduler)
    outputs = scheduler.update(StepResult(plan.step, np.array([-1, 7], np.int32)))
    assert (tokens(outputs, bad), tokens(outputs, good)) == ([], [7])
    (end,) = outputs.finished
    assert end.request is bad
    assert isinstance(end.outcome, ModelOutputError)
    assert bad.ended
    assert bad.token_ids.tolist() == [1, 2, 3], "it got no token"
    assert not good.ended
    finish(scheduler, good)
    assert is_whole(scheduler)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once_and_the_next_is_served() -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4)
    with pytest.raises(CapacityError, match=r"a request of 17 tokens needs 5 KV blocks .* the cache has 4") as error:
        scheduler.add([make_request("too long", 17)])
    assert error.value.retry_after_seconds is None, "waiting does not help"
    scheduler.add([make_request("fits", 16)])
    assert len(run_step(scheduler)[0].admissions) == 1


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_model_len 64"):
        make_scheduler().add([make_request("a", 64)])
    make_scheduler().add([make_request("a", 63)])


def test_of_requests_that_come_together_all_are_queued_or_none() -> None:
    scheduler = make_scheduler(max_waiting=3)
    with pytest.raises(InvalidRequestError):
        scheduler.add([make_request("fits", 3), make_request("too long", 64)])
    assert len(scheduler.waiting) == scheduler.waiting.num_tokens == 0
    scheduler.add([make_request("a", 3), make_request("b", 3)])
    with pytest.raises(CapacityError, match="2 requests wait and 3 may; retry in"):
        scheduler.add([make_request("c", 3), make_request("d", 3)])
    assert names(scheduler.waiting) == ["a", "b"]


def test_one_that_was_accepted_before_is_queued_however_long_the_queue_is() -> None:
    scheduler = make_scheduler(max_waiting=1, max_waiting_tokens=4)
    held = make_request("held", 4, rank=(-1.0, 0))
    scheduler.add([make_request("new", 3)])
    scheduler.resume(held)
    assert names(scheduler.waiting) == ["held", "new"]


@pytest.mark.parametrize(("num_tokens", "error"), [(64, InvalidRequestError), (17, CapacityError)])
def test_one_that_the_new_worker_cannot_take_is_refused_when_it_resumes(
    num_tokens: int, error: type[Exception]
) -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4)
    with pytest.raises(error):
        scheduler.resume(make_request("a", num_tokens))
    assert not len(scheduler.waiting)


@pytest.mark.parametrize(("step", "num_tokens"), [(2, 1), (0, 1), (1, 2), (1, 0)])
def test_an_answer_that_is_not_the_plans_is_refused_and_changes_nothing(step: int, num_tokens: int) -> None:
    scheduler, request = make_scheduler(), make_request("a", 3)
    scheduler.add([request])
    plan = plan_step(scheduler)
    with pytest.raises(ProtocolError, match="step 1"):
        scheduler.update(StepResult(step, np.full(num_tokens, 7, np.int32)))
    assert tokens(scheduler.update(answer(scheduler, plan)), request) == [7]


@pytest.mark.parametrize("token_id", [50_000, 2**31 - 1, -2, -(2**31)])
def test_a_token_that_the_model_does_not_have_is_refused(token_id: int) -> None:
    scheduler, request = make_scheduler(), make_request("a", 3)
    scheduler.add([request])
    plan = plan_step(scheduler)
    with pytest.raises(ProtocolError, match="token id"):
        scheduler.update(answer(scheduler, plan, token_id))
    assert tokens(scheduler.update(answer(scheduler, plan, 49_999)), request) == [49_999]


def test_an_answer_without_a_plan_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ProtocolError, match="none is expected"):
        scheduler.update(StepResult(1, np.array([7], np.int32)))


def test_an_end_of_text_id_beyond_the_vocabulary_ends_nothing_and_harms_nothing() -> None:
    scheduler = make_scheduler(eos_token_ids=(EOS, VOCAB_SIZE, VOCAB_SIZE + 7))
    scheduler.add([make_request("a", 3)])
    assert outcomes(run_step(scheduler, token_id=VOCAB_SIZE - 1)[1]) == {}
    assert outcomes(run_step(scheduler, token_id=EOS)[1]) == {"a": "stop"}
