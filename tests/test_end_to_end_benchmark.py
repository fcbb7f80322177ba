"""The end-to-end benchmark's pure parts, and its ways with processes; neither Blockplane nor a peer is started."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmark_modules import FOLDER, load_benchmark

from blockplane.client.engine_values import GroupSteps
from blockplane.client.load import Arrival, Load, Outcome
from blockplane.client.values import Usage
from blockplane.client.workload import WorkItem
from blockplane.data_plane.models.config_json import parse_config
from blockplane.protos.errors import UnavailableError


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("end_to_end")


def neighbour(name: str) -> Any:
    """A module as the benchmark itself imported it."""
    return sys.modules[name]


def outcome(name: str, sent: float, times: Sequence[float], num_tokens: int = 1) -> Outcome:
    arrivals = tuple(Arrival(seconds, 0, num_tokens) for seconds in times)
    usage = Usage(4, num_tokens * len(times), 3)
    return Outcome(name, sent, sent, times[-1], arrivals, usage, None)


def figures(benchmark: ModuleType, system: str, repetition: int = 0, **changed: Any) -> Any:
    given = {"peak_bytes": 10, "cpu_seconds": {"worker": 3.0}, "client_seconds": 1.0, "busy_seconds": 6.0, **changed}
    workload, times = given.pop("workload", "W1"), given.pop("times", (2.0, 4.0))
    return benchmark.figures_of(system, workload, repetition, [outcome("a", 1.0, times)], benchmark.Used(**given))


def test_only_waits_that_touch_the_long_prompt_count_and_tokens_that_came_together_share_theirs(
    benchmark: ModuleType,
) -> None:
    beside = neighbour("end_to_end_figures").beside_long_prompt
    long = outcome("w4-long", 10.0, [14.0, 14.1])
    single = outcome("a", 0.0, [8.0, 9.0, 11.0, 13.5, 15.5, 16.0])
    paired = outcome("b", 0.0, [9.5, 13.5], num_tokens=2)
    waits, first = beside([single, paired, long])
    assert waits == pytest.approx([2.0, 2.5, 2.0, 2.0, 2.0])
    assert first == pytest.approx(4.0)
    assert beside([single, paired]) is None


def test_figures_are_of_the_tokens_that_came(benchmark: ModuleType) -> None:
    used = benchmark.Used(7, {"worker": 3.0, "engine": 1.0}, client_seconds=0.5, busy_seconds=7.0)
    each = benchmark.figures_of("us", "W4", 1, [outcome("a", 1.0, (2.0, 4.0)), outcome("w4-long", 2.0, (5.0,))], used)
    assert each.output_tokens_per_second == pytest.approx(3 / 5)
    assert (each.seconds, each.first_p50, each.between_p50, each.decoding_p99) == pytest.approx((5.0, 2.0, 2.0, 2.0))
    assert (each.long_first, each.num_cached_tokens, each.peak_bytes) == (3.0, 6, 7)
    assert (each.total_cpu_seconds, each.other_cores) == (4.0, pytest.approx(0.5))
    assert figures(benchmark, "us").decoding_p99 is None
    # Clocks of CPU time differ by their ticks.
    assert figures(benchmark, "us", busy_seconds=3.9).other_cores == 0


def test_a_system_that_fails_a_request_has_no_figures(benchmark: ModuleType) -> None:
    failed = Outcome("a", 0.0, 0.0, 1.0, (), None, ("INTERNAL", "it broke"))
    with pytest.raises(RuntimeError, match="us failed a of W1: it broke"):
        benchmark.figures_of("us", "W1", 0, [failed], benchmark.Used(0, {}, 0.0, 0.0))


def test_medians_are_of_each_figure_alone(benchmark: ModuleType) -> None:
    runs = [
        figures(benchmark, "us", 0, peak_bytes=1, cpu_seconds={"worker": 9.0}, outside_share=0.5),
        figures(benchmark, "us", 1, peak_bytes=3, cpu_seconds={"worker": 1.0}, outside_share=0.1),
        figures(benchmark, "us", 2, peak_bytes=2, cpu_seconds={"worker": 2.0}, outside_share=0.2),
    ]
    middle = neighbour("end_to_end_figures").median_of(runs)
    assert (middle.peak_bytes, middle.cpu_seconds, middle.outside_share) == (2, {"worker": 2.0}, 0.2)
    assert middle.decoding_p99 is None


def test_a_target_is_judged_by_the_median_of_the_ratios_within_repetitions(benchmark: ModuleType) -> None:
    ours = [figures(benchmark, "blockplane", index, times=(2.0, end)) for index, end in enumerate((4.0, 8.0, 16.0))]
    theirs = [figures(benchmark, "vllm", index, times=(2.0, end)) for index, end in enumerate((8.0, 4.0, 64.0))]
    (verdict,) = benchmark.verdicts([*theirs, *ours], [])
    # 2 / 4 over 2 / 8, 2 / 8 over 2 / 4, 2 / 16 over 2 / 64: ratios 2, 0.5 and 4, though the medians' would be 1.
    assert verdict.value == pytest.approx(2.0)
    assert (verdict.own, verdict.peers) == pytest.approx((0.25, 0.25))
    assert verdict.is_met


def test_a_repetition_that_one_system_lacks_counts_for_no_ratio(benchmark: ModuleType) -> None:
    ours = [figures(benchmark, "blockplane", index, times=(2.0, end)) for index, end in enumerate((4.0, 400.0))]
    (verdict,) = benchmark.verdicts([*ours, figures(benchmark, "vllm", 0)], [])
    assert verdict.value == 1.0


@pytest.mark.parametrize(("seconds", "is_met", "miss"), [(2.5, True, 0.0), (3.0, False, 0.2)])
def test_a_miss_is_told_by_its_share_of_the_bound(
    benchmark: ModuleType, seconds: float, is_met: bool, miss: float
) -> None:
    start = neighbour("end_to_end_figures").Start
    starts = [start("blockplane", 0, seconds, 5), start("vllm", 0, 10.0, 5)]
    memory, ready = benchmark.verdicts([], starts)
    assert memory.is_met
    assert (ready.is_met, ready.miss) == (is_met, pytest.approx(miss))
    last = benchmark.verdict_table([memory, ready])[-1]
    assert last.endswith("met" if is_met else "MISSED by 20%")
    assert json.dumps(benchmark.as_json(ready))


def test_a_share_of_our_own_is_held_against_its_bound_without_a_peer(benchmark: ModuleType) -> None:
    (verdict,) = benchmark.verdicts([figures(benchmark, "blockplane", workload="W16", outside_share=0.1)], [])
    assert (verdict.value, verdict.peers, verdict.is_met) == (0.1, None, False)
    assert benchmark.verdicts([figures(benchmark, "blockplane", workload="W16")], []) == []


def test_tables_have_a_line_for_each_workload_and_system(benchmark: ModuleType) -> None:
    runs = [figures(benchmark, system, index) for index in range(2) for system in ("vllm", "blockplane")]
    assert [line.split()[:2] for line in benchmark.table(runs)[1:]] == [["W1", "blockplane"], ["W1", "vllm"]]
    assert benchmark.cpu_table(runs) == ["W1 blockplane: worker 3.00", "W1 vllm: worker 3.00"]
    assert benchmark.table([]) == benchmark.long_prompt_table(runs) == benchmark.verdict_table([]) == []


def test_every_target_has_a_panel_with_its_bars(benchmark: ModuleType) -> None:
    targets, plot = neighbour("end_to_end_targets"), neighbour("end_to_end_plot").plot
    judged = [targets.Verdict(target, 0.5, 2.0, target.peer and 4.0) for target in targets.TARGETS]
    shown = [axes for axes in plot(judged).axes if axes.get_visible()]
    assert len(shown) == len(judged)
    assert [len(axes.patches) for axes in shown] == [1 if verdict.peers is None else 2 for verdict in judged]


def steps(**columns: Sequence[int]) -> GroupSteps:
    names = GroupSteps.__dataclass_fields__.keys() - {"group"}
    size = len(next(iter(columns.values())))
    return GroupSteps(0, **{name: np.array(columns.get(name, [0] * size), np.int64) for name in names})


def test_steps_before_the_run_do_not_count(benchmark: ModuleType) -> None:
    second = 1_000_000_000
    columns = {name: [at * second, (100 + at) * second] for at, name in enumerate(("began", "prepared"))}
    columns |= {"computed": [9 * second, 104 * second], "sampled": [9, 106 * second], "sent": [9, 106 * second]}
    assert benchmark.step_seconds(steps(**columns), 100 * second) == neighbour("cpu_outside_forward").StepSeconds(
        num_steps=1, inputs=1.0, forward=3.0, sampling=2.0, result=0.0
    )


def test_all_but_the_forward_is_outside_of_it(benchmark: ModuleType) -> None:
    module, times = neighbour("cpu_outside_forward"), neighbour("processes_measured").ProcessTimes
    # The first thread: 10 s, 7 of them forward. A helper: 5 s, half a second of them sampling. gRPC: 0.2 s.
    worker = times("worker", 15.2, {7: 10.0, 8: 5.0, 9: 0.2})
    told = module.StepSeconds(num_steps=1, inputs=1.0, forward=7.0, sampling=0.5, result=0.2)
    share = module.outside_share({7: worker, 3: times("engine", 0.8, {3: 0.8})}, told)
    assert share == pytest.approx((3.0 + 0.5 + 0.2 + 0.8) / 16.0)
    # Where the forward waited for a core, its wall time is no measure of its CPU time.
    waited = module.StepSeconds(num_steps=1, inputs=1.0, forward=9.9, sampling=0.5, result=0.2)
    assert module.outside_share({7: worker, 3: times("engine", 0.8, {3: 0.8})}, waited) == pytest.approx(
        (1.7 + 0.5 + 0.2 + 0.8) / 16.0
    )


PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"
CHILD = """
import time
block, end = bytearray(b"x" * (64 << 20)), time.process_time() + 0.3
while time.process_time() < end:
    pass
