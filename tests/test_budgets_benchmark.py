"""The budgets of a step: parts and floors add up as they say; and its clocks on sizes that take no time."""

from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from blockplane.client.engine_values import GroupSteps

STATIONS = {
    "scheduled": 0,
    "planned": 40,
    "received": 340,
    "began": 400,
    "prepared": 460,
    "computed": 9_460,
    "sampled": 9_960,
    "sent": 9_980,
    "answered": 10_180,
    "settled": 10_190,
    "delivered": 10_300,
}
"""Microseconds from a step's beginning."""


@pytest.fixture(scope="module")
def parts() -> ModuleType:
    return load_benchmark("budget_parts")


@pytest.fixture(scope="module")
def clocks() -> ModuleType:
    return load_benchmark("budget_clocks")


def logged(decoded: list[int], prefilled: list[int] | None = None, apart: int = 12_000) -> GroupSteps:
    """Steps that many microseconds apart, alike but for what they compute."""
    begin = 1000 * apart * np.arange(1, len(decoded) + 1)
    columns: dict[str, Any] = {name: begin + 1000 * after for name, after in STATIONS.items()}
    zeros = np.zeros(len(decoded), np.int32)
    counts = {field.name: zeros for field in fields(GroupSteps) if field.name.startswith("num_")}
    counts["num_decode_tokens"] = np.array(decoded, np.int32)
    counts["num_prefill_tokens"] = zeros if prefilled is None else np.array(prefilled, np.int32)
    return GroupSteps(group=0, steps=np.arange(len(decoded)), **columns, **counts)


def test_walls_are_between_the_stations_of_steps_that_decode_all_rows_and_nothing_else(parts: ModuleType) -> None:
    steps = logged([4, 16, 16, 16, 16], [0, 0, 0, 0, 64])
    # Only those that count are of another length.
    steps.computed[[0, 4]] += 1_000_000_000
    walls = parts.walls_of(steps, 16, since=0)
    assert walls == parts.Walls(
        num_steps=3,
        step=12_000,
        schedule=40,
        wire=300 + 200,
        inputs=60,
        forward=9_000,
        sample=500,
        result=20,
        settle=10,
    )


def test_steps_before_the_measurement_do_not_count(parts: ModuleType) -> None:
    steps = logged([1, 1, 1, 1])
    assert parts.walls_of(steps, 1, since=int(steps.began[2])).num_steps == 2
    with pytest.raises(ValueError, match="no step decoded 1 rows"):
        parts.walls_of(steps, 1, since=int(steps.began[3]))


def budget(parts: ModuleType, num_streams: int = 16) -> Any:
    clocked = load_benchmark("budget_clocks")
    walls = parts.walls_of(logged([num_streams] * 3), num_streams, since=0)
    used = parts.Used(engine=300.0, frontend=700.0, worker=20_000.0, outside_share=0.0625)
    own = clocked.Clocks(encode=4.0, apply=10.0, write_delivery=3.0, read_delivery=20.0, detokenize=80.0)
    least = clocked.Least(1.0, 0.5, 0.6, 2.0, 3.0)
    weights = clocked.Weights(num_weights=1_000_000, kv_per_token=512, windows=(512, None), vocab_size=1000)
    machine = clocked.Machine(read_bandwidth=1e9, operations=1e12)
    floors = parts.floors_of(num_streams, 1000, least, parts.Bare(250.0, 400.0), weights, machine)
    return parts.Budget(num_streams, 1000, walls, used, parts.parts_of(walls, used, own), floors)


def test_every_part_has_a_floor_and_a_part_is_what_is_left_of_what_holds_it(parts: ModuleType) -> None:
    each = budget(parts)
    assert list(each.parts) == list(each.floors) == list(parts.FLOORS)
    assert each.parts["schedule"] + each.parts["encode"] == 40
    assert each.parts["apply"] + each.parts["inputs"] == 60
    assert each.parts["deliver"] == 10 + 3 + 20
    assert each.parts["client write"] == 700 - 20 - 80


def test_what_the_worker_waits_is_all_of_a_step_that_is_not_on_its_path(parts: ModuleType) -> None:
    assert budget(parts).waiting == 12_000 - (60 + 9_000 + 500 + 20)


def test_a_clock_that_says_more_than_the_whole_leaves_nothing(parts: ModuleType) -> None:
    each = budget(parts)
    clocks = load_benchmark("budget_clocks").Clocks(1e6, 1e6, 0.0, 1e6, 1e6)
    told = parts.parts_of(each.walls, each.used, clocks)
    assert (told["schedule"], told["inputs"], told["client write"]) == (0, 0, 0)


def test_a_forward_s_floor_is_its_bytes_or_its_operations_whichever_take_longer(clocks: ModuleType) -> None:
    weights = clocks.Weights(num_weights=1_000_000, kv_per_token=512, windows=(512, None), vocab_size=1000)
    machine = clocks.Machine(read_bandwidth=1e9, operations=1e12)
    # A window of 512 tokens and all 1,000 of KV beside the weights, two bytes each.
    read = 2 * (1_000_000 + 512 * (512 + 1000))
    assert weights.forward_microseconds(1, 1000, machine) == pytest.approx(1e6 * read / 1e9)
    assert weights.forward_microseconds(1, 1000, replace(machine, operations=1e8)) == pytest.approx(1e6 * 2e6 / 1e8)
    assert weights.sampling_microseconds(16, machine) == pytest.approx(1e6 * 16 * 4 * 1000 / 1e9)


def test_the_table_is_markdown_with_a_cell_for_every_column(parts: ModuleType) -> None:
    lines = parts.table([budget(parts, 1), budget(parts, 16)])
    assert {line.count("|") for line in lines} == {7}
    assert lines[0] == "| microseconds a step | 1 stream | floor | 16 streams | floor | the floor is |"
    assert "| wire | 500 | 250 | 500 | 250 | a bare gRPC stream's ping of as many bytes |" in lines
    assert "| **a step** | **12,000** |  | **12,000** |  |  |" in lines


def test_a_table_takes_the_place_of_the_one_before() -> None:
    budgets = load_benchmark("budgets")
    text = "# A\n<!-- budgets -->\n| old |\n<!-- /budgets -->\nrest\n"
    assert budgets.with_table(text, ["| new |"]) == "# A\n<!-- budgets -->\n| new |\n<!-- /budgets -->\nrest\n"
    assert budgets.with_table(budgets.README.read_text(), []).count("<!-- /budgets -->") == 1
    with pytest.raises(SystemExit, match="lacks"):
        budgets.with_table("# A\n<!-- budgets -->\n", ["| new |"])


def test_clocks_tell_every_part_of_a_real_step(clocks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Text:
        def continuation(self, prompt: list[int]) -> Any:
            class Output:
                def push(self, token_ids: list[int]) -> str:
                    return str(token_ids)

            return Output()

    monkeypatch.setattr(clocks, "NUM_STEPS", 4)
    told = clocks.measure_clocks(2, Text())
    assert all(getattr(told, field.name) > 0 for field in fields(told))
    least = clocks.measure_least(2)
    assert all(getattr(least, field.name) > 0 for field in fields(least))


def test_a_bare_server_writes_to_every_stream() -> None:
    budgets = load_benchmark("budgets")
    assert 0 < budgets.written(3, seconds=0.3) < 1e6
