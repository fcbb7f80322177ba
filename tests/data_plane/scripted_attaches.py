"""An engine that does with each attach of a worker what a script says, over a real socket. Knows no scheduler."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from blockplane.data_plane.place import Single
from blockplane.data_plane.runner import Runner
from blockplane.data_plane.served_model import ServedModel
from blockplane.data_plane.worker import Worker
from blockplane.protos import wire
from blockplane.protos.plan import Admission, Configure, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

CONFIGURE = Configure(4, 16, 64, num_batched_tokens_buckets=(16,), num_seqs_buckets=(2,))
PROMPT = [7, 8, 9, 10, 11]


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def prefill(
    step: int, prompt: list[int] = PROMPT, num_cached: int = 0, params: SamplingParams | None = None
) -> StepPlan:
    """A prompt takes row 1 and blocks 1 to 4, and all that is not cached of it is computed."""
    params = params or SamplingParams(9, ignore_eos=True)
    return StepPlan(
        step,
        admissions=(Admission(1, column(*prompt), len(prompt), num_cached, params, 5),),
        block_rows=np.full(4, 1, np.int32),
        block_ids=column(1, 2, 3, 4),
        prefill_rows=column(1),
        prefill_num_tokens=column(len(prompt) - num_cached),
    )


def decode(step: int) -> StepPlan:
    return StepPlan(step, decode_rows=column(1))


class Attach:
    """One attach as the engine sees it: messages by kind, heartbeats counted and left out; `hello` came before."""

    hello: pb.WorkerHello

    def __init__(self, requests: Iterator[pb.AttachWorkerRequest], context: grpc.ServicerContext) -> None:
        self.context = context
        self.num_heartbeats = 0
        self._requests = requests

    def next(self, *kinds: str) -> pb.AttachWorkerRequest:
        """The next message, which is of one of these."""
        for message in self._requests:
            if message.WhichOneof("message") != "heartbeat":
                assert message.WhichOneof("message") in kinds, message
                return message
            self.num_heartbeats += 1
        raise AssertionError(f"the stream ended before a {' or '.join(kinds)}")

    def result(self) -> StepResult:
        return wire.result_from_proto(self.next("result").result)

    def configure(self, configure: Configure = CONFIGURE) -> Iterator[pb.AttachWorkerResponse]:
        """Tell it what to build, and wait until it has."""
        yield pb.AttachWorkerResponse(configure=wire.configure_to_proto(configure))
        self.next("ready")

    def lose(self) -> None:
        self.context.abort(grpc.StatusCode.UNAVAILABLE, "lost.")


Script = Callable[[Attach], Iterator[pb.AttachWorkerResponse]]


def plan(plan: StepPlan) -> pb.AttachWorkerResponse:
    return pb.AttachWorkerResponse(plan=wire.plan_to_proto(plan))


class ScriptedEngine(EngineServicer):
    """Gives each attach the next script; whoever comes after the last is refused for good.

    Attributes:
        hellos, attaches: in their order. errors: what went wrong in scripts.
    """

    def __init__(self, *scripts: Script) -> None:
        self.hellos: list[pb.WorkerHello] = []
        self.attaches: list[Attach] = []
        self.errors: list[AssertionError] = []
        self._scripts = list(scripts)

    def AttachWorker(  # noqa: N802
        self, requests: Iterator[pb.AttachWorkerRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachWorkerResponse]:
        attach = Attach(requests, context)
        attach.hello = attach.next("hello").hello
        self.hellos.append(attach.hello)
        self.attaches.append(attach)
        if not self._scripts:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "that was all.")
        try:
            yield from self._scripts.pop(0)(attach)
        except AssertionError as error:
            self.errors.append(error)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"the script failed: {error!r}")


@contextmanager
def listening(engine: EngineServicer, num_streams: int = 2) -> Iterator[str]:
    """Serve the engine, to so many streams at once; gives its address."""
    server = grpc.server(ThreadPoolExecutor(num_streams))
    add_EngineServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def lone_worker(*model: Any, serves: bool = True, **options: Any) -> Worker:
    """A worker that is a group by itself; the rest is what `ServedModel` takes."""
    return Worker(Single(ServedModel(*model, **options)), serves=serves)


def runner_of(worker: Worker) -> Runner:
    """What it has built."""
    model = worker._place.model
    assert model is not None
    assert model.kept.runner is not None
    return model.kept.runner


class Told(threading.Event):
    """Something that a script waits for, and not for ever."""

    def wait(self, timeout: float | None = 20) -> bool:
        assert super().wait(timeout), "waited in vain"
        return True
