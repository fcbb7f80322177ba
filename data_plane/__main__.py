"""`blockplane worker`: loads the model onto this machine's device and starts the worker process."""

import os
import signal
import sys
from threading import Thread
from types import FrameType

# Read once, as torch loads. Threads that wait for each other by spinning take the cores from engine and frontend, and
# stall for whole time slices where any other process runs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from blockplane.data_plane.backends.choice import chosen_backend
from blockplane.data_plane.freed_memory import keep_freed_memory
from blockplane.data_plane.loaded_worker import loaded_worker
from blockplane.data_plane.record import Record
from blockplane.data_plane.worker import Worker
from blockplane.kernels.native import library as native
from blockplane.protos.access import access_of
from blockplane.protos.config import Config
from blockplane.protos.metrics_port import MetricsPort
from blockplane.protos.process import run_process
from blockplane.protos.threads import num_usable_cores


def serve(config: Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    metrics_port = MetricsPort(config, "worker") if config.metrics_address else None
    num_threads = config.num_threads or num_usable_cores()
    torch.set_num_threads(num_threads)
    native.set_num_threads(num_threads)
    record = Record(config.record) if config.record else None
    worker = loaded_worker(config, chosen_backend(config), record)
    keep_freed_memory()
    if metrics_port is not None:
        metrics_port.add(worker.metrics)
        metrics_port.tell_ready(lambda: worker.is_attached)
    _leave_when_told(worker, config.drain_seconds)
    worker.serve(config.engine_address, access_of(config))


def _leave_when_told(worker: Worker, drain_seconds: int) -> None:
    """The first signal lets the engine finish what needs this worker; a second one, or an alarm, ends it at once."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(each, signal.default_int_handler)
        if not drain_seconds or not worker.leave():
            raise KeyboardInterrupt
        signal.alarm(drain_seconds)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    _hear_signals(worker)


def _hear_signals(worker: Worker) -> None:
    """Have a thread learn of signals: the main one learns of none while it waits for other ranks."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def hear() -> None:
        while os.read(reader, 1):
            worker.told_to_end()

    Thread(target=hear, name="signals", daemon=True).start()


if __name__ == "__main__":
    sys.exit(run_process("worker", "Loads the model and computes what the engine plans.", serve))
