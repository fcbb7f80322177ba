"""What the engine tells Prometheus, after work by hand whose counts are known."""

from __future__ import annotations

import asyncio

from engine_driver import Clock, Frontend, Worker, attached, in_loop, model

from blockplane.control_plane.engine.engine import Engine
from blockplane.protos.config import load_config

GROUP_0 = {"engine": "0", "model_name": "m"}


def value(of: Engine, name: str, **labels: str) -> float:
    """Of the one sample of that name and these labels."""
    samples = (sample for family in of.metrics() for sample in family.samples)
    (found,) = [sample.value for sample in samples if sample.name == f"blockplane:{name}" and sample.labels == labels]
    return found


def of_group(of: Engine, *names: str, **labels: str) -> list[float]:
    return [value(of, name, **(GROUP_0 | labels)) for name in names]


def counters(engine: Engine) -> dict[tuple[str, ...], float]:
    """All that may never go down."""
    families = [family for family in engine.metrics() if family.type in ("counter", "histogram")]
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def work(frontend: Frontend, worker: Worker, request_id: str, num_tokens: int = 3) -> None:
    """One request to its end: a prompt of 20 tokens, which fill one block, and so many behind it."""
    frontend.submit(len(request_id), request_id, length=20, max_tokens=num_tokens)
    while worker.step() is not None:
        pass


@in_loop
async def test_tokens_and_cached_tokens_are_counted_exactly(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    work(frontend, worker, "a")
    work(frontend, worker, "bb", num_tokens=5)
    assert of_group(engine, "prompt_tokens_total", "generation_tokens_total") == [40, 8]
    assert of_group(engine, "prefix_cache_queries_total", "prefix_cache_hits_total") == [40, 16]
    assert of_group(engine, "step_seconds_count", "computed_tokens_total") == [8, 20 + 2 + 4 + 4]
    assert of_group(engine, "request_queue_time_seconds_count", "num_requests_running") == [2, 0]
    assert value(engine, "num_workers", condition="ready") == 1
    assert value(engine, "num_frontends") == 1


def test_the_time_in_the_queue_is_from_a_requests_coming_to_its_first_row_whatever_its_priority() -> None:
    async def main() -> None:
        clock = Clock()
        engine = Engine(load_config({}, {}), clock)
        worker, frontend = Worker(engine), await attached(engine)
        for stream_id, priority in enumerate((-1, 0, 2)):
            frontend.submit(stream_id, f"of priority {priority}", length=20, priority=priority)
        clock.now = 7.0
        while worker.step() is not None:
            pass
        assert of_group(engine, "request_queue_time_seconds_sum", "request_queue_time_seconds_count") == [21, 3]
        assert of_group(engine, "request_queue_time_seconds_bucket", le="5.0") == [0]
        assert of_group(engine, "request_queue_time_seconds_bucket", le="10.0") == [3]

    asyncio.run(main())


@in_loop
async def test_no_count_goes_down_when_a_worker_is_lost_and_another_has_its_number(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    work(frontend, worker, "a")
    before = counters(engine)
    worker.lose()
    after_loss = counters(engine)
    assert {name: after_loss[name] - before[name] for name in before if after_loss[name] != before[name]} == {
        ("blockplane:lost_workers_total",): 1
    }
    assert value(engine, "num_workers", condition="ready") == 0
    other = Worker(engine)
    assert other.group.number == 0
    assert counters(engine) == after_loss
    work(frontend, other, "bb")
    other.lose()
    Worker(engine)
    assert of_group(engine, "prompt_tokens_total", "generation_tokens_total") == [40, 6]


@in_loop
async def test_a_request_that_goes_on_elsewhere_waited_in_one_queue_and_its_tokens_count_where_it_got_them(
    engine: Engine,
) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    for stream_id in range(2):
        frontend.submit(stream_id, str(stream_id), length=20, max_tokens=6, cache_salt=str(stream_id))
    for _ in range(3):
        worker.step()
    assert of_group(engine, "generation_tokens_total", "num_requests_running") == [6, 2]
    worker.lose()
    other = Worker(engine)
    while other.step() is not None:
        pass
    assert of_group(engine, "generation_tokens_total", "request_queue_time_seconds_count") == [12, 2]


@in_loop
async def test_a_worker_that_may_come_back_keeps_its_counts_while_it_is_away(engine: Engine) -> None:
    worker, frontend = Worker(engine, boot_id=5), await attached(engine)
    work(frontend, worker, "a")
    before = of_group(engine, "generation_tokens_total", "prompt_tokens_total")
    worker.lose()
    assert of_group(engine, "generation_tokens_total", "prompt_tokens_total") == before
    other = Worker(engine, boot_id=5, last_epoch=worker.group.configure.epoch)
    work(frontend, other, "bb")
    number = {"engine": str(other.group.number)}
    assert of_group(engine, "generation_tokens_total", "prompt_tokens_total", **number) == [6, 40]


@in_loop
async def test_another_model_at_the_same_number_has_counts_of_its_own(engine: Engine) -> None:
    worker, frontend = Worker(engine), await attached(engine)
    work(frontend, worker, "a")
    worker.lose()
    work(frontend, Worker(engine, model("other")), "bb", num_tokens=5)
    assert of_group(engine, "generation_tokens_total") == [3]
    assert of_group(engine, "generation_tokens_total", model_name="other") == [5]
