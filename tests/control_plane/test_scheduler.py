"""The scheduler against small cases worked out by hand; the random walk is in test_scheduler_walk."""

import numpy as np
import pytest

from blockplane.control_plane.engine.request import Request
from blockplane.control_plane.engine.scheduler import Progress, Scheduler
from blockplane.protos.errors import CapacityError, InvalidRequestError, ModelOutputError, ProtocolError
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams

EOS = 99


def make_scheduler(
    *,
    usable_blocks: int = 100,
    block_size: int = 4,
    max_model_len: int = 64,
    tokens: tuple[int, ...] = (16,),
    seqs: tuple[int, ...] = (8,),
    max_waiting: int = 100,
) -> Scheduler:
    configure = Configure(block_size, usable_blocks + 1, max_model_len, tokens, seqs)
    return Scheduler(configure, eos_token_ids=(EOS,), max_waiting_requests=max_waiting)


def make_request(name: str, num_prompt_tokens: int, max_tokens: int = 8, first: int = 1, **params: object) -> Request:
    """A prompt that counts up from `first`: another first, another prefix."""
    token_ids = list(range(first, first + num_prompt_tokens))
    return Request(name, token_ids, num_prompt_tokens, SamplingParams(max_tokens, **params), seed=0)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, token_id: int = 7) -> tuple[StepPlan, list[Progress]]:
    """One step whose every sampled row gets `token_id`."""
    plan = scheduler.schedule()
    assert plan is not None
    return plan, scheduler.update(answer(scheduler, plan, token_id))


def answer(scheduler: Scheduler, plan: StepPlan, token_id: int = 7) -> StepResult:
    num_sampled = sum(work.samples for work in scheduler._in_flight or [])
    return StepResult(plan.step, np.full(num_sampled, token_id, np.int32))


def test_nothing_to_do_is_no_plan() -> None:
    assert make_scheduler().schedule() is None


def test_a_prompt_is_prefilled_and_then_decodes_until_max_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=3))
    first, progress = run_step(scheduler)
    assert [admission.token_ids.tolist() for admission in first.admissions] == [[1, 2, 3, 4, 5]]
    assert first.prefill_num_tokens.tolist() == [5]
    assert first.decode_rows is None, "no row decodes, as before"
    assert [(p.token_id, p.outcome) for p in progress] == [(7, None)]
    second, _ = run_step(scheduler)
    assert second.decode_rows is not None
    assert second.decode_rows.tolist() == first.prefill_rows.tolist()
    _, progress = run_step(scheduler)
    assert [(p.token_id, p.outcome) for p in progress] == [(7, "length")]
    assert scheduler.schedule() is None
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_usable


def test_an_unchanged_decode_set_is_not_sent_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2))
    run_step(scheduler)
    assert run_step(scheduler)[0].decode_rows is not None
    steady, _ = run_step(scheduler)
    assert steady.decode_rows is None
    assert steady.admissions == ()
    assert steady.prefill_rows.size == 0


def test_a_long_prompt_never_hides_the_decodes() -> None:
    scheduler = make_scheduler(tokens=(8,))
    scheduler.add(make_request("decoding", 3, max_tokens=20))
    run_step(scheduler)
    scheduler.add(make_request("long", 40))
    for _ in range(5):
        plan, progress = run_step(scheduler)
        assert plan.prefill_num_tokens.tolist() == [8]
        assert "decoding" in {p.request.request_id for p in progress}


def test_only_the_last_segment_of_a_prompt_may_end_inside_a_block() -> None:
    scheduler = make_scheduler(tokens=(10,), block_size=4)
    scheduler.add(make_request("a", 21))
    assert [run_step(scheduler)[0].prefill_num_tokens.tolist() for _ in range(3)] == [[8], [8], [5]]


def test_several_prefills_share_a_step() -> None:
    scheduler = make_scheduler(tokens=(16,))
    for name, num_tokens, first in (("a", 5, 100), ("b", 6, 200), ("c", 30, 300)):
        scheduler.add(make_request(name, num_tokens, first=first))
    plan, progress = run_step(scheduler)
    assert plan.prefill_num_tokens.tolist() == [5, 6, 4]
    assert [p.request.request_id for p in progress] == ["a", "b"]


def test_blocks_are_taken_for_tokens_and_not_for_padding() -> None:
    scheduler = make_scheduler(tokens=(64,), block_size=4)
    scheduler.add(make_request("a", 9))
    plan, _ = run_step(scheduler)
    assert len(plan.block_ids) == 3
    assert 0 not in plan.block_ids


