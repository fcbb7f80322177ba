"""Starts Blockplane and its peers, each with all its processes, and ends them; measures but the time to ready."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from end_to_end_peers import LONGEST_LINE, PeerClient
from processes_measured import PeakMemory

from blockplane import __version__
from blockplane.client.admin import Admin
from blockplane.client.async_client import AsyncClient
from blockplane.client.processes import MODULES
from blockplane.protos.errors import UnavailableError

FOLDER = Path(__file__).parent
KV_BYTES = 4 << 30
"""What each system that can be told gives to KV."""
READY_SECONDS = 600.0
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class System:
    """One that is ready.

    Attributes:
        pid: the process that all its others descend from.
        memory: watched since that one began.
        client: what its requests are sent by.
        admin: Blockplane's own; None = it is a peer.
    """

    name: str
    version: str
    pid: int
    memory: PeakMemory
    seconds_to_ready: float
    client: AsyncClient | PeerClient
    admin: Admin | None = None

    async def reset_prefix_cache(self) -> None:
        """Let the next requests find nothing of those before."""
        if isinstance(self.client, PeerClient):
            await self.client.reset_prefix_cache()
        elif self.admin is not None:
            await asyncio.to_thread(self.admin.reset_prefix_cache)


Running = AbstractAsyncContextManager[System]


@asynccontextmanager
async def running_blockplane(name: str, flags: Sequence[str]) -> AsyncIterator[System]:
    """`blockplane up`, with `flags` behind its address."""
    with tempfile.TemporaryDirectory(prefix="blockplane-") as folder:
        address, engine_address = f"127.0.0.1:{_free_port()}", f"unix:{folder}/engine.sock"
        settings = [f"--address={address}", f"--engine-address={engine_address}", f"--kv-cache-bytes={KV_BYTES}"]
        command = [sys.executable, "-m", "blockplane.client", "up", "--log-level=warning", *settings, *flags]
        began = time.perf_counter()
        async with _child(command, os.environ, asyncio.subprocess.Process.terminate) as (process, memory):
            assert process.stdout is not None
            while not (line := await process.stdout.readline()).startswith(b"blockplane ready"):
                if not line:
                    raise UnavailableError("blockplane ended before it was ready; its last lines are above.")
            seconds = time.perf_counter() - began
            with Admin(engine_address) as admin:
                async with AsyncClient(address) as client:
                    yield System(name, f"Blockplane {__version__}", process.pid, memory, seconds, client, admin)


def running_vllm(python: Path, model: Path, cache: Path) -> Running:
    """Its AsyncLLM on a Hugging Face directory, as `end_to_end_vllm.py` sets it.

    `cache`: a folder for what it compiles and leaves, which lets it start faster the next time.
    """
    environ = {
        "TMPDIR": str(cache),
        "LD_PRELOAD": ":".join(map(str, preloaded(python))),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return _running_peer("vllm", [str(python), str(FOLDER / "end_to_end_vllm.py"), str(model)], environ)


def preloaded(python: Path) -> list[Path]:
    """Of what vLLM advises to preload on CPUs, tcmalloc and Intel's OpenMP, what its environment has."""
    libraries = python.parent.parent / "lib"
    names = "libtcmalloc_minimal.so.4", "libiomp5.so"
    return [libraries / name for name in names if (libraries / name).exists()]


def running_llama(python: Path, model: Path) -> Running:
    """llama-cpp-python on a GGUF file, as `end_to_end_llama.py` sets it."""
    num_threads = str(len(os.sched_getaffinity(0)))
    return _running_peer("llama", [str(python), str(FOLDER / "end_to_end_llama.py"), str(model), num_threads], {})


@asynccontextmanager
async def _running_peer(name: str, command: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[System]:
    began = time.perf_counter()
    async with _child(command, os.environ | environ, _close_input) as (process, memory):
        client = PeerClient(process)
        version = await asyncio.wait_for(client.ready(), READY_SECONDS)
        yield System(name, version, process.pid, memory, time.perf_counter() - began, client)


@asynccontextmanager
async def _child(
    command: Sequence[str], environ: Mapping[str, str], ask_to_end: Callable[[asyncio.subprocess.Process], None]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, PeakMemory]]:
    """A process with pipes, in a session of its own: Ctrl-C reaches only us, and what is left of it is found."""
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=environ, limit=LONGEST_LINE, start_new_session=True
    )
    try:
        with PeakMemory(process.pid) as memory:
            yield process, memory
    except BaseException:
        # What is interrupted may be far from looking at its input.
        await _end(process, asyncio.subprocess.Process.terminate)
        raise
    await _end(process, ask_to_end)


async def _end(process: asyncio.subprocess.Process, ask_to_end: Callable[[asyncio.subprocess.Process], None]) -> None:
    """Kindly; then by force whatever is left of its session."""
    try:
        if process.returncode is None:
            ask_to_end(process)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _close_input(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()


def process_name(command: str) -> str:
    """What a figure calls a process of any of these systems, by its command line."""
    ours = {f"-m {module}": name for name, module in MODULES.items()} | {"-m blockplane.client": "up"}
    for part, name in ours.items():
        if f"{part} " in f"{command} ":
            return name
    if command.startswith("VLLM::"):
        # So vLLM calls its own.
        return command.removeprefix("VLLM::").lower()
    scripts = [Path(word).stem for word in command.split() if word.endswith(".py")]
    return scripts[0].removeprefix("end_to_end_") if scripts else "helper"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
