"""Makes the pictures of docs/pictures/ from one real run of the synthetic model, in which a worker is killed.

    python docs/make_pictures.py

An engine, a frontend, two workers whose graphs take a fixed time, and a Prometheus that reads them; `blockplane bench`
puts a load on them, `blockplane trace` and what `blockplane top` draws look at them meanwhile. It takes four minutes.
Chromium and Prometheus must be on PATH, or CHROMIUM and PROMETHEUS name them; Python packages are those of the extras
`dev` and `pictures`.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path

from board import Span, save_board
from browser import View, chromium, save_svg, save_trace
from PIL import Image
from rich.console import Console

from blockplane.client.admin import Admin
from blockplane.client.client import Client
from blockplane.client.top_screen import Watch

FOLDER = Path(__file__).parent
PICTURES = FOLDER / "pictures"
BOARD = FOLDER.parent / "deploy" / "grafana" / "blockplane.json"
sys.path.append(str(FOLDER.parent / "tests"))

from perfetto_reader import ReadTrace  # noqa: E402 - the tests' own

REQUESTS_PER_SECOND, SECONDS = 2.0, 160.0
KILL_AT, RESTART_AT, LOOK_AT, NUM_LOOKS = 45.0, 60.0, 80.0, 60
"""A lost worker's steps are kept for a minute, in which its worker may come back; the looks end behind that."""
GRAPH_SECONDS = 0.06
SETTINGS = {
    "model": "synthetic",
    "num_seqs_buckets": "2,4,8",
    "num_batched_tokens_buckets": "128,256",
    "kv_segment_size_buckets": "256",
    "max_model_len": "1024",
    "num_blocks": "256",
    "structured_output": "off",
    "num_threads": "1",
    "log_level": "warning",
}
BLOCKPLANE = (sys.executable, "-m", "blockplane.client")
PROCESSES = {
    "engine 1": (*BLOCKPLANE, "engine"),
    "frontend 1": (*BLOCKPLANE, "frontend"),
    "worker 1": (sys.executable, str(FOLDER / "paced_graphs.py")),
    "worker 2": (sys.executable, str(FOLDER / "paced_graphs.py")),
}
"""By service and instance, as Prometheus calls them."""
NUM_PREFIXES, PREFIX_TOKENS, MAX_TOKEN_ID = 6, 96, 250
NUM_STEPS, NUM_SHOWN = 40, 6
"""Of each group's trace: how many are written, and how many are seen."""