time.sleep(60)
"""


def test_a_trees_time_and_memory_include_its_descendants(benchmark: ModuleType) -> None:
    measured = neighbour("processes_measured")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        used: dict[int, Any] = {}
        busy = measured.busy_seconds()
        with measured.PeakMemory(parent.pid) as memory:
            while sum(each.seconds for each in used.values()) < 0.3 and time.monotonic() < deadline:
                time.sleep(0.05)
                used = measured.times_of(parent.pid, str)
            assert memory.take() > 64 << 20
            assert memory.largest > 64 << 20
        assert len(used) == 2
        assert measured.busy_seconds() - busy > 0.2
        (inner,) = (each for pid, each in used.items() if pid != parent.pid)
        assert inner.threads.keys() <= {pid for pid in used if pid != parent.pid}
        assert inner.seconds == pytest.approx(sum(inner.threads.values()), abs=0.05)
        again = measured.times_between(used, measured.times_of(parent.pid, str))
        assert all(each.seconds < 0.2 for each in again.values())
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()


PEER = """
import json, sys
print(json.dumps({"ready": "a peer 1"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "reset" in request:
        print(json.dumps({"reset": True}), flush=True)
        continue
    if request["prompt"] == [0]:
        sys.exit()
    for token_id in range(request["max_tokens"]):
        print(json.dumps({"id": request["id"], "token_ids": [token_id]}), flush=True)
    print(json.dumps({"id": request["id"], "num_cached_tokens": len(request["prompt"]) - 1}), flush=True)
"""


def with_peer(benchmark: ModuleType, scenario: Any, script: str = PEER) -> Any:
    async def run() -> Any:
        running = neighbour("end_to_end_systems")._running_peer("peer", [sys.executable, "-c", script], {})
        async with running as system:
            result = await scenario(system)
        assert not Path(f"/proc/{system.pid}").exists()
        return result

    return asyncio.run(run())


def test_a_peer_is_driven_as_blockplane_is_and_ends_with_its_input(benchmark: ModuleType) -> None:
    async def scenario(system: Any) -> list[Outcome]:
        await system.reset_prefix_cache()
        items = [WorkItem(f"{n}", {"prompt": [1] * n, "max_tokens": n, "ignore_eos": True}) for n in (2, 3)]
        return await Load(system.client, None).run(items)

    outcomes = with_peer(benchmark, scenario)
    assert [each.usage for each in outcomes] == [Usage(2, 2, 1), Usage(3, 3, 2)]
    assert all(each.failure is None for each in outcomes)


def test_a_peer_that_ends_fails_its_requests(benchmark: ModuleType) -> None:
    async def scenario(system: Any) -> Outcome:
        (only,) = await Load(system.client, None).run([WorkItem("a", {"prompt": [0], "max_tokens": 1})])
        return only

    assert with_peer(benchmark, scenario).failure is not None


def test_a_peer_that_never_gets_ready_is_told_and_leaves_no_process(benchmark: ModuleType) -> None:
    with pytest.raises(UnavailableError, match="before it was ready"):
        with_peer(benchmark, None, script="pass")


def test_what_does_not_end_when_asked_is_killed_with_all_that_it_started(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbour("end_to_end_systems"), "STOP_SECONDS", 0.2)
    stubborn = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']);"
        ' print(\'{"ready": "%d"}\' % child.pid, flush=True); time.sleep(60)'
    )

    async def scenario(system: Any) -> str:
        return str(system.version)

    child = with_peer(benchmark, scenario, script=stubborn)
    deadline = time.monotonic() + 10
    while (status := Path(f"/proc/{child}/stat")).exists() and time.monotonic() < deadline:
        if status.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        assert not status.exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/bin/python -m blockplane.client up --model=gemma3-270m", "up"),
        ("/bin/python -m blockplane.control_plane.engine --address=a", "engine"),
        ("/bin/python -m blockplane.control_plane.frontend --address=a", "frontend"),
        ("/bin/python -m blockplane.data_plane --address=a", "worker"),
        ("VLLM::EngineCore", "enginecore"),
        ("/bin/python /here/end_to_end_vllm.py /model", "vllm"),
        ("/bin/python -c from multiprocessing.resource_tracker import main", "helper"),
    ],
)
def test_processes_are_named_by_what_they_do(benchmark: ModuleType, command: str, name: str) -> None:
    assert benchmark.process_name(command) == name


def test_workloads_are_whole_unless_it_is_to_be_quick(benchmark: ModuleType) -> None:
    sizes = {name: len(benchmark.workload(name, is_quick=False)) for name in benchmark.WORKLOADS}
    assert sizes == {"W1": 64, "W1S": 64, "W2": 32, "W3": 1, "W4": 17, "W16": 16}
    (cut,) = benchmark.workload("W3", is_quick=True)
    assert cut.arguments["max_tokens"] == benchmark.QUICK_TOKENS
    assert benchmark.workload("W4", is_quick=False)[-1].name == neighbour("end_to_end_figures").LONG_PROMPT


def test_warming_up_leaves_no_prompt_of_a_workload_in_any_cache(benchmark: ModuleType) -> None:
    begins = {tuple(item.arguments["prompt"][:16]) for item in benchmark.warm_up()}
    for name in benchmark.WORKLOADS:
        items = benchmark.workload(name, is_quick=False)
        assert begins.isdisjoint(tuple(item.arguments["prompt"][:16]) for item in items)


def test_the_model_that_vllm_reads_is_described_as_ours(benchmark: ModuleType) -> None:
    stated = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "bfloat16",
    }
    config = parse_config(stated)
    written = neighbour("hugging_face_copy").gemma3_config(config)
    assert written["layer_types"].count("full_attention") == 1
    assert parse_config(json.loads(json.dumps(written))) == config


def test_only_a_gemma_is_written_for_peers(benchmark: ModuleType) -> None:
    with pytest.raises(ValueError, match="no Gemma3ForCausalLM"):
        neighbour("hugging_face_copy").gemma3_config(SimpleNamespace(architecture="LlamaForCausalLM"))


def test_peers_scripts_import_nothing_of_ours() -> None:
    for name in "end_to_end_vllm.py", "end_to_end_llama.py":
        assert "blockplane" not in (FOLDER / name).read_text().replace("knows nothing of Blockplane", "")
