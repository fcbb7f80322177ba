"""Several samples of one prompt, at an engine driven by hand: what they share, what they do not, how they end."""

from engine_driver import Frontend, Worker, assert_nothing_is_left, attached, in_loop, outcomes_of, tokens_of

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config
from blockplane.protos.errors import CapacityError, InvalidRequestError
from blockplane.protos.sampling import MAX_SAMPLES


@in_loop
async def test_samples_share_the_prompt_s_blocks_and_nothing_of_their_noise(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(10, "a", length=40, num_samples=3, seed=5)
    first, second = worker.step(), worker.step()
    assert first is not None
    assert second is not None
    assert [admission.num_computed_tokens for admission in first.admissions] == [0]
    assert [admission.num_computed_tokens for admission in second.admissions] == [32, 32]
    seeds = [admission.seed for admission in first.admissions + second.admissions]
    assert seeds[0] == 5, "the first sample is the request that asks for one"
    assert len(set(seeds)) == 3
    assert tokens_of(await frontend.take()) == {10: [7, 7], 11: [7], 12: [7]}


@in_loop
async def test_the_same_seed_draws_the_same_samples(engine: Engine) -> None:
    seeds = []
    for _ in range(2):
        engine = Engine(load_config({}, {}))
        worker = Worker(engine)
        Frontend(engine).submit(1, "a", num_samples=4, seed=2**64 - 1)
        plan = worker.step()
        assert plan is not None
        seeds.append([admission.seed for admission in plan.admissions])
    assert seeds[0] == seeds[1]


@in_loop
async def test_of_aborted_samples_none_emits_another_token_and_nothing_is_left(engine: Engine) -> None:
    """Case 4."""
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", length=40, num_samples=4, max_tokens=20)
    for _ in range(4):
        worker.step()
    assert {len(tokens) for tokens in tokens_of(await frontend.take()).values()} == {3, 4}
    plan = worker.plan()
    assert plan is not None
    frontend.send(aborted_request_ids=("a",))
    worker.answer(plan)
    delivery = await frontend.take()
    assert tokens_of(delivery) == {}
    assert outcomes_of(delivery).keys() == {1, 2, 3, 4}
    assert worker.step() is None
    assert_nothing_is_left(engine)


@in_loop
async def test_one_sample_that_is_left_alone_leaves_the_others(engine: Engine) -> None:
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", num_samples=3, max_tokens=2)
    frontend.send(aborted_stream_ids=(2,))
    while worker.step() is not None:
        pass
    assert tokens_of(await frontend.take()) == {1: [7, 7], 3: [7, 7]}


@in_loop
async def test_samples_are_accepted_all_or_none(engine: Engine) -> None:
    engine = Engine(load_config({"max_waiting_requests": "3"}, {}))
    worker = Worker(engine)
    frontend = await attached(engine)
    frontend.submit(1, "a", num_samples=4)
    frontend.submit(100, "b", num_samples=MAX_SAMPLES + 1)
    outcomes = outcomes_of(await frontend.take())
    assert {type(outcomes[stream_id]) for stream_id in range(1, 5)} == {CapacityError}
    assert {type(outcomes[100 + index]) for index in range(MAX_SAMPLES + 1)} == {InvalidRequestError}
    assert worker.step() is None
    frontend.submit(1, "a", num_samples=3)
    assert worker.step() is not None
