"""`blockplane bench`: workloads to requests and moments, what came to numbers, and those to tables, JSON and plots."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from fake_inference import FakeServer
from hypothesis import given
from hypothesis import strategies as st

from blockplane.client import cli
from blockplane.client.async_client import AsyncClient
from blockplane.client.bench import table
from blockplane.client.load import Arrival, Load, Outcome, Progress
from blockplane.client.measures import inter_token_seconds, summarize, tokens_per_second
from blockplane.client.values import Usage
from blockplane.client.workload import WorkItem, arriving, read_workload, repeated
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.structured import StructuredOutput
from blockplane.v1 import inference_pb2 as pb

ROOT = Path(__file__).parents[2]
LAST = pb.GenerateResponse(
    token_ids=[6, 7],
    finish_reason=pb.FINISH_REASON_LENGTH,
    usage=pb.Usage(num_prompt_tokens=9, num_output_tokens=3, num_cached_tokens=4),
)


def workload(folder: Path, *lines: object) -> str:
    path = folder / "load.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


# -- workloads ---------------------------------------------------------------------------------------------------------


def test_lines_are_requests_with_the_arguments_of_the_client(tmp_path: Path):
    path = workload(
        tmp_path,
        {"id": "a", "prompt": "hi", "max_tokens": 4, "logit_bias": {"5": -1.5}, "at_seconds": 2},
        "",
        {"prompt_token_ids": [2, 3], "json_schema": {"type": "null"}, "arrive_after_tokens": 32},
    )
    assert read_workload(path) == [
        WorkItem("a", {"prompt": "hi", "max_tokens": 4, "logit_bias": {5: -1.5}}, at_seconds=2.0),
        WorkItem(
            f"{path}:3",
            {"prompt": [2, 3], "structured": StructuredOutput("json_schema", '{"type": "null"}')},
            arrive_after_tokens=32,
        ),
    ]


@pytest.mark.parametrize("name", ["W1", "W1S", "W2", "W3", "W4"])
def test_the_projects_own_workloads_can_be_read(name: str):
    items = read_workload(str(ROOT / f"benchmarks/workloads/{name}.jsonl"))
    assert all(item.arguments["ignore_eos"] and item.name.startswith(name.lower()) for item in items)
    assert any(item.arrive_after_tokens for item in items) == (name == "W4")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "load.jsonl:1 is not JSON"),
        ("[]", "give it a prompt or prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "and not both"),
        ({"prompt": "a", "temprature": 1}, "has temprature, which no request has"),
        ({"prompt": "a", "structured": "x"}, "has structured"),
        ({"prompt": "a", "max_tokens": "many"}, "load.jsonl:1 is no request"),
        ({"prompt": "a", "max_tokens": -1}, "load.jsonl:1 is no request: the request cannot be sent"),
        ({"prompt": "a", "at_seconds": "soon"}, "load.jsonl:1 is no request"),
        ("", "holds no request"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: object, sentence: str):
    with pytest.raises(ConfigurationError, match=sentence):
        read_workload(workload(tmp_path, line))


def test_a_workload_is_repeated_or_cut_to_the_number_of_requests():
    items = [WorkItem(name, {}) for name in "abc"]
    assert "".join(item.name for item in repeated(items, 7)) == "abcabca"
    assert "".join(item.name for item in repeated(items, 2)) == "ab"
    assert repeated(items, None) == items


def test_moments_are_those_of_the_lines_in_their_order_unless_there_is_a_rate():
    items = [WorkItem("late", {}, at_seconds=2.0), WorkItem("first", {}), WorkItem("soon", {}, at_seconds=1.0)]
    assert [item.name for item in arriving(items, None, 0)] == ["first", "soon", "late"]
    assert [item.name for item in arriving(items, 5.0, 0)] == ["late", "first", "soon"]


@given(st.integers(0, 2**32), st.floats(0.1, 1000))
def test_random_moments_ascend_and_are_the_same_for_the_same_seed(seed: int, rate: float):
    items = [WorkItem("x", {})] * 50
    moments = [item.at_seconds for item in arriving(items, rate, seed)]
    assert moments == sorted(moments)
    assert moments[0] == 0.0
    assert moments == [item.at_seconds for item in arriving(items, rate, seed)]


def test_random_moments_have_the_gaps_of_a_poisson_process():
    moments = [item.at_seconds for item in arriving([WorkItem("x", {})] * 20_001, 4.0, 1)]
    gaps = np.diff(moments)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


# -- measures ----------------------------------------------------------------------------------------------------------


def outcome(due: float, *arrivals: tuple[float, int], ended: float, failure: tuple[str, str] | None = None) -> Outcome:
    told = tuple(Arrival(seconds, 0, num_tokens) for seconds, num_tokens in arrivals)
    usage = None if failure else Usage(10, sum(num for _, num in arrivals), 5)
    return Outcome("x", due, due + 0.5, ended, told, usage, failure)


def test_latencies_count_from_when_a_request_was_due():
    summary = summarize([outcome(1.0, (3.0, 1), (4.0, 2), ended=5.0), outcome(2.0, (3.0, 1), ended=3.0)])
    assert (summary.seconds, summary.num_succeeded, summary.num_output_tokens) == (5.0, 2, 4)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (20, 10)
    assert summary.time_to_first_token is not None
    assert summary.end_to_end is not None
    assert summary.lateness is not None
    assert (summary.time_to_first_token.mean, summary.time_to_first_token.largest) == (1.5, 2.0)
    assert summary.end_to_end.percentiles == pytest.approx((2.5, 3.7, 3.97))
    assert summary.lateness.mean == 0.5
    assert (summary.requests_per_second, summary.output_tokens_per_second) == (0.4, 0.8)


def test_tokens_that_came_together_share_the_wait_and_samples_are_apart():
    arrivals = (Arrival(1.0, 0, 1), Arrival(1.5, 1, 3), Arrival(2.0, 0, 2), Arrival(3.5, 1, 1))
    told = Outcome("x", 0.0, 0.0, 4.0, arrivals, None, None)
    assert inter_token_seconds([told]) == [0.5, 0.5, 2.0]


def test_failures_are_counted_by_status_and_are_in_no_latency():
    full = ("RESOURCE_EXHAUSTED", "it is full.")
    summary = summarize(
        [
            outcome(0.0, (9.0, 1), ended=9.0, failure=full),
            outcome(0.0, ended=1.0, failure=("RESOURCE_EXHAUSTED", "it is still full.")),
            outcome(0.0, ended=1.0, failure=("UNAVAILABLE", "gone.")),
        ]
    )
    assert summary.failures == {"RESOURCE_EXHAUSTED": 2, "UNAVAILABLE": 1}
    assert summary.sentences == {"RESOURCE_EXHAUSTED": "it is full.", "UNAVAILABLE": "gone."}
    assert (summary.time_to_first_token, summary.end_to_end, summary.num_succeeded) == (None, None, 0)


def test_throughput_is_counted_in_bins():
    starts, rates = tokens_per_second([outcome(0.0, (0.1, 2), (0.4, 1), (1.6, 5), ended=2.0)], 0.5)
    assert starts.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert rates.tolist() == [6.0, 0.0, 0.0, 10.0]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), min_size=1, max_size=30))
def test_bins_lose_no_token(arrivals: list[tuple[float, int]]):
    _, rates = tokens_per_second([outcome(0.0, *arrivals, ended=100.0)], 0.25)
    assert sum(rates) * 0.25 == pytest.approx(sum(num for _, num in arrivals))


def test_a_table_of_nothing_has_dashes():
    lines = table("title", summarize([]))
    assert lines[0] == "title"
    assert lines[3].split() == ["time", "to", "first", "token", *["-"] * 5]


# -- runs --------------------------------------------------------------------------------------------------------------


def run(server: FakeServer, items: Sequence[WorkItem], concurrency: int | None = None) -> list[Outcome]:
    async def measured() -> list[Outcome]:
        async with AsyncClient(server.address) as client:
            return await Load(client, concurrency).run(items)

    return asyncio.run(measured())


@pytest.fixture
def slow_server(fake_server: FakeServer) -> FakeServer:
    """A server that takes 0.2 s for each answer."""
    stream = fake_server.inference._stream

    def slow_stream(context):
        time.sleep(0.2)
        yield from stream(context)

    fake_server.inference._stream = slow_stream  # type: ignore[method-assign]
    fake_server.inference.responses = (pb.GenerateResponse(token_ids=[5]), LAST)
    return fake_server


def test_what_came_of_each_request_is_told_in_the_order_of_the_workload(slow_server: FakeServer):
    items = [WorkItem(name, {"prompt": name}, at_seconds=at) for name, at in (("a", 0.0), ("b", 0.1))]
    first, second = run(slow_server, items)
    assert [request.text for request in slow_server.inference.requests] == ["a", "b"]
    assert (first.name, second.name, second.due) == ("a", "b", 0.1)
    assert first.usage == Usage(9, 3, 4)
    assert [arrival.num_tokens for arrival in first.arrivals] == [1, 2]
    assert 0.2 <= first.arrivals[0].seconds <= first.ended
    assert second.sent >= 0.1


def test_arrivals_do_not_wait_for_slow_answers(slow_server: FakeServer):
    items = [WorkItem("x", {"prompt": "x"}, at_seconds=0.01 * index) for index in range(8)]
    sent = [each.sent for each in run(slow_server, items)]
    assert max(sent) < 0.2 + min(each for each in sent)


def test_the_wait_for_a_slot_counts_where_a_request_was_due(slow_server: FakeServer):
    due = run(slow_server, [WorkItem("x", {"prompt": "x"}, at_seconds=0.0)] * 3, concurrency=1)
    assert [each.due for each in due] == [0.0] * 3
    assert due[-1].ended >= 0.6
    in_turns = run(slow_server, [WorkItem("x", {"prompt": "x"})] * 3, concurrency=1)
    assert all(each.sent - each.due < 0.1 for each in in_turns)
    assert in_turns[-1].due >= 0.4


def test_a_failure_is_an_outcome_and_is_not_tried_again(fake_server: FakeServer):
    fake_server.inference.failure = (grpc.StatusCode.UNAVAILABLE, "it stops.")
    fake_server.inference.trailing_metadata = (("grpc-retry-pushback-ms", "0"),)
    (failed,) = run(fake_server, [WorkItem("x", {"prompt": "x"})])
    assert (failed.failure, failed.usage) == (("UNAVAILABLE", "it stops."), None)
    assert len(fake_server.inference.requests) == 1


def test_who_waits_for_others_tokens_comes_once_one_has_them(fake_server: FakeServer):
    fake_server.inference.responses = (pb.GenerateResponse(token_ids=[5] * 32), LAST)
    items = [WorkItem("late", {"prompt": "late"}, arrive_after_tokens=32), WorkItem("x", {"prompt": "x"})]
    late, other = run(fake_server, items)
    assert [request.text for request in fake_server.inference.requests] == ["x", "late"]
    assert late.due >= other.arrivals[0].seconds


def test_who_waits_for_tokens_that_nobody_will_have_comes_at_last():
    async def scenario() -> list[int]:
        progress, woken = Progress(), []
        progress.expect(3)

        async def wait(num_tokens: int) -> None:
            await progress.reached(num_tokens)
            woken.append(num_tokens)
            progress.ended()

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(wait(90))
            group.create_task(wait(80))
            await asyncio.sleep(0)
            progress.note(79)
            assert not woken
            progress.ended()
        return woken

    assert asyncio.run(scenario()) == [80, 90]


# -- the command -------------------------------------------------------------------------------------------------------


def bench(server: FakeServer, *arguments: str) -> int:
    return cli.main(["bench", *arguments, "--address", server.address])


def test_a_run_is_a_table_json_and_a_plot(fake_server: FakeServer, tmp_path: Path, capsys):
    fake_server.inference.responses = (pb.GenerateResponse(token_ids=[5]), LAST)
    path = workload(tmp_path, {"id": "a", "prompt": "hi", "skip_prefix_cache": False}, {"prompt": "ho"})
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "png")}
    flags = [f"--{kind}={file}" for kind, file in files.items()]
    assert bench(fake_server, path, "--num-requests", "5", "--rate", "200", "--warm-up", "2", *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fake, load.jsonl: 5 requests in ")
    assert lines[2].split() == ["ms", "mean", "p50", "p90", "p99", "max"]
    assert {"output tokens": "15", "of them cached": "20"}.items() <= {
        line.rpartition("  ")[0].strip(): line.rpartition("  ")[2] for line in lines
    }.items()
    told = json.loads(files["json"].read_text())
    assert (told["num_succeeded"], told["failures"], told["num_output_tokens"]) == (5, {}, 15)
    assert told["time_to_first_token"]["p50"] <= told["time_to_first_token"]["max"]
    assert [request["id"] for request in told["requests"]][:3] == ["a", f"{path}:2", "a"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    warm, _, *measured = fake_server.inference.requests
    assert warm.skip_prefix_cache
    assert len(measured) == 5
    assert not any(request.skip_prefix_cache for request in measured)


def test_failures_are_counted_and_a_run_of_nothing_else_ends_with_1(fake_server: FakeServer, tmp_path: Path, capsys):
    fake_server.inference.failure = (grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full; retry.")
    assert bench(fake_server, workload(tmp_path, {"prompt": "hi"}), "--num-requests", "3") == 1
    shown = capsys.readouterr().out
    assert "failed RESOURCE_EXHAUSTED     3" in shown
    assert "RESOURCE_EXHAUSTED: it is full; retry." in shown


def test_no_server_is_one_sentence_and_exit_1(free_address: str, tmp_path: Path, capsys):
    assert cli.main(["bench", workload(tmp_path, {"prompt": "hi"}), "--address", free_address]) == 1
    assert capsys.readouterr().err.startswith(f"blockplane bench: no server answers on {free_address}")


def test_a_plot_without_matplotlib_says_what_to_install_before_the_run(
    fake_server: FakeServer, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench(fake_server, workload(tmp_path, {"prompt": "hi"}), "--png", "x.png") == 1
    assert "pip install 'blockplane[bench]'" in capsys.readouterr().err
    assert not fake_server.inference.requests