def test_a_decode_takes_a_block_only_when_it_crosses_into_one() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("a", 3))
    run_step(scheduler)
    assert [len(run_step(scheduler)[0].block_ids) for _ in range(6)] == [0, 1, 0, 0, 0, 1]


def test_a_stop_id_ends_the_text_and_is_delivered() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, stop_token_ids=(5,)))
    assert [(p.token_id, p.outcome) for p in run_step(scheduler, token_id=5)[1]] == [(5, "stop")]


def test_end_of_text_ends_unless_the_request_goes_on_past_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("ends", 3))
    scheduler.add(make_request("goes on", 3, ignore_eos=True))
    outcomes = {p.request.request_id: p.outcome for p in run_step(scheduler, token_id=EOS)[1]}
    assert outcomes == {"ends": "stop", "goes on": None}


def test_the_model_context_bounds_prompt_and_output_together() -> None:
    scheduler = make_scheduler(max_model_len=6)
    scheduler.add(make_request("a", 4, max_tokens=50))
    assert [run_step(scheduler)[1][0].outcome for _ in range(2)] == [None, "length"]


def test_a_full_cache_ends_a_lone_request_with_its_own_reason() -> None:
    """Two blocks of four tokens, a prompt of six: tokens 7 and 8 fill the cache, token 9 needs no KV."""
    scheduler = make_scheduler(usable_blocks=2, block_size=4)
    scheduler.add(make_request("a", 6, max_tokens=8))
    assert [run_step(scheduler)[1][0].outcome for _ in range(3)] == [None, None, "cache_full"]


def test_what_can_never_fit_is_refused_at_once_and_the_next_is_served() -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4)
    with pytest.raises(CapacityError, match=r"needs 5 KV blocks .* the cache has 4"):
        scheduler.add(make_request("too long", 17))
    scheduler.add(make_request("fits", 16))
    assert len(run_step(scheduler)[0].admissions) == 1


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_model_len 64"):
        make_scheduler().add(make_request("a", 64))


def test_a_full_queue_refuses_and_says_retry() -> None:
    scheduler = make_scheduler(max_waiting=2)
    for name in "ab":
        scheduler.add(make_request(name, 3))
    with pytest.raises(CapacityError, match="retry"):
        scheduler.add(make_request("c", 3))


def test_a_request_waits_in_order_while_blocks_are_short_and_runs_later() -> None:
    """Two decodes hold three of four blocks and the head prompt needs three: decodes go on, all three finish."""
    scheduler = make_scheduler(usable_blocks=4, block_size=4, tokens=(32,))
    scheduler.add(make_request("a", 7, max_tokens=2))
    scheduler.add(make_request("b", 3, max_tokens=2))
    run_step(scheduler)
    scheduler.add(make_request("head", 11, max_tokens=1))
    plan, progress = run_step(scheduler)
    assert plan.admissions == ()
    assert [p.outcome for p in progress] == ["length", "length"]
    plan, progress = run_step(scheduler)
    assert [p.request.request_id for p in progress] == ["head"]


def test_rows_run_out_before_blocks_and_the_next_waits_for_a_row() -> None:
    scheduler = make_scheduler(seqs=(1, 2), tokens=(32,))
    for name in "abc":
        scheduler.add(make_request(name, 3, max_tokens=2))
    assert len(run_step(scheduler)[0].admissions) == 2
    assert run_step(scheduler)[0].admissions == ()
    plan, _ = run_step(scheduler)
    assert [admission.row for admission in plan.admissions] == plan.prefill_rows.tolist()
    assert sorted(plan.released_rows.tolist()) == [0, 1]


def test_the_newest_row_gives_way_and_resumes_with_all_it_has_emitted() -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4, tokens=(32,))
    scheduler.add(make_request("old", 8, max_tokens=8))
    scheduler.add(make_request("new", 3, max_tokens=8))
    run_step(scheduler)
    tokens_before: list[int] = []
    admissions = []
    for _ in range(12):
        plan, progress = run_step(scheduler)
        admissions += plan.admissions
        tokens_before += [1 for p in progress if p.request.request_id == "new"]
        if admissions:
            break
    assert len(admissions) == 1, "the new row lost its blocks and came back"
    resumed = admissions[0]
    assert resumed.num_prompt_tokens == 3
    assert resumed.num_computed_tokens == 0
    assert resumed.token_ids.tolist()[:3] == [1, 2, 3]
    assert resumed.token_ids.tolist()[3:] == [7] * (len(resumed.token_ids) - 3)
    assert len(resumed.token_ids) > 4, "it had emitted more than its first token"
    assert plan.prefill_num_tokens.tolist() == [len(resumed.token_ids)], "the re-prefill covers prompt and output"


