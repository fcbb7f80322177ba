"""Requests that move to another worker with their blocks, driven by hand: when, what is held meanwhile, and what if."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_driver import Frontend, Worker, assert_nothing_is_left, attached, in_loop, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.errors import DeadlineError, ProtocolError
from blockplane.protos.logprobs import Logprobs
from blockplane.protos.plan import Admission
from blockplane.protos.structured import StructuredOutput
from blockplane.protos.transfer import Fetch

BOTH_ENDS = {"transports": ("grpc",), "transfer_addresses": ("source:1",)}


def prefill_worker(engine: Engine, **fields: object) -> Worker:
    return Worker(engine, role="prefill", **(BOTH_ENDS | fields))


def decode_worker(engine: Engine, **fields: object) -> Worker:
    return Worker(engine, role="decode", **(BOTH_ENDS | fields))


async def split(engine: Engine) -> tuple[Worker, Worker, Frontend]:
    return prefill_worker(engine), decode_worker(engine), await attached(engine)


def fetch_of(worker: Worker) -> Fetch | None:
    """What it is told to read next; None = nothing."""
    fetches = worker.group.ranks[0].fetches
    return fetches.popleft() if fetches else None


def asked(worker: Worker) -> Fetch:
    fetch = fetch_of(worker)
    assert fetch is not None
    return fetch


def tell(worker: Worker, fetch: Fetch, failure: str = "") -> None:
    worker.engine.blocks_fetched(worker.group, 0, fetch.transfer_id, failure)
    worker.engine.flush()


def admitted(worker: Worker) -> list[Admission]:
    """Plan a step and answer it; returns whom it admits."""
    plan = worker.step()
    return [] if plan is None else list(plan.admissions)


def num_held(worker: Worker) -> int:
    pool = worker.group.scheduler.blocks.pool
    return pool.num_usable - pool.num_free


def told(num_tokens: int) -> Logprobs:
    """An entry for each of so many tokens of a prompt."""
    ones = np.ones(num_tokens, np.int32)
    return Logprobs(ones, ones, ones.astype(np.float32))


def counts(engine: Engine) -> tuple[int, int, int]:
    statistics = engine.statistics()
    return statistics.num_transfers, statistics.num_failed_transfers, statistics.num_transferred_blocks


# -- the way -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_moves_with_its_whole_blocks_once_its_first_token_is_answered(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40, max_tokens=3)
    plan = prefill.plan()
    assert plan is not None
    assert prefill.plan() is None, "nobody decodes what may move"
    prefill.answer(plan, token_id=7)
    fetch = asked(decode)
    assert (fetch.transport, fetch.addresses) == ("grpc", ("source:1",))
    assert fetch.source_epoch == prefill.group.configure.epoch
    assert fetch.source_block_ids.tolist() == plan.block_ids.tolist()[:2], "of 40 tokens 32 fill blocks"
    assert (num_held(prefill), num_held(decode), engine.statistics().num_held) == (2, 2, 1)
    assert tokens_of(await frontend.take()) == {1: [7]}, "nobody waits for a token that is there"
    assert decode.plan() is None
    tell(decode, fetch)
    (admission,) = admitted(decode)
    assert (admission.token_ids.tolist(), admission.num_computed_tokens) == ([*range(1, 41), 7], 32)
    assert decode.step() is not None
    assert outcomes_of(await frontend.take()) == {1: "length"}
    assert counts(engine) == (1, 0, 2)
    assert_nothing_is_left(engine)


@in_loop
async def test_the_blocks_that_arrive_are_those_that_the_request_begins_with(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    fetch = asked(decode)
    tell(decode, fetch)
    plan = decode.plan()
    assert plan is not None
    assert plan.block_ids.tolist()[:2] == fetch.block_ids.tolist()


@in_loop
async def test_a_prompt_shorter_than_a_block_moves_at_once(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=15)
    prefill.step()
    assert fetch_of(decode) is None
    assert [admission.num_computed_tokens for admission in admitted(decode)] == [0]
    assert counts(engine) == (1, 0, 0)


@in_loop
async def test_new_requests_go_to_workers_that_take_prompts_as_long_as_one_serves(engine: Engine) -> None:
    decode, prefill, frontend = decode_worker(engine), prefill_worker(engine), await attached(engine)
    for stream_id in range(3):
        frontend.submit(stream_id, str(stream_id), length=20, cache_salt=str(stream_id))
    assert decode.plan() is None
    assert len(admitted(prefill)) == 3
    prefill.lose()
    frontend.submit(4, "4", length=4)
    admissions = [admission.num_prompt_tokens for _ in range(3) for admission in admitted(decode)]
    assert sorted(admissions) == [4, 20, 20, 20]


@in_loop
async def test_a_worker_for_both_takes_prompts_and_what_others_computed(engine: Engine) -> None:
    both, prefill = Worker(engine, **BOTH_ENDS), prefill_worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", length=40, cache_salt="a")
    frontend.submit(2, "b", length=40, cache_salt="b")
    assert [len(admitted(worker)) for worker in (prefill, both)] == [1, 1]
    tell(both, asked(both))
    assert [admission.num_computed_tokens for admission in admitted(both)] == [32]
    assert both.group.scheduler.rows.num_running == 2


@in_loop
async def test_a_request_stays_where_no_worker_takes_decodes_and_one_that_comes_gets_only_later_ones(
    engine: Engine,
) -> None:
    prefill, frontend = prefill_worker(engine), await attached(engine)
    frontend.submit(1, "a", length=40, max_tokens=9)
    prefill.step()
    assert prefill.step() is not None, "it decodes"
    decode = decode_worker(engine)
    assert prefill.step() is not None
    frontend.submit(2, "b", length=33, max_tokens=9)
    prefill.step()
    assert len(asked(decode).block_ids) == 2
    assert prefill.group.scheduler.rows.num_running == 1


@in_loop
async def test_a_row_that_stands_decodes_where_it_is_once_nobody_takes_it_any_more(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    plan = prefill.plan()
    decode.lose()
    assert plan is not None
    prefill.answer(plan)
    assert prefill.plan() is not None


@in_loop
async def test_a_fetch_waits_until_no_unanswered_plan_can_touch_its_blocks(engine: Engine) -> None:
    decode, frontend = decode_worker(engine), await attached(engine)
    frontend.submit(1, "a", length=20, max_tokens=9)
    decode.step()
    prefill = prefill_worker(engine)
    plans = decode.plan(), decode.plan()
    frontend.submit(2, "b", length=40)
    prefill.step()
    for plan in plans:
        assert fetch_of(decode) is None
        assert plan is not None
        decode.answer(plan)
    assert fetch_of(decode) is not None


@in_loop
async def test_what_the_target_has_cached_is_not_read_again(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=20, max_tokens=2)
    prefill.step()
    tell(decode, asked(decode))
    decode.step()
    frontend.submit(2, "b", length=40)
    prefill.step()
    assert len(asked(decode).block_ids) == 1


@in_loop
async def test_who_needs_blocks_that_another_brings_waits_for_them(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40, num_samples=3)
    prefill.step()
    prefill.step()
    fetch = asked(decode)
    assert fetch_of(decode) is None
    assert prefill.group.scheduler.rows.num_running == 2
    tell(decode, fetch)
    assert fetch_of(decode) is None
    assert [admission.num_computed_tokens for admission in admitted(decode)] == [32, 32, 32]
    assert counts(engine) == (3, 0, 2)


@in_loop
async def test_it_goes_where_most_of_its_prompt_is_and_else_where_the_least_is_to_do(engine: Engine) -> None:
    prefill, one, two = prefill_worker(engine), decode_worker(engine), decode_worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", length=40, max_tokens=2)
    prefill.step()
    first, second = (one, two) if one.group.ranks[0].fetches else (two, one)
    tell(first, asked(first))
    first.step()
    frontend.submit(2, "b", length=41, max_tokens=9)
    prefill.step()
    assert (first.group.scheduler.num_unfinished, second.group.scheduler.num_unfinished) == (1, 0)
    frontend.submit(3, "c", length=40, cache_salt="other")
    prefill.step()
    assert fetch_of(first) is None
    assert len(asked(second).block_ids) == 2


# -- who stays ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_that_shares_no_blocks_stays(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40, skip_prefix_cache=True)
    prefill.step()
    assert fetch_of(decode) is None
    assert prefill.step() is not None


@in_loop
async def test_a_request_that_is_told_of_its_prompt_stays(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    plan = prefill.plan()
    assert plan is not None
    (request,) = engine._requests["a"]
    request.params = replace(request.params, prompt_logprobs=0)
    result = prefill.result(plan)
    engine.take_result(prefill.group, replace(result, prompt_logprobs=told(39)))
    assert fetch_of(decode) is None
    assert prefill.plan() is not None


@in_loop
async def test_structured_output_stays_where_the_other_worker_does_not_know_it(engine: Engine) -> None:
    prefill = prefill_worker(engine, enforces_structure=True)
    decode, frontend = decode_worker(engine), await attached(engine)
    frontend.submit(1, "a", length=40, structured=StructuredOutput("json_object"))
    prefill.step()
    assert fetch_of(decode) is None
    assert prefill.step() is not None


@in_loop
async def test_nothing_moves_to_a_worker_that_cannot_read_it(engine: Engine) -> None:
    prefill, frontend = prefill_worker(engine), await attached(engine)
    decode_worker(engine, transports=())
    frontend.submit(1, "a", length=40)
    prefill.step()
    assert prefill.step() is not None


@in_loop
async def test_nothing_moves_to_a_worker_of_other_weights(engine: Engine) -> None:
    weights = {"model_fingerprint": b"old", "reloads_weights": True}
    prefill, decode = prefill_worker(engine, **weights), decode_worker(engine, **weights)
    frontend = await attached(engine)
    for worker, moves in ((prefill, False), (decode, True)):
        worker.group.begin_reload("")
        engine.reloads.answered(worker.group, b"new", "")
        frontend.submit(1 + moves, str(moves), length=40, max_tokens=2)
        prefill.step()
        assert (fetch_of(decode) is not None) == moves
        prefill.step()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@in_loop
async def test_what_cannot_be_read_is_computed_anew(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    tell(decode, asked(decode), "the link broke.")
    assert num_held(prefill) == num_held(decode) == 0
    assert [admission.num_computed_tokens for admission in admitted(decode)] == [0]
    assert counts(engine) == (0, 1, 0)


@in_loop
async def test_what_takes_too_long_is_computed_anew_and_its_late_answer_is_nothing(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    engine._placement.transfers._limit = 0.01
    frontend.submit(1, "a", length=40)
    prefill.step()
    fetch = asked(decode)
    await asyncio.sleep(0.1)
    assert (num_held(prefill), num_held(decode)) == (0, 2), "the worker may still write"
    plan = decode.plan()
    assert plan is not None
    assert not set(plan.block_ids.tolist()) & set(fetch.block_ids.tolist())
    tell(decode, fetch)
    assert num_held(decode) == 3, "those of the row"
    assert counts(engine) == (0, 1, 0)


@in_loop
async def test_a_worker_that_never_says_how_its_reading_went_is_lost(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    engine._placement.transfers._limit = 0.01
    frontend.submit(1, "a", length=40)
    prefill.step()
    assert not decode.group.ranks[0].is_ended
    await asyncio.sleep(0.2)
    assert "did not say how it went" in str(decode.group.ranks[0].error)


@in_loop
async def test_an_abort_frees_the_source_at_once_and_the_target_once_its_worker_has_answered(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    fetch = asked(decode)
    frontend.send(aborted_stream_ids=(1,))
    assert (num_held(prefill), num_held(decode)) == (0, 2)
    tell(decode, fetch)
    assert_nothing_is_left(engine)
    frontend.submit(2, "b", length=40)
    prefill.step()
    assert len(asked(decode).block_ids) == 2, "what nobody waited for was not published"
    assert counts(engine) == (0, 0, 0)


@in_loop
async def test_an_abort_before_the_fetch_is_sent_takes_it_back(engine: Engine) -> None:
    decode, frontend = decode_worker(engine), await attached(engine)
    frontend.submit(1, "a", length=20, max_tokens=9)
    decode.step()
    prefill, plan = prefill_worker(engine), decode.plan()
    frontend.submit(2, "b", length=40)
    prefill.step()
    frontend.send(aborted_stream_ids=(2,))
    assert plan is not None
    decode.answer(plan)
    assert fetch_of(decode) is None
    assert (num_held(prefill), num_held(decode)) == (0, 2)


@in_loop
async def test_a_deadline_ends_a_request_that_moves(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40, timeout_seconds=0.05)
    prefill.step()
    fetch = asked(decode)
    await frontend.take()
    assert isinstance(outcomes_of(await frontend.take())[1], DeadlineError)
    tell(decode, fetch)
    assert_nothing_is_left(engine)


@in_loop
async def test_a_client_that_does_not_read_is_parked_where_its_request_arrives(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    frontend.send(parked_stream_ids=(1,))
    tell(decode, asked(decode))
    assert decode.plan() is None
    frontend.send(unparked_stream_ids=(1,))
    assert [admission.num_computed_tokens for admission in admitted(decode)] == [32]


@in_loop
async def test_a_source_that_is_lost_has_the_request_computed_anew_at_the_target(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    fetch = asked(decode)
    prefill.lose()
    assert num_held(prefill) == 0, "it may come back with its blocks, and all of them are free then"
    assert [admission.num_computed_tokens for admission in admitted(decode)] == [0]
    tell(decode, fetch)
    assert num_held(decode) == 3
    assert counts(engine) == (0, 1, 0)


@in_loop
async def test_a_source_that_is_lost_before_the_fetch_is_sent_takes_it_back(engine: Engine) -> None:
    decode, frontend = decode_worker(engine), await attached(engine)
    frontend.submit(1, "a", length=20, max_tokens=9)
    decode.step()
    prefill, plan = prefill_worker(engine), decode.plan()
    frontend.submit(2, "b", length=40, cache_salt="b")
    prefill.step()
    prefill.lose()
    assert num_held(decode) == 2, "those of the row"
    assert plan is not None
    decode.answer(plan)
    assert fetch_of(decode) is None


@in_loop
async def test_a_target_that_is_lost_has_the_request_go_on_where_its_prompt_is_cached(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    decode.lose()
    assert (num_held(prefill), num_held(decode)) == (0, 0)
    assert [admission.num_computed_tokens for admission in admitted(prefill)] == [32]
    assert prefill.step() is not None, "it decodes there, where nobody takes it"


@in_loop
async def test_a_source_is_drained_once_nobody_reads_its_blocks(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    draining = asyncio.create_task(engine.drains.drain(0))
    engine.worker_leaves(prefill.group)
    await asyncio.sleep(0.1)
    assert not draining.done()
    assert not engine.may_go(prefill.group)
    tell(decode, asked(decode))
    await asyncio.wait_for(draining, 5)
    assert engine.may_go(prefill.group)
    assert [admission.num_computed_tokens for admission in admitted(decode)] == [32]


@in_loop
async def test_a_target_that_is_drained_meanwhile_does_not_get_the_request(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    other = decode_worker(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    target, next_one = (decode, other) if decode.group.ranks[0].fetches else (other, decode)
    draining = asyncio.create_task(engine.drains.drain(target.group.number))
    await asyncio.sleep(0)
    tell(target, asked(target))
    await asyncio.wait_for(draining, 5)
    prefill.step()
    tell(next_one, asked(next_one))
    assert [admission.num_computed_tokens for admission in admitted(next_one)] == [32]


@in_loop
async def test_blocks_that_were_read_before_a_reset_are_not_found_after_it(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    engine.reset_prefix_cache()
    tell(decode, asked(decode))
    assert [admission.num_computed_tokens for admission in admitted(decode)] == [0]


@in_loop
async def test_an_answer_to_no_fetch_breaks_the_protocol(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    frontend.submit(1, "a", length=40)
    prefill.step()
    fetch = asked(decode)
    for worker, rank, transfer_id in ((prefill, 0, fetch.transfer_id), (decode, 1, fetch.transfer_id), (decode, 0, 5)):
        with pytest.raises(ProtocolError, match="nobody asked"):
            engine.blocks_fetched(worker.group, rank, transfer_id, "")
    tell(decode, fetch)
    with pytest.raises(ProtocolError, match="nobody asked"):
        tell(decode, fetch)


# -- no room -----------------------------------------------------------------------------------------------------------


async def crowded(engine: Engine, limit: float) -> tuple[Worker, Worker, Frontend]:
    """A target whose 6 blocks are full of a request that has a few steps to go; another stands at the source."""
    engine._placement.transfers._limit = limit
    decode, frontend = decode_worker(engine, num_blocks=7), await attached(engine)
    frontend.submit(1, "a", length=62, max_tokens=4)
    decode.step()
    prefill = prefill_worker(engine)
    frontend.submit(2, "b", length=40, cache_salt="b")
    prefill.step()
    assert fetch_of(decode) is None
    assert prefill.plan() is None
    return prefill, decode, frontend


@in_loop
async def test_who_finds_no_room_stands_until_the_target_has_some(engine: Engine) -> None:
    prefill, decode, _ = await crowded(engine, 30)
    decode.step()
    fetch = asked(decode)
    tell(decode, fetch)
    assert [admission.num_prompt_tokens for admission in admitted(decode)] == [40]
    assert num_held(prefill) == 0


@in_loop
async def test_who_finds_no_room_in_half_the_time_stays(engine: Engine) -> None:
    prefill, decode, frontend = await crowded(engine, 0.2)
    frontend.submit(3, "c", length=20, cache_salt="c")
    prefill.step()
    await asyncio.sleep(0.18)
    assert prefill.step() is not None
    assert prefill.num_decodes == 2, "who waits behind another waits no longer than that one"
    decode.step()
    assert fetch_of(decode) is None
    assert counts(engine) == (0, 0, 0)


# -- what is told ------------------------------------------------------------------------------------------------------


@in_loop
async def test_prometheus_hears_of_transfers(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    for stream_id, failure in ((1, ""), (2, "the link broke.")):
        frontend.submit(stream_id, str(stream_id), length=40 + 10 * stream_id, cache_salt=str(stream_id))
        prefill.step()
        moving = {sample.name: sample.value for family in engine.metrics() for sample in family.samples}
        assert moving["blockplane:num_requests_moving"] == moving["blockplane:num_requests_held"] == 1
        tell(decode, asked(decode), failure)
    told = {sample.name: sample.value for family in engine.metrics() for sample in family.samples}
    assert told["blockplane:transfers_total"] == told["blockplane:failed_transfers_total"] == 1
    assert told["blockplane:transferred_blocks_total"] == 3
    assert (told["blockplane:transfer_seconds_count"], told["blockplane:num_requests_moving"]) == (1, 0)


@in_loop
async def test_watchers_hear_of_blocks_that_have_come(engine: Engine) -> None:
    prefill, decode, frontend = await split(engine)
    watcher = engine.watch()
    frontend.submit(1, "a", length=40)
    prefill.step()
    tell(decode, asked(decode))
    decode.step()
    told = [await watcher.take() for _ in range(4)]
    stored = {batch.group: event for batch in told for event in batch.events if hasattr(event, "token_bytes")}
    assert stored[0] == stored[1]
    assert len(stored[1].block_hashes) == 2


def test_a_journal_has_what_was_said_before_the_move_and_another_engine_goes_on_from_there(tmp_path: Path) -> None:
    config = load_config({"journal": str(tmp_path / "journal")}, {})

    async def begin() -> None:
        engine = Engine(config)
        prefill, decode, frontend = await split(engine)
        frontend.submit(1, "a", length=40, max_tokens=3)
        prefill.step(token_id=7)
        assert tokens_of(await frontend.take()) == {1: [7]}
        assert fetch_of(decode) is not None
        engine.close()

    async def go_on() -> None:
        engine = Engine(config)
        prefill, decode, _ = await split(engine)
        (admission,) = admitted(prefill)
        assert admission.token_ids.tolist() == [*range(1, 41), 7]
        tell(decode, asked(decode))
        assert [admission.num_computed_tokens for admission in admitted(decode)] == [32]
        engine.close()

    asyncio.run(begin())
    asyncio.run(go_on())
