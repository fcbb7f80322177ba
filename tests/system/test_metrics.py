"""What Prometheus reads of real processes: exact after known work, never less after a loss, all that a board shows."""

import re
from collections.abc import Iterator

import pytest
from observed_system import RULES, ObservedSystem, board_queries, names_in, observed_system
from processes import wait_for

from blockplane.protos.errors import InvalidRequestError

PROMPT = list(range(1, 40))
SHOWN_ELSEWHERE = {
    "blockplane:bucket_builds_total",
    "blockplane:cache_config_info",
    "blockplane:engine_attached",
    "blockplane:worker_attached",
    "blockplane:worker_busy_seconds_total",
    "blockplane:worker_steps_total",
    "process_max_fds",
    "process_open_fds",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}
"""What is told and neither the board nor a rule asks for."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedSystem]:
    folder = tmp_path_factory.mktemp("journal")
    buckets = ("--num-batched-tokens-buckets", "64,128", "--num-seqs-buckets", "1,4")
    with observed_system(folder, *buckets, "--kv-cache-bytes", "50000000") as system:
        yield system


@pytest.fixture(scope="module")
def after_work(observed: ObservedSystem) -> dict[str, float]:
    """What is told after one prompt twice, of 39 tokens, with 10 and with 5 tokens behind it, and a refusal."""
    with observed.system.client() as client:
        for num_tokens in (10, 5):
            list(client.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True))
        with pytest.raises(InvalidRequestError):
            list(client.generate(PROMPT, max_tokens=0))
    # The frontend's last words are before the worker's answers to steps that ran ahead.
    wait_for(
        lambda: (
            observed.scrape("worker")["worker_steps_total{}"]
            == observed.scrape("engine")["step_seconds_count{engine=0}"]
        ),
        "every step is answered",
    )
    return observed.scrape_all()


def test_tokens_requests_and_their_ends_are_counted_exactly(after_work: dict[str, float]) -> None:
    expected = {
        "prompt_tokens_total{engine=0}": 78,
        "generation_tokens_total{engine=0}": 15,
        "prefix_cache_queries_total{engine=0}": 78,
        "prefix_cache_hits_total{engine=0}": 32,
        "request_queue_time_seconds_count{engine=0}": 2,
        "num_requests_running{engine=0}": 0,
        "num_workers{condition=ready}": 1,
        "journal_failed{}": 0,
        "request_success_total{finished_reason=length}": 2,
        "request_success_total{finished_reason=stop}": 0,
        "request_errors_total{status=INVALID_ARGUMENT}": 1,
        "request_prompt_tokens_sum{}": 78,
        "request_generation_tokens_sum{}": 15,
        "request_generation_tokens_bucket{le=5.0}": 1,
        "request_generation_tokens_bucket{le=10.0}": 2,
        "time_to_first_token_seconds_count{}": 2,
        "e2e_request_latency_seconds_count{}": 2,
        "num_open_calls{}": 0,
        "serving{}": 1,
    }
    assert {name: after_work[name] for name in expected} == expected
    assert after_work["journal_commits_total{}"] > 2
    # Messages that come close together become one.
    assert 0 < after_work["inter_token_latency_seconds_count{}"] <= 13


def test_the_engine_and_its_worker_agree_on_what_was_computed_and_what_was_padding(
    after_work: dict[str, float],
) -> None:
    padding = sum(value for name, value in after_work.items() if name.startswith("bucket_padding_tokens_total"))
    computed, in_buckets = (after_work[f"{name}_total{{engine=0}}"] for name in ("computed_tokens", "bucket_tokens"))
    assert computed == 39 + 9 + (39 - 32) + 4 + after_work["discarded_tokens_total{engine=0}"]
    assert padding == in_buckets - computed
    assert after_work["bucket_executions_total{bucket=64,phase=prefill}"] == 2
    assert after_work["bucket_builds_total{bucket=4,phase=decode}"] == 1


def test_the_board_and_the_rules_name_only_what_is_told_and_nothing_else_is_told_but_what_is_listed(
    after_work: dict[str, float],
) -> None:
    asked = names_in(RULES.read_text() + "".join(expr for exprs in board_queries().values() for expr in exprs))
    bare = {name.partition("{")[0] for name in after_work}
    told = {name if name.startswith("process_") else f"blockplane:{name}" for name in bare}
    assert asked - told == set()
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    not_asked = {name for name in told if re.sub(r"_(bucket|sum|count)$", "", name) not in families}
    assert not_asked == SHOWN_ELSEWHERE


@pytest.mark.slow
def test_no_count_goes_down_when_the_worker_dies_and_another_serves_on(
    observed: ObservedSystem, after_work: dict[str, float]
) -> None:
    def counts() -> dict[str, float]:
        told = observed.scrape("engine") | observed.scrape("frontend")
        return {name: value for name, value in told.items() if re.search(r"_(total|bucket|count|sum)\{", name)}

    before = counts()
    (worker,) = observed.system.processes("worker")
    worker.kill()
    worker.wait()
    wait_for(lambda: observed.scrape("engine")["num_workers{condition=ready}"] == 0, "the worker is lost")
    assert counts()["lost_workers_total{}"] == before["lost_workers_total{}"] + 1
    observed.start("worker")
    observed.system.wait_until_serving()
    with observed.system.client() as client:
        list(client.generate(PROMPT, max_tokens=3, ignore_eos=True))
    after = counts()
    assert {name: (before[name], after[name]) for name in before if after[name] < before[name]} == {}
    assert sum(value for name, value in after.items() if name.startswith("generation_tokens_total")) == 18
