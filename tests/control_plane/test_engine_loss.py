"""What becomes of requests and of cached blocks when a worker is lost, at an engine driven by hand."""

import asyncio
from dataclasses import replace

import pytest
from engine_driver import Frontend, Worker, assert_nothing_is_left, attached, in_loop, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.suspects import MAX_LOSSES_ALONE
from blockplane.protos.config import load_config
from blockplane.protos.errors import (
    AbortedError,
    DeadlineError,
    WorkerKilledError,
)

BOOT = 1234


# -- loss --------------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_lost_group_s_requests_go_on_at_another_with_all_they_have_emitted(engine: Engine) -> None:
    one, two = Worker(engine), Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", max_tokens=4)
    frontend.submit(2, "b", max_tokens=4)
    one.step(token_id=7)
    two.step(token_id=8)
    one.lose()
    frontend.submit(3, "c", max_tokens=4)
    plan = two.plan()
    assert plan is not None
    assert [admission.token_ids.tolist() for admission in plan.admissions] == [[1, 2, 3, 7], [1, 2, 3]]
    two.answer(plan, token_id=9)
    assert tokens_of(await frontend.take()) == {1: [7, 9], 2: [8, 9], 3: [9]}
    assert engine.statistics().num_lost_workers == 1


@in_loop
async def test_tokens_of_steps_that_are_answered_late_are_computed_once(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=4)
    one.step(token_id=7)
    late = [one.plan(), one.plan()]
    assert None not in late
    two = Worker(engine)
    one.lose()
    plan = two.plan()
    assert plan is not None
    assert plan.admissions[0].token_ids.tolist() == [1, 2, 3, 7]
    two.answer(plan, token_id=8)
    while two.step(token_id=9) is not None:
        pass
    delivery = await frontend.take()
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({1: [7, 8, 9, 9]}, {1: "length"})
    assert_nothing_is_left(engine)


@in_loop
async def test_a_worker_that_comes_back_finds_its_cached_blocks_but_not_those_of_unanswered_steps(
    engine: Engine,
) -> None:
    worker, frontend = Worker(engine, boot_id=BOOT), await attached(engine)
    frontend.submit(1, "cached", length=40, max_tokens=1)
    worker.step()
    await frontend.take()
    frontend.submit(2, "unanswered", length=63, max_tokens=1)
    worker.plan()
    worker.lose()
    other = Worker(engine)
    other.step()
    other.lose()
    back = Worker(engine, boot_id=BOOT, last_epoch=worker.group.configure.epoch)
    configure = back.group.configure
    assert (configure.keeps_kv, configure.last_step) == (True, 2)
    assert configure.epoch not in (0, worker.group.configure.epoch)
    await frontend.take()
    frontend.submit(3, "again", length=63, max_tokens=1)
    plan = back.step()
    assert plan is not None
    assert plan.step == 3
    assert plan.admissions[0].num_computed_tokens == 32
    assert (await frontend.take()).endings[0].num_cached_tokens == 32


@pytest.mark.parametrize(
    "change",
    [{"boot_id": 99}, {"last_epoch": 5}, {"layers": ()}, {"last_epoch": 0}],
    ids=lambda change: next(iter(change)),
)
def test_a_worker_that_is_not_the_same_begins_anew(change: dict[str, object]) -> None:
    @in_loop
    async def scenario(engine: Engine) -> None:
        worker = Worker(engine, boot_id=BOOT)
        Frontend(engine).submit(1, "a", length=40, max_tokens=1)
        worker.step()
        worker.lose()
        hello = replace(worker.group.hello, last_epoch=worker.group.configure.epoch)
        layer = hello.layers[0]
        group = engine.attach_worker(
            replace(hello, layers=(replace(layer, head_dim=16),)) if "layers" in change else replace(hello, **change)
        )
        assert (group.configure.keeps_kv, group.configure.last_step) == (False, 0)
        assert not group.scheduler.blocks.cache._entries[0]

    scenario()


@in_loop
async def test_a_worker_that_comes_too_late_begins_anew(engine: Engine) -> None:
    engine = Engine(load_config({"reattach_seconds": "0"}, {}))
    worker = Worker(engine, boot_id=BOOT)
    worker.lose()
    await asyncio.sleep(0.01)
    assert not Worker(engine, boot_id=BOOT, last_epoch=worker.group.configure.epoch).group.configure.keeps_kv


@in_loop
async def test_a_worker_that_broke_off_before_it_was_ready_still_has_what_it_had(engine: Engine) -> None:
    worker = Worker(engine, boot_id=BOOT)
    Frontend(engine).submit(1, "a", length=40, max_tokens=1)
    worker.step()
    epochs = [worker.group.configure.epoch]
    worker.lose()
    for _ in range(2):
        again = Worker(engine, boot_id=BOOT, last_epoch=epochs[0], ready=False)
        assert again.group.configure.keeps_kv
        epochs.append(again.group.configure.epoch)
        again.lose()
    last = Worker(engine, boot_id=BOOT, last_epoch=epochs[1])
    assert last.group.configure.keeps_kv, "whether it heard of the later attaches or not"
    Frontend(engine).submit(1, "b", length=40, max_tokens=1)
    plan = last.step()
    assert plan is not None
    assert plan.admissions[0].num_computed_tokens == 32
    last.lose()
    assert not Worker(engine, boot_id=BOOT, last_epoch=epochs[0]).group.configure.keeps_kv, "it has computed since"


