"""The engine between frontends and a worker, driven by hand: who is accepted, who gets what, what outlives a worker."""

import numpy as np
from engine_driver import Frontend, Worker, attached, in_loop, model, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import CapacityError, DuplicateError, InvalidRequestError, UnavailableError
from blockplane.protos.sampling import SamplingParams

# -- what is served ----------------------------------------------------------------------------------------------------


@in_loop
async def test_a_frontend_hears_which_model_is_served_and_when_none_is(engine: Engine) -> None:
    frontend = Frontend(engine)
    serving = (await frontend.take()).serving
    assert serving is not None
    assert serving.model is None
    worker = Worker(engine)
    serving = (await frontend.take()).serving
    assert serving is not None
    assert serving.model == model()
    worker.lose()
    serving = (await frontend.take()).serving
    assert serving is not None
    assert serving.model is None


@in_loop
async def test_the_context_that_clients_hear_of_is_the_one_that_is_configured(engine: Engine) -> None:
    engine = Engine(load_config({"max_model_len": "32"}, {}))
    Worker(engine)
    serving = (await Frontend(engine).take()).serving
    assert serving is not None
    assert serving.model is not None
    assert serving.model.max_model_len == 32


# -- tokens ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_tokens_go_to_their_own_streams_and_the_end_with_the_last(engine: Engine) -> None:
    worker = Worker(engine)
    one, two = await attached(engine), await attached(engine)
    one.submit(5, "a", max_tokens=2)
    two.submit(5, "b", max_tokens=1)
    worker.step()
    delivery = await two.take()
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({5: [7]}, {5: "length"})
    delivery = await one.take()
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({5: [7]}, {})
    worker.step(token_id=8)
    delivery = await one.take()
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({5: [8]}, {5: "length"})