class Run:
    """Processes that end with the run, and the folder where what they write lies until then."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self.folder = stack, folder
        self.address, self.engine_address = free_address(), free_address()
        self._metrics = {name: free_address() for name in PROCESSES}
        settings = {**SETTINGS, "address": self.address, "engine_address": self.engine_address}
        self._environ = {
            **os.environ,
            **{f"BLOCKPLANE_{name.upper()}": value for name, value in settings.items()},
            "GRAPH_SECONDS": str(GRAPH_SECONDS),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """One of PROCESSES, which Prometheus finds at the same port every time."""
        return self.begin(*PROCESSES[name], "--metrics-address", self._metrics[name])

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(running(command, self._environ))

    def start_prometheus(self, program: str) -> str:
        """Returns where it answers."""
        labels = {name: dict(zip(("service", "instance"), name.split(), strict=True)) for name in PROCESSES}
        jobs = [{"targets": [at], "labels": labels[name]} for name, at in self._metrics.items()]
        scrape = {"job_name": "blockplane", "scrape_interval": "1s", "static_configs": jobs}
        config, address = self.folder / "prometheus.yml", free_address()
        # JSON is YAML.
        config.write_text(json.dumps({"scrape_configs": [scrape]}))
        flags = (f"--config.file={config}", f"--storage.tsdb.path={self.folder}", f"--web.listen-address={address}")
        self.begin(program, *flags, "--log.level=error")
        return f"http://{address}"


@contextmanager
def running(command: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=environ)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def load(run: Run) -> Span:
    """The load from its beginning to its end, with a worker lost in it and looks at what becomes of the rest.

    Returns:
        When it was.
    """
    for name in ("engine 1", "frontend 1", "worker 1"):
        run.start(name)
    lost = run.start("worker 2")
    with Client(run.address) as client:
        client.wait_until_serving(timeout=120)
    workload = run.folder / "mixed.jsonl"
    write_workload(workload)
    began = time.time()
    flags = (str(workload), f"--rate={REQUESTS_PER_SECOND:g}", f"--png={PICTURES / 'bench.png'}")
    bench = run.begin(*BLOCKPLANE, "bench", *flags)
    sleep_until(began + KILL_AT)
    lost.kill()
    sleep_until(began + RESTART_AT)
    run.start("worker 2")
    sleep_until(began + LOOK_AT)
    look(run)
    if bench.wait():
        sys.exit("the load was not served; what the processes printed above says why.")
    return Span(began, time.time())


def write_workload(path: Path) -> None:
    """Requests of which each begins like a sixth of the others."""
    draw = random.Random(0)
    prefixes = [draw.choices(range(MAX_TOKEN_ID), k=PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    with path.open("w") as file:
        for _ in range(round(REQUESTS_PER_SECOND * SECONDS)):
            prompt = draw.choice(prefixes) + draw.choices(range(MAX_TOKEN_ID), k=draw.randint(16, 120))
            request = {"prompt_token_ids": prompt, "max_tokens": draw.randint(16, 96), "temperature": 0}
            file.write(json.dumps({**request, "ignore_eos": True}) + "\n")


def look(run: Run) -> None:
    """A minute of what `blockplane top` draws, and then the last steps."""
    with Admin(run.engine_address) as admin:
        watch = Watch(admin, run.engine_address)
        for _ in range(NUM_LOOKS):
            watch.look()
            time.sleep(1)
    canvas = Console(record=True, width=100, file=StringIO(), force_terminal=True)
    canvas.print(watch.frame())
    canvas.save_svg(str(run.folder / "top.svg"), title="blockplane top")
    flags = (f"--engine-address={run.engine_address}", f"--steps={NUM_STEPS}", f"--output={run.folder}/steps.pftrace")
    subprocess.run([*BLOCKPLANE, "trace", *flags], check=True, stdout=subprocess.DEVNULL)


def sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.time()))


def usual_steps(trace: Path) -> View:
    """Some in a row of one group, which took neither more nor less time than most, with the forward of one chosen."""
    slices = ReadTrace(trace.read_bytes()).slices
    forwards = next(of_track for track, of_track in slices.items() if track.endswith("/forward"))
    times = [(begin, end) for _, begin, end in forwards]
    rows = [times[first : first + NUM_SHOWN] for first in range(len(times) - NUM_SHOWN)]
    usual = sorted(rows, key=lambda row: row[-1][1] - row[0][0])[len(rows) // 2]
    return View(usual[0][0], usual[-1][1], *usual[NUM_SHOWN // 2])


def find(program: str) -> str:
    """Where it is. Ends with a sentence where it is not."""
    variable = program.upper()
    if found := shutil.which(os.environ.get(variable, program)):
        return found
    sys.exit(f"there is no {program} on PATH; install it (Debian's package {program}), or name it by {variable}.")


def main() -> None:
    programs = {program: find(program) for program in ("chromium", "prometheus")}
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Run(stack, Path(folder))
        prometheus = run.start_prometheus(programs["prometheus"])
        save_board(BOARD, prometheus, load(run), PICTURES / "grafana.png")
        trace = run.folder / "steps.pftrace"
        with chromium(programs["chromium"]) as browser:
            save_svg(browser, run.folder / "top.svg", PICTURES / "top.png")
            save_trace(browser, trace, usual_steps(trace), PICTURES / "trace.png")
    for png in PICTURES.glob("*.png"):
        # As many colours as they need, in a third of the bytes.
        Image.open(png).convert("RGB").quantize(128).save(png, optimize=True)


if __name__ == "__main__":
    main()
