"""Several workers at one engine, driven by hand: who serves what, whose answers count, and what is told of all."""

import asyncio
from dataclasses import replace

import pytest
from engine_driver import Frontend, Worker, assert_nothing_is_left, attached, in_loop, model, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.errors import (
    AbortedError,
    CapacityError,
    ConfigurationError,
    DeadlineError,
    ProtocolError,
    QueueFullError,
    UnsupportedError,
)
from blockplane.protos.structured import StructuredOutput

STRUCTURED = StructuredOutput("json_object")

# -- which group -------------------------------------------------------------------------------------------------------


@in_loop
async def test_requests_that_share_nothing_go_where_the_least_is_left_to_compute(engine: Engine) -> None:
    """Five tokens of output are reckoned with too."""
    one, two = Worker(engine), Worker(engine)
    frontend = await attached(engine)
    for stream_id, length in enumerate((20, 5, 5, 5, 30)):
        frontend.submit(stream_id, str(stream_id), length=length, cache_salt=str(stream_id))
    plans = one.step(), two.step()
    lengths = [[len(admission.token_ids) for admission in plan.admissions] for plan in plans if plan is not None]
    assert lengths == [[20, 30], [5, 5, 5]]
    assert sorted(tokens_of(await frontend.take())) == [0, 1, 2, 3, 4]


@in_loop
async def test_a_prompt_s_samples_stay_together_to_share_its_blocks(engine: Engine) -> None:
    one, two = Worker(engine), Worker(engine)
    Frontend(engine).submit(1, "a", num_samples=4)
    assert (one.plan() is None) != (two.plan() is None)


@in_loop
async def test_a_full_queue_sends_requests_to_the_other_group_and_two_full_ones_refuse(engine: Engine) -> None:
    engine = Engine(load_config({"max_waiting_requests": "1"}, {}))
    workers = Worker(engine), Worker(engine)
    frontend = await attached(engine)
    for stream_id in range(3):
        frontend.submit(stream_id, str(stream_id), length=30 if stream_id == 0 else 3)
    assert {stream_id: type(outcome) for stream_id, outcome in outcomes_of(await frontend.take()).items()} == {
        2: QueueFullError
    }
    assert all(worker.step() is not None for worker in workers)


@in_loop
async def test_that_none_may_wait_is_said_only_where_it_is_so_at_every_group(engine: Engine) -> None:
    """The first group has one request, whose tokens leave no room for a long prompt, and is asked last or first; the
    second has as many requests as it may.
    """
    for *lengths, long in ((45, 3, 3, 30), (30, 20, 20, 25)):
        engine = Engine(load_config({"max_waiting_requests": "2", "max_waiting_tokens": "50"}, {}))
        workers = Worker(engine), Worker(engine)
        frontend = await attached(engine)
        for stream_id, length in enumerate((*lengths, long, 3)):
            frontend.submit(stream_id, str(stream_id), length=length, cache_salt=str(stream_id))
        assert {stream_id: type(outcome) for stream_id, outcome in outcomes_of(await frontend.take()).items()} == {
            3: CapacityError
        }
        assert [len(worker.group.scheduler.waiting) for worker in workers] == [2, 2], "a short one found room"


@in_loop
async def test_structured_output_goes_where_it_is_known_and_is_refused_where_it_is_not(engine: Engine) -> None:
    """As while workers are upgraded one after the other."""
    older = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", structured=STRUCTURED)
    outcome = outcomes_of(await frontend.take())[1]
    assert isinstance(outcome, UnsupportedError)
    assert "structured output" in str(outcome)
    newer = Worker(engine, enforces_structure=True)
    frontend.submit(2, "b", length=30, structured=STRUCTURED)
    frontend.submit(3, "c", length=3, structured=STRUCTURED)
    frontend.submit(4, "d", length=3)
    plans = older.plan(), newer.plan()
    admitted = [[len(admission.token_ids) for admission in plan.admissions] for plan in plans if plan is not None]
    assert admitted == [[3], [30, 3]]
    assert plans[1] is not None
    assert [admission.params.structured for admission in plans[1].admissions] == [STRUCTURED] * 2


@in_loop
async def test_structured_output_goes_on_where_it_is_known_and_ends_where_nobody_is_left(engine: Engine) -> None:
    one, other = Worker(engine, enforces_structure=True), Worker(engine, enforces_structure=True)
    older, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", structured=STRUCTURED)
    frontend.submit(2, "b", length=30, structured=STRUCTURED)
    frontend.submit(3, "c", structured=STRUCTURED)
    assert one.plan() is not None
    one.lose()
    assert older.plan() is None, "it had the fewest tokens"
    other.lose()
    outcomes = outcomes_of(await frontend.take())
    assert {stream_id: type(outcome) for stream_id, outcome in outcomes.items()} == dict.fromkeys(
        (1, 2, 3), UnsupportedError
    )


