"""The processes between which benchmarks/wire.py measures: engine, frontend, and workers without a model.

    python benchmarks/wire_peers.py KIND ADDRESS [SETTINGS AS JSON]

Each prints a line of JSON once it is up, then one for each line of JSON on its standard input, with whose end it ends.
What is compared, and with what, they do not know.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
from timed_engine import BLOCK_SIZE, MAX_NUM_SEQS, PING, serve_engine

from blockplane.protos import delivery_wire, wire
from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.delivery import FrontendBatch, Submission
from blockplane.protos.model import GenerationDefaults, ModelInfo
from blockplane.protos.plan import Configure, StepPlan, StepResult
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

VOCAB_SIZE, TOKEN_ID, MAX_PROMPT_LENGTH = 256, 7, 384
LAYER = pb.LayerKVSpec(name="layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32")
BYTES_PER_BLOCK = 2 * BLOCK_SIZE * 8 * 4


class Frontend:
    """Keeps as many streams open as it is told, and drops what they bring."""

    def __init__(self, address: str, max_model_len: int) -> None:
        self._max_tokens = max_model_len - MAX_PROMPT_LENGTH
        self._random = np.random.default_rng(0)
        self._num_streams = 0
        self._is_serving = threading.Event()
        self._batches: SimpleQueue[FrontendBatch] = SimpleQueue()
        self._batches.put(FrontendBatch())
        self._channel = grpc.insecure_channel(address, options=PEER_OPTIONS)

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        say({})
        for told in commands():
            self._is_serving.wait()
            new = range(self._num_streams, told["num_streams"])
            self._batches.put(FrontendBatch(tuple(map(self._submission, new))))
            self._num_streams = told["num_streams"]

    def _read(self) -> None:
        batches = (delivery_wire.frontend_batch_to_proto(self._batches.get()) for _ in count())
        for message in EngineStub(self._channel).AttachFrontend(batches):
            if message.serving.HasField("model"):
                self._is_serving.set()

    def _submission(self, stream_id: int) -> Submission:
        """A prompt of random length, so that rows reach new blocks at random phases, and a text that never ends."""
        prompt = self._random.integers(
            VOCAB_SIZE - 1, size=self._random.integers(128, MAX_PROMPT_LENGTH), dtype=np.int32
        )
        params = SamplingParams(self._max_tokens, ignore_eos=True)
        return Submission(stream_id, f"request-{stream_id}", prompt, params)


class Script:
    """What a worker answers to plans if every row samples one token: knows how much of each prompt is left."""

    def __init__(self, configure: Configure) -> None:
        self._epoch = configure.epoch
        self._num_left: dict[int, int] = {}
        self.num_decodes = 0

    def answer(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self._num_left[admission.row] = len(admission.token_ids) - admission.num_computed_tokens
        num_sampled = 0
        for row, num_tokens in zip(plan.prefill_rows.tolist(), plan.prefill_num_tokens.tolist(), strict=True):
            self._num_left[row] -= num_tokens
            num_sampled += not self._num_left[row]
        if plan.decode_rows is not None:
            self.num_decodes = len(plan.decode_rows)
        token_ids = np.full(self.num_decodes + num_sampled, TOKEN_ID, np.int32)
        return StepResult(plan.step, token_ids, epoch=self._epoch)


class ScriptedWorker:
    """A worker whose steps take no time, or that of a sleep.

    Where the engine plans ahead it answers a plan once the next is there, so that each plan's way and the next answer's
    way back are one after the other, and nothing else is on its way.
    """

    def __init__(self, address: str, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._channel = grpc.insecure_channel(address, options=PEER_OPTIONS)
        self._answers: SimpleQueue[pb.AttachWorkerRequest | None] = SimpleQueue()
        self._unanswered: deque[pb.StepPlan] = deque()
        self._num_bytes = 0, 0
        self._step_seconds = 0.0
        self._own: list[float] = []
        self._own_in_pings: list[float] = []

    def run(self) -> None:
        self._attach()
        for told in commands():
            self._step_seconds = told["step_seconds"]
            while self._script.num_decodes != told["num_rows"] or self._unanswered[-1].prefill_rows:
                self._step()
            is_ahead = self._plan_ahead()
            for _ in range(told["num_steps"]):
                self._step()
            # What steps took before the first turn is nobody's.
            self._ping(1)
            self._own, self._own_in_pings = [], []
            for _ in range(told["num_turns"]):
                for _ in range(told["num_steps"]):
                    self._step()
                self._ping(told["num_steps"])
            say({"own": self._own, "own_in_pings": self._own_in_pings, "is_ahead": is_ahead})

    def _attach(self) -> None:
        model = ModelInfo("m", VOCAB_SIZE, self._max_model_len, (VOCAB_SIZE - 1,), None, b"", GenerationDefaults())
        hello = pb.WorkerHello(
            protocol_version=wire.PROTOCOL_VERSION,
            model=wire.model_info_to_proto(model),
            layers=[LAYER],
            available_memory=BYTES_PER_BLOCK * (1 + MAX_NUM_SEQS * self._max_model_len // BLOCK_SIZE),
        )
        self._answers.put(pb.AttachWorkerRequest(hello=hello))
        self._plans = EngineStub(self._channel).AttachWorker(iter(self._answers.get, None))
        told = next(self._plans).configure
        self._script = Script(wire.configure_from_proto(told))
        names = pb.WorkerReady.DESCRIPTOR.fields_by_name
        self._answers.put(pb.AttachWorkerRequest(ready=pb.WorkerReady(**{name: getattr(told, name) for name in names})))
        if told.heartbeat_milliseconds:
            threading.Thread(target=self._beat, args=(told.heartbeat_milliseconds / 1000,), daemon=True).start()
        say({})
        self._unanswered.append(next(self._plans).plan)

    def _beat(self, seconds: float) -> None:
        while True:
            time.sleep(seconds)
            self._answers.put(pb.AttachWorkerRequest(heartbeat=pb.Heartbeat()))

    def _plan_ahead(self) -> bool:
        """Find out whether the engine sends a plan beyond the one that is unanswered, and keep it if so."""
        with ThreadPoolExecutor(1) as reader:
            if len(self._unanswered) > 1:
                return True
            coming = reader.submit(next, self._plans)
            try:
                self._unanswered.append(coming.result(timeout=0.2).plan)
                return True
            except TimeoutError:
                self._answer()
                self._unanswered.append(coming.result().plan)
                return False

    def _step(self) -> None:
        """Answer the oldest plan and take the next."""
        self._answer()
        plan = next(self._plans).plan
        self._received = time.perf_counter()
        self._unanswered.append(plan)

    def _answer(self) -> None:
        received = getattr(self, "_received", time.perf_counter())
        plan = self._unanswered.popleft()
        result = wire.result_to_proto(self._script.answer(wire.plan_from_proto(plan)))
        time.sleep(self._step_seconds)
        self._answers.put(pb.AttachWorkerRequest(result=result))
        self._own.append(time.perf_counter() - received)
        self._num_bytes = plan.ByteSize(), result.ByteSize()

    def _ping(self, num_pings: int) -> None:
        """The same number of bytes each way as the last step's, without our messages and our engine."""
        num_plan_bytes, num_result_bytes = self._num_bytes
        pongs: SimpleQueue[bytes | None] = SimpleQueue()
        pongs.put(json.dumps({"num_bytes": num_plan_bytes, "num_pings": num_pings}).encode())
        pong = bytes(num_result_bytes)
        for _ in self._channel.stream_stream(PING)(iter(pongs.get, None)):
            received = time.perf_counter()
            time.sleep(self._step_seconds)
            pongs.put(pong)
            self._own_in_pings.append(time.perf_counter() - received)
        pongs.put(None)
        # The way back from a ping is no step's own time.
        self._received = time.perf_counter()


