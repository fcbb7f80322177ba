"""The engine between frontends and a worker, driven by hand: who gets what, and who is forgotten when."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockplane.control_plane.engine.engine import Engine
from blockplane.control_plane.engine.outbox import Outbox
from blockplane.protos.config import load_config
from blockplane.protos.delivery import Delivery, FrontendBatch, Submission
from blockplane.protos.errors import AbortedError, CapacityError, DuplicateError, InvalidRequestError, UnavailableError
from blockplane.protos.model import GenerationDefaults, LayerKVSpec, ModelInfo
from blockplane.protos.plan import StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams

LAYERS = [LayerKVSpec("layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32")]
BYTES_PER_BLOCK = 2 * 16 * 8 * 4


def model(name: str = "m", max_model_len: int = 64) -> ModelInfo:
    return ModelInfo(name, 100, max_model_len, (99,), None, b"", GenerationDefaults())


def attach_worker(engine: Engine, info: ModelInfo | None = None, num_blocks: int = 50) -> None:
    info = info or model()
    engine.configure_worker(info, LAYERS, num_blocks * BYTES_PER_BLOCK)
    engine.worker_ready(info)


def submit(engine: Engine, outbox: Outbox, stream_id: int, request_id: str, length: int = 3, **params: Any) -> None:
    prompt = np.arange(1, length + 1, dtype=np.int32)
    max_tokens = params.pop("max_tokens", 5)
    engine.take_batch(
        outbox, FrontendBatch((Submission(stream_id, request_id, prompt, SamplingParams(max_tokens, **params)),))
    )


def step(engine: Engine, token_id: int = 7) -> StepPlan | None:
    """One step in which every row that works samples `token_id`; prompts here are one segment each."""
    plan = engine.next_plan()
    if plan is not None:
        if plan.decode_rows is not None:
            engine.decoding = len(plan.decode_rows)  # type: ignore[attr-defined]
        num_sampled = getattr(engine, "decoding", 0) + len(plan.prefill_rows)
        engine.take_result(StepResult(plan.step, np.full(num_sampled, token_id, np.int32)))
    engine.flush()
    return plan


async def take(outbox: Outbox) -> Delivery:
    return await asyncio.wait_for(outbox.take(), 1)


def tokens_of(delivery: Delivery) -> dict[int, list[int]]:
    ends = np.cumsum(delivery.num_tokens)
    parts = np.split(delivery.token_ids, ends[:-1]) if len(ends) else []
    return {int(stream): part.tolist() for stream, part in zip(delivery.stream_ids, parts, strict=True)}


def outcomes_of(delivery: Delivery) -> dict[int, object]:
    return {ending.stream_id: ending.outcome for ending in delivery.endings}


def in_loop(test: Callable[[Engine], Any]) -> Callable[[], None]:
    """An engine lives in an event loop, whose events it sets; each test gets both anew."""

    def run() -> None:
        async def main() -> None:
            await test(Engine(load_config({}, {})))

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_a_frontend_hears_which_model_is_served_and_when_none_is(engine: Engine) -> None:
    outbox = engine.attach_frontend()
    serving = (await take(outbox)).serving
    assert serving is not None
    assert serving.model is None
    attach_worker(engine)
    serving = (await take(outbox)).serving
    assert serving is not None
    assert serving.model == model()
    engine.detach_worker()
    serving = (await take(outbox)).serving
    assert serving is not None
    assert serving.model is None


@in_loop
async def test_the_context_that_clients_hear_of_is_the_one_that_is_configured(engine: Engine) -> None:
    engine = Engine(load_config({"max_model_len": "32"}, {}))
    attach_worker(engine)
    serving = (await take(engine.attach_frontend())).serving
    assert serving is not None
    assert serving.model is not None
    assert serving.model.max_model_len == 32


@in_loop
async def test_tokens_go_to_their_own_streams_and_the_end_with_the_last(engine: Engine) -> None:
    attach_worker(engine)
    one, two = engine.attach_frontend(), engine.attach_frontend()
    await take(one), await take(two)
    submit(engine, one, 5, "a", max_tokens=2)
    submit(engine, two, 5, "b", max_tokens=1)
    step(engine)
    delivery = await take(two)
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({5: [7]}, {5: "length"})
    delivery = await take(one)
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({5: [7]}, {})
    step(engine, token_id=8)
    delivery = await take(one)
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({5: [8]}, {5: "length"})


@in_loop
async def test_a_frontend_that_reads_slowly_gets_its_tokens_in_one_piece(engine: Engine) -> None:
    attach_worker(engine)
    outbox = engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "a", max_tokens=3)
    for token_id in (7, 8, 9):
        step(engine, token_id)
    delivery = await take(outbox)
    assert (tokens_of(delivery), outcomes_of(delivery)) == ({1: [7, 8, 9]}, {1: "length"})


@in_loop
async def test_without_a_worker_and_for_a_live_id_and_beyond_the_vocabulary_a_request_is_refused(
    engine: Engine,
) -> None:
    outbox = engine.attach_frontend()
    submit(engine, outbox, 1, "a")
    assert isinstance(outcomes_of(await take(outbox))[1], UnavailableError)
    attach_worker(engine)
    submit(engine, outbox, 2, "a")
    submit(engine, outbox, 3, "a")
    submit(engine, outbox, 4, "long", length=64)
    beyond = Submission(5, "beyond", np.array([100], np.int32), SamplingParams(1))
    engine.take_batch(outbox, FrontendBatch((beyond,)))
    outcomes = outcomes_of(await take(outbox))
    assert {stream: type(outcome) for stream, outcome in outcomes.items()} == {
        3: DuplicateError,
        4: InvalidRequestError,
        5: InvalidRequestError,
    }


@in_loop
async def test_an_aborted_id_ends_its_stream_and_may_be_used_again(engine: Engine) -> None:
    attach_worker(engine)
    outbox, other = engine.attach_frontend(), engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "a")
    engine.take_batch(other, FrontendBatch(aborted_request_ids=("a", "unknown", "a")))
    assert isinstance(outcomes_of(await take(outbox))[1], AbortedError)
    submit(engine, outbox, 2, "a")
    step(engine)
    assert tokens_of(await take(outbox)) == {2: [7]}


@in_loop
async def test_a_stream_that_its_client_left_is_told_nothing_and_computed_no_more(engine: Engine) -> None:
    attach_worker(engine)
    outbox = engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "a")
    engine.take_batch(outbox, FrontendBatch(aborted_stream_ids=(1, 1, 77)))
    assert step(engine) is None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.take(), 0.05)


@in_loop
async def test_a_frontend_that_is_gone_takes_its_requests_with_it(engine: Engine) -> None:
    attach_worker(engine)
    gone, other = engine.attach_frontend(), engine.attach_frontend()
    submit(engine, gone, 1, "a")
    submit(engine, other, 1, "b")
    engine.detach_frontend(gone)
    plan = step(engine)
    assert plan is not None
    assert len(plan.admissions) == 1
    submit(engine, other, 2, "a")
    assert step(engine) is not None


@in_loop
async def test_a_lost_worker_s_requests_go_on_at_the_next_with_all_they_have_emitted(engine: Engine) -> None:
    attach_worker(engine)
    outbox = engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "a", max_tokens=3)
    step(engine, token_id=7)
    engine.next_plan()
    engine.detach_worker()
    attach_worker(engine)
    engine.decoding = 0  # type: ignore[attr-defined]
    plan = step(engine, token_id=8)
    assert plan is not None
    assert plan.step == 1
    assert plan.admissions[0].token_ids.tolist() == [1, 2, 3, 7]
    assert plan.admissions[0].num_prompt_tokens == 3
    assert tokens_of(await take(outbox)) == {1: [7, 8]}


@in_loop
async def test_a_resumed_request_keeps_the_seed_that_was_drawn_for_it(engine: Engine) -> None:
    attach_worker(engine)
    outbox = engine.attach_frontend()
    submit(engine, outbox, 1, "a")
    first = engine.next_plan()
    engine.detach_worker()
    attach_worker(engine)
    second = engine.next_plan()
    assert first is not None
    assert second is not None
    assert first.admissions[0].seed == second.admissions[0].seed


@in_loop
async def test_what_the_next_worker_cannot_hold_ends_and_the_rest_goes_on(engine: Engine) -> None:
    engine = Engine(load_config({"num_blocks": "4"}, {}))
    attach_worker(engine, model(max_model_len=256))
    outbox = engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "long", length=40)
    submit(engine, outbox, 2, "short")
    engine.detach_worker()
    await take(outbox)
    attach_worker(engine, model(max_model_len=32))
    assert isinstance(outcomes_of(await take(outbox))[1], InvalidRequestError)
    step(engine)
    assert tokens_of(await take(outbox)) == {2: [7]}


@in_loop
async def test_requests_of_another_model_do_not_go_on(engine: Engine) -> None:
    attach_worker(engine)
    outbox = engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "a")
    engine.detach_worker()
    attach_worker(engine, model("another"))
    outcome = outcomes_of(await take(outbox))[1]
    assert isinstance(outcome, UnavailableError)
    assert "another" in str(outcome)


@in_loop
async def test_a_request_may_be_aborted_while_no_worker_is_there(engine: Engine) -> None:
    attach_worker(engine)
    outbox = engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "a")
    engine.detach_worker()
    engine.take_batch(outbox, FrontendBatch(aborted_request_ids=("a",)))
    assert isinstance(outcomes_of(await take(outbox))[1], AbortedError)
    attach_worker(engine)
    assert step(engine) is None


@in_loop
async def test_a_second_worker_is_told_to_try_again(engine: Engine) -> None:
    attach_worker(engine)
    with pytest.raises(UnavailableError, match="attached already"):
        engine.configure_worker(model(), LAYERS, 1 << 20)


@in_loop
async def test_a_cache_that_can_never_hold_a_prompt_refuses_it(engine: Engine) -> None:
    engine = Engine(load_config({"num_blocks": "3"}, {}))
    attach_worker(engine)
    outbox = engine.attach_frontend()
    await take(outbox)
    submit(engine, outbox, 1, "a", length=40)
    assert isinstance(outcomes_of(await take(outbox))[1], CapacityError)