@in_loop
async def test_a_worker_that_attaches_anew_takes_the_place_of_its_broken_stream(engine: Engine) -> None:
    worker, frontend = Worker(engine, boot_id=BOOT), await attached(engine)
    frontend.submit(1, "a", max_tokens=2)
    worker.step()
    again = Worker(engine, boot_id=BOOT, last_epoch=worker.group.configure.epoch)
    assert worker.group.is_lost
    assert again.group.number == worker.group.number == 0
    assert engine.statistics().groups.keys() == {0}
    again.step(token_id=8)
    assert tokens_of(await frontend.take()) == {1: [7, 8]}
    worker.lose()
    assert engine.statistics().groups.keys() == {0}, "the end of the old stream changes nothing"


# -- a request that kills ----------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_that_kills_workers_is_found_and_its_batch_mates_live(engine: Engine) -> None:
    """Any worker that gets it in a plan is lost with that plan unanswered; the other group serves meanwhile."""
    frontend = await attached(engine)
    workers = [Worker(engine, boot_id=number) for number in (1, 2)]
    await frontend.take()
    killer, boots, losses, outcomes, texts = 99, 2, 0, dict[int, object](), dict[int, int]()
    for stream_id in range(6):
        frontend.submit(stream_id, str(stream_id), length=3 + stream_id, max_tokens=3)
    frontend.submit(killer, "killer", length=40, max_tokens=3)
    for _ in range(200):
        for index, worker in enumerate(workers):
            plan = worker.plan()
            if plan is None:
                continue
            if any(len(admission.token_ids) == 40 for admission in plan.admissions):
                boots, losses = boots + 1, losses + 1
                worker.lose()
                workers[index] = Worker(engine, boot_id=boots)
            else:
                worker.answer(plan)
        if not engine._requests:
            break
    delivery = await frontend.take()
    outcomes, texts = outcomes_of(delivery), {stream: len(tokens) for stream, tokens in tokens_of(delivery).items()}
    assert isinstance(outcomes.pop(killer), WorkerKilledError)
    assert outcomes == dict.fromkeys(range(6), "length")
    assert texts == dict.fromkeys(range(6), 3)
    assert losses <= 3 + MAX_LOSSES_ALONE
    assert_nothing_is_left(engine)
    assert engine.statistics().num_suspects == 0


@in_loop
async def test_only_one_cohort_runs_and_only_at_one_group_and_new_requests_go_elsewhere(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    for stream_id in range(4):
        frontend.submit(stream_id, str(stream_id), length=3 + stream_id)
    assert one.plan() is not None
    two, three = Worker(engine), Worker(engine)
    one.lose()
    statistics = engine.statistics()
    assert (statistics.num_suspects, statistics.num_held) == (4, 2)
    assert [group.num_waiting for group in statistics.groups.values()] == [2, 0]
    for stream_id in range(4, 8):
        frontend.submit(stream_id, str(stream_id), length=20)
    assert [group.num_waiting for group in engine.statistics().groups.values()] == [2, 4]
    two.step()
    statistics = engine.statistics()
    assert (statistics.num_suspects, statistics.num_held) == (2, 0)
    three.step()
    two.step()
    assert engine.statistics().num_suspects == 0


@in_loop
async def test_suspects_that_wait_for_their_turn_can_be_aborted_overdue_parked_and_left(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    for stream_id in range(4):
        frontend.submit(stream_id, str(stream_id), timeout_seconds=0.05 if stream_id == 3 else None)
    assert one.plan() is not None
    one.lose()
    two = Worker(engine)
    frontend.send(aborted_stream_ids=(2,))
    assert isinstance(outcomes_of(await frontend.take())[2], AbortedError)
    await asyncio.sleep(0.1)
    assert isinstance(outcomes_of(await frontend.take())[3], DeadlineError)
    assert engine.statistics().num_suspects == 2
    frontend.send(parked_stream_ids=(0,))
    assert (engine.statistics().num_suspects, engine.statistics().total.num_parked) == (1, 1)
    engine.detach_frontend(frontend.owner)
    assert two.step() is None
    assert engine.statistics().num_suspects == 0
    assert_nothing_is_left(engine)


@in_loop
async def test_a_parked_request_is_no_suspect_for_whom_others_would_wait(engine: Engine) -> None:
    one, frontend = Worker(engine), await attached(engine)
    for stream_id in range(2):
        frontend.submit(stream_id, str(stream_id))
    assert one.plan() is not None
    frontend.send(parked_stream_ids=(0,))
    two = Worker(engine)
    one.lose()
    assert engine.statistics().num_suspects == 1
    two.step()
    assert (engine.statistics().num_suspects, engine.statistics().total.num_parked) == (0, 1)
    frontend.send(unparked_stream_ids=(0,))
    while two.step() is not None:
        pass
    assert outcomes_of(await frontend.take()) == {0: "length", 1: "length"}


@in_loop
async def test_requests_that_a_lost_worker_did_not_compute_are_no_suspects(engine: Engine) -> None:
    engine = Engine(load_config({"max_num_seqs": "1"}, {}))
    one, two, frontend = Worker(engine), Worker(engine), await attached(engine)
    for stream_id in range(4):
        frontend.submit(stream_id, str(stream_id), max_tokens=1)
    assert one.plan() is not None
    one.lose()
    statistics = engine.statistics()
    assert (statistics.num_suspects, statistics.num_held, statistics.total.num_waiting) == (1, 0, 4)
    while two.step() is not None:
        pass
    assert outcomes_of(await frontend.take()) == dict.fromkeys(range(4), "length")