def test_a_step_that_takes_a_row_away_admits_nobody() -> None:
    scheduler = make_scheduler(usable_blocks=4, block_size=4, tokens=(32,))
    scheduler.add(make_request("old", 8, max_tokens=8))
    scheduler.add(make_request("new", 3, max_tokens=8))
    run_step(scheduler)
    for _ in range(8):
        plan, _ = run_step(scheduler)
        if scheduler.waiting:
            break
    assert [request.request_id for request in scheduler.waiting] == ["new"]
    assert plan.admissions == ()


def test_an_aborted_request_gives_everything_back_and_its_late_token_goes_nowhere() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 3)
    scheduler.add(request)
    run_step(scheduler)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.end(request)
    assert scheduler.update(answer(scheduler, plan)) == []
    assert request.num_output_tokens == 1
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_usable


def test_a_row_taken_over_in_flight_does_not_get_the_token_of_the_one_before() -> None:
    scheduler = make_scheduler(seqs=(1,))
    old, new = make_request("old", 3), make_request("new", 3)
    scheduler.add(old)
    scheduler.add(new)
    run_step(scheduler)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.end(old)
    scheduler.update(answer(scheduler, plan, token_id=50))
    plan, _ = run_step(scheduler, token_id=60)
    assert plan.admissions[0].row == plan.released_rows[0]
    assert new.token_ids[3:] == [60]


def test_a_waiting_request_can_be_aborted() -> None:
    scheduler = make_scheduler(seqs=(1,))
    first, second = make_request("first", 3), make_request("second", 3)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    scheduler.end(second)
    assert not scheduler.waiting
    assert run_step(scheduler)[0].admissions == ()


def test_a_row_whose_output_is_not_finite_ends_alone() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, 3))
    plan = scheduler.schedule()
    assert plan is not None
    failed, fine = scheduler.update(StepResult(plan.step, np.array([-1, 7], np.int32)))
    assert failed.token_id is None
    assert isinstance(failed.outcome, ModelOutputError)
    assert (fine.token_id, fine.outcome) == (7, None)
    assert [request.request_id for request in scheduler.running] == ["b"]


def test_a_prefill_that_finds_no_block_lets_no_newer_request_pass() -> None:
    """Three decodes grow into the last blocks of a long prompt; a small request must not take what is left."""
    scheduler = make_scheduler(usable_blocks=198, block_size=4, tokens=(128,), max_model_len=1024)
    for first in (1000, 2000, 3000):
        scheduler.add(make_request(str(first), 3, max_tokens=20, first=first))
    run_step(scheduler)
    long, small = make_request("long", 768, max_tokens=1), make_request("small", 2, max_tokens=1, first=5000)
    scheduler.add(long)
    scheduler.add(small)
    segments = []
    while not small.ended:
        plan, _ = run_step(scheduler)
        segments.append(plan.prefill_num_tokens.tolist())
        assert small.row is None or long.ended
    waits = segments.index([])
    assert segments[:waits] == [[128]] * 5, "the sixth segment finds no blocks"
    assert segments[-2:] == [[128], [2]]


def test_token_0_is_a_token_like_any_other() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    assert [(p.token_id, p.outcome) for p in run_step(scheduler, token_id=0)[1]] == [(0, None)]


@pytest.mark.parametrize(("step", "num_tokens"), [(2, 1), (1, 2), (1, 0)])
def test_an_answer_that_is_not_the_plan_s_is_refused(step: int, num_tokens: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    scheduler.schedule()
    with pytest.raises(ProtocolError):
        scheduler.update(StepResult(step, np.full(num_tokens, 7, np.int32)))


def test_the_group_s_loss_leaves_its_requests_with_all_they_have_emitted() -> None:
    scheduler = make_scheduler(seqs=(2,))
    for name in "abc":
        scheduler.add(make_request(name, 3))
    run_step(scheduler)
    left = scheduler.unfinished()
    assert [request.request_id for request in left] == ["a", "b", "c"]
    assert [request.num_output_tokens for request in left] == [1, 1, 0]
    assert all(request.row is None and request.num_computed_tokens == 0 for request in left)
    successor = make_scheduler()
    for request in left:
        successor.resume(request)
    plan, _ = run_step(successor)
    assert plan.prefill_num_tokens.tolist() == [4, 4, 3]