@pytest.mark.parametrize("other", ["another name", "another fingerprint"])
def test_a_worker_of_another_model_is_refused_and_both_are_named(other: str) -> None:
    @in_loop
    async def scenario(engine: Engine) -> None:
        Worker(engine, model_fingerprint=b"\1\2")
        info = model("other" if other == "another name" else "m")
        with pytest.raises(
            ConfigurationError, match=rf"has {info.name}, .*0304 and those that are attached have m, .*0102"
        ):
            Worker(engine, info, model_fingerprint=b"\3\4")
        Worker(engine, model_fingerprint=b"\1\2")
        Worker(engine)
        assert engine.statistics().groups.keys() == {0, 1, 2}, "who names no fingerprint is taken at its word"

    scenario()


@in_loop
async def test_ids_deadlines_and_aborts_hold_at_every_group(engine: Engine) -> None:
    workers = Worker(engine), Worker(engine)
    frontend = await attached(engine)
    for stream_id in range(4):
        frontend.submit(stream_id, str(stream_id), max_tokens=20, timeout_seconds=0.05 if stream_id > 1 else None)
    for worker in workers:
        worker.step()
    frontend.send(aborted_request_ids=("0", "1"))
    assert {type(outcome) for outcome in outcomes_of(await frontend.take()).values()} == {AbortedError}
    await asyncio.sleep(0.1)
    outcomes = outcomes_of(await frontend.take())
    assert {stream_id: type(outcome) for stream_id, outcome in outcomes.items()} == dict.fromkeys((2, 3), DeadlineError)
    assert [worker.step() for worker in workers] == [None, None]
    assert_nothing_is_left(engine)


@in_loop
async def test_a_group_that_comes_takes_its_share_of_those_that_wait(engine: Engine) -> None:
    engine = Engine(load_config({"max_num_seqs": "1"}, {}))
    one, frontend = Worker(engine), await attached(engine)
    for stream_id in range(7):
        frontend.submit(stream_id, str(stream_id), max_tokens=1)
    one.step()
    two = Worker(engine)
    assert [group.num_waiting for group in engine.statistics().groups.values()] == [3, 3]
    while one.step() is not None or two.step() is not None:
        pass
    assert outcomes_of(await frontend.take()) == dict.fromkeys(range(7), "length")
    assert_nothing_is_left(engine)


# -- results -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_results_of_another_attach_or_of_an_answered_step_are_dropped_and_counted(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=3)
    plan = worker.plan()
    assert plan is not None
    result = worker.result(plan)
    engine.take_result(worker.group, replace(result, epoch=result.epoch ^ 1))
    for _ in range(3):
        engine.take_result(worker.group, result)
    engine.flush()
    assert tokens_of(await frontend.take()) == {1: [7]}
    assert engine.statistics().num_dropped_results == 3


@in_loop
async def test_a_gap_is_a_broken_protocol(engine: Engine) -> None:
    worker = Worker(engine)
    Frontend(engine).submit(1, "a")
    plan = worker.plan()
    assert plan is not None
    with pytest.raises(ProtocolError, match="result of step 2 while that of step 1"):
        engine.take_result(worker.group, replace(worker.result(plan), step=2))


@in_loop
async def test_an_older_worker_names_no_epoch_and_is_served(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    old = engine.attach_worker(replace(worker.group.hello, protocol_version=3, boot_id=0))
    worker.lose()
    engine.worker_ready(old)
    worker.group = old
    frontend.submit(1, "a", max_tokens=1)
    plan = worker.plan()
    assert plan is not None
    engine.take_result(old, replace(worker.result(plan), epoch=0))
    engine.flush()
    assert outcomes_of(await frontend.take()) == {1: "length"}


@in_loop
async def test_tokens_behind_an_end_are_counted(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", stop_token_ids=(7,))
    plans = [worker.plan(), worker.plan()]
    for plan in plans:
        assert plan is not None
        worker.answer(plan, token_id=7)
    assert tokens_of(await frontend.take()) == {1: [7]}
    assert engine.statistics().total.num_discarded_tokens == 1


# -- statistics --------------------------------------------------------------------------------------------------------


@in_loop
async def test_statistics_add_up_and_what_a_lost_group_counted_is_not_forgotten(engine: Engine) -> None:
    one, two, frontend = Worker(engine, num_blocks=11), Worker(engine, num_blocks=31), await attached(engine)
    for stream_id in range(4):
        frontend.submit(stream_id, str(stream_id), length=10)
    one.step()
    two.step()
    statistics = engine.statistics()
    assert [group.num_running for group in statistics.groups.values()] == [2, 2]
    assert statistics.total.num_running == statistics.total.num_admitted == 4
    used = [group.kv_cache_usage * blocks for group, blocks in zip(statistics.groups.values(), (10, 30), strict=True)]
    assert statistics.total.kv_cache_usage == pytest.approx(sum(used) / 40)
    assert statistics.total.num_common_prefix_blocks == ()
    one.lose()
    two.step()
    two.lose()
    statistics = engine.statistics()
    assert (statistics.groups, statistics.total.num_admitted, statistics.num_held) == ({}, 4, 4)
    assert (statistics.total.kv_cache_usage, statistics.num_lost_workers) == (0.0, 2)