@in_loop
async def test_a_frontend_that_reads_slowly_gets_its_tokens_in_one_piece(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", max_tokens=3)
    for token_id in (7, 8, 9):
        worker.step(token_id)
    delivery = await frontend.take()
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({1: [7, 8, 9]}, {1: "length"})


@in_loop
async def test_an_end_tells_how_much_of_the_prompt_was_cached_unless_salt_or_wish_forbid(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    cached = []
    for settings in ({}, {}, {"cache_salt": "s"}, {"cache_salt": "s"}, {"skip_prefix_cache": True}):
        frontend.submit(1, "a", length=20, max_tokens=1, **settings)
        worker.step()
        cached.append((await frontend.take()).endings[0].num_cached_tokens)
    assert cached == [0, 16, 0, 16, 0]


# -- what is accepted --------------------------------------------------------------------------------------------------


@in_loop
async def test_without_a_worker_a_request_is_to_be_sent_again(engine: Engine) -> None:
    frontend = await attached(engine)
    frontend.submit(1, "a")
    assert isinstance(outcomes_of(await frontend.take())[1], UnavailableError)


@in_loop
async def test_what_no_worker_could_compute_is_refused_and_the_rest_of_the_batch_goes_on(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    prompts = {1: [1], 2: [100], 3: [-1], 4: [], 5: [1] * 64}
    submissions = [
        Submission(stream_id, str(stream_id), np.array(prompt, np.int32), SamplingParams(1))
        for stream_id, prompt in prompts.items()
    ]
    stops = [SamplingParams(1, stop_token_ids=(5, stop_id)) for stop_id in (100, -1, 2**31 - 1)]
    others = [SamplingParams(1, top_p=0.0), SamplingParams(1, logit_bias=((100, 1.0),)), SamplingParams(1, logprobs=21)]
    for stream_id, params in enumerate((*stops, *others), start=6):
        submissions.append(Submission(stream_id, str(stream_id), np.array([1], np.int32), params))
    frontend.send(submissions=tuple(submissions))
    outcomes = outcomes_of(await frontend.take())
    assert {stream_id: type(outcome) for stream_id, outcome in outcomes.items()} == dict.fromkeys(
        range(2, 12), InvalidRequestError
    )
    worker.step()
    assert tokens_of(await frontend.take()) == {1: [7]}


@in_loop
async def test_a_live_id_is_taken_until_its_request_ends(engine: Engine) -> None:
    worker = Worker(engine)
    frontend, other = await attached(engine), await attached(engine)
    frontend.submit(1, "a", max_tokens=1)
    other.submit(1, "a")
    assert isinstance(outcomes_of(await other.take())[1], DuplicateError)
    worker.step()
    other.submit(2, "a")
    worker.step()
    assert tokens_of(await other.take()) == {2: [7]}


@in_loop
async def test_a_cache_that_can_never_hold_a_prompt_refuses_it_for_good(engine: Engine) -> None:
    engine = Engine(load_config({"num_blocks": "3"}, {}))
    Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", length=40)
    outcome = outcomes_of(await frontend.take())[1]
    assert isinstance(outcome, CapacityError)
    assert outcome.retry_after_seconds is None


@in_loop
async def test_a_full_queue_says_when_to_come_again(engine: Engine) -> None:
    engine = Engine(load_config({"max_waiting_requests": "2"}, {}))
    worker = Worker(engine)
    frontend = await attached(engine)
    for stream_id in range(3):
        frontend.submit(stream_id, str(stream_id))
    outcome = outcomes_of(await frontend.take())[2]
    assert isinstance(outcome, CapacityError)
    assert outcome.retry_after_seconds is not None
    worker.step()
    frontend.submit(2, "2")
    worker.step()
    assert tokens_of(await frontend.take()) == {0: [7, 7], 1: [7, 7], 2: [7]}


@in_loop
async def test_less_priority_is_served_first_and_waiting_makes_up_for_it(engine: Engine) -> None:
    now = [0.0]
    engine = Engine(load_config({"max_num_seqs": "1", "priority_seconds": "10"}, {}), clock=lambda: now[0])
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "patient", priority=1, max_tokens=1)
    now[0] = 9.0
    frontend.submit(2, "urgent", priority=0, max_tokens=1)
    now[0] = 11.0
    frontend.submit(3, "late", priority=0, max_tokens=1)
    served = []
    while worker.step() is not None:
        served += outcomes_of(await frontend.take())
    assert served == [2, 1, 3]


# -- what outlives a worker --------------------------------------------------------------------------------------------


@in_loop
async def test_a_lost_worker_s_requests_go_on_at_the_next_with_all_they_have_emitted(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", max_tokens=3)
    worker.step(token_id=7)
    worker.plan()
    worker.lose()
    plan = Worker(engine).step(token_id=8)
    assert plan is not None
    assert plan.step == 1
    assert plan.admissions[0].token_ids.tolist() == [1, 2, 3, 7]
    assert plan.admissions[0].num_prompt_tokens == 3
    assert tokens_of(await frontend.take()) == {1: [7, 8]}


@in_loop
async def test_a_resumed_request_keeps_the_seed_that_was_drawn_for_it(engine: Engine) -> None:
    worker = Worker(engine)
    Frontend(engine).submit(1, "a")
    first = worker.plan()
    worker.lose()
    second = Worker(engine).plan()
    assert first is not None
    assert second is not None
    assert first.admissions[0].seed == second.admissions[0].seed


@in_loop
async def test_what_the_next_worker_cannot_hold_ends_and_the_rest_goes_on(engine: Engine) -> None:
    engine = Engine(load_config({"num_blocks": "5"}, {}))
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "long", length=40)
    frontend.submit(2, "short")
    worker.lose()
    await frontend.take()
    worker = Worker(engine, model(max_model_len=32))
    assert isinstance(outcomes_of(await frontend.take())[1], InvalidRequestError)
    worker.step()
    assert tokens_of(await frontend.take()) == {2: [7]}


@in_loop
async def test_requests_of_another_model_do_not_go_on(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a")
    worker.lose()
    worker = Worker(engine, model("another"))
    outcome = outcomes_of(await frontend.take())[1]
    assert isinstance(outcome, UnavailableError)
    assert "another" in str(outcome)
    assert worker.step() is None