def serve_steps(address: str, max_model_len: int, step_seconds: float) -> None:
    """The real worker around steps that only take time.

    It tells how long it had no plan before each, by its own clock, and how long no step ran, as a device would see it.
    """
    from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
    from blockplane.data_plane.place import Single
    from blockplane.data_plane.runner import Runner
    from blockplane.data_plane.served_model import ServedModel
    from blockplane.data_plane.worker import Worker

    steps: SimpleQueue[tuple[int, float, float]] = SimpleQueue()
    model = ServedModel(SyntheticModel("bfloat16"), synthetic_model_info(max_model_len), 1 << 29)
    worker = Worker(Single(model))
    script: Script | None = None
    ended = time.perf_counter()

    def step(runner: Runner, plan: StepPlan) -> StepResult:
        nonlocal script, ended
        still = time.perf_counter() - ended
        script = script or Script(runner.configure)
        result = script.answer(plan)
        steps.put((script.num_decodes, still, worker.pace.idle_seconds))
        time.sleep(step_seconds)
        ended = time.perf_counter()
        runner.marks = (time.monotonic_ns(),) * 3
        return result

    def tell() -> None:
        say({})
        for told in commands():
            while steps.get()[0] != told["num_rows"]:
                pass
            for _ in range(told["num_steps"]):
                *_, last = steps.get()
            measured = [steps.get() for _ in range(told["num_steps"] * told["num_turns"])]
            waits = np.diff([last, *(total for _, _, total in measured)]).tolist()
            say({"waits": waits, "still": [still for _, still, _ in measured]})
        os._exit(0)

    Runner.step = step  # type: ignore[method-assign]
    threading.Thread(target=tell, daemon=True).start()
    worker.serve(address)


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


KINDS: dict[str, Callable[..., None]] = {
    "engine": lambda address, max_model_len: asyncio.run(serve_engine(address, max_model_len)),
    "frontend": lambda address, max_model_len: Frontend(address, max_model_len).run(),
    "scripted_worker": lambda address, max_model_len: ScriptedWorker(address, max_model_len).run(),
    "slow_worker": serve_steps,
}

if __name__ == "__main__":
    kind, address, *settings = sys.argv[1:]
    KINDS[kind](address, **json.loads(settings[0] if settings else "{}"))
