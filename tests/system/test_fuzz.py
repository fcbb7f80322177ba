"""Whatever bytes come in on whichever port: a typed error, the process lives, and a batch-mate hears nothing of it."""

import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from queue import SimpleQueue

import grpc
import pytest
from chaos import is_empty
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from mutated_messages import hostile_bytes
from processes import System, running_system, wait_for
from synthetic_oracle import continue_greedily

from blockplane.protos import wire
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.sampling_wire import sampling_to_proto
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1 import inference_pb2
from blockplane.v1.engine_pb2_grpc import EngineStub

SECONDS, CALL_SECONDS = 6.0, 0.3
COLUMN = b"\1\0\0\0\2\0\0\0"
UNTYPED = grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED, grpc.StatusCode.UNIMPLEMENTED
FAULTS = "Traceback", "fault "

ENGINE_CALLS: dict[str, list[Message]] = {
    "AttachFrontend": [
        pb.AttachFrontendRequest(protocol_version=wire.PROTOCOL_VERSION),
        pb.AttachFrontendRequest(
            protocol_version=wire.PROTOCOL_VERSION,
            submissions=[
                pb.Submission(
                    stream_id=1,
                    request_id="a",
                    token_ids=COLUMN,
                    sampling=sampling_to_proto(SamplingParams(4, seed=1, logit_bias=((1, 1.0),), bad_words=((1, 2),))),
                    timeout_seconds=5.0,
                )
            ],
            aborted_stream_ids=COLUMN,
            aborted_request_ids=["a"],
            parked_stream_ids=COLUMN,
            unparked_stream_ids=COLUMN,
            resumptions=[pb.Resumption(stream_id=5, request_id="a")],
        ),
    ],
    "AttachWorker": [
        pb.AttachWorkerRequest(
            hello=pb.WorkerHello(
                protocol_version=wire.PROTOCOL_VERSION,
                model=pb.ModelInfo(name="m", vocab_size=100, max_model_len=2048, eos_token_ids=[99]),
                layers=[pb.LayerKVSpec(name="layers.0.self_attn", num_kv_heads=1, head_dim=8, dtype="float32")],
                available_memory=1 << 24,
                bucket_rules=pb.BucketRules(),
                model_fingerprint=b"another's",
            )
        ),
        pb.AttachWorkerRequest(ready=pb.WorkerReady(num_blocks=100, num_seqs_buckets=[8])),
        pb.AttachWorkerRequest(heartbeat=pb.Heartbeat()),
        pb.AttachWorkerRequest(result=pb.StepResult(step=1, token_ids=COLUMN, num_tokens=COLUMN)),
        pb.AttachWorkerRequest(leaving=pb.Leaving()),
    ],
    "WatchKVEvents": [pb.WatchKVEventsRequest()],
    "ResetPrefixCache": [pb.ResetPrefixCacheRequest()],
    "GetStatistics": [pb.GetStatisticsRequest()],
}
FRONTEND_CALLS: dict[str, list[Message]] = {
    "blockplane.v1.Inference/Generate": [
        inference_pb2.GenerateRequest(
            request_id="b",
            token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
            num_samples=2,
            sampling_params=inference_pb2.SamplingParams(
                max_tokens=4, temperature=1.0, seed=3, stop=["x"], stop_token_ids=[7], logprobs=2, logit_bias={5: 1.0}
            ),
        )
    ],
    "blockplane.v1.Inference/Resume": [inference_pb2.ResumeRequest(request_id="b", from_tokens=[1])],
    "blockplane.v1.Inference/Abort": [inference_pb2.AbortRequest(request_ids=["b"])],
    "blockplane.v1.Inference/GetModelInfo": [inference_pb2.GetModelInfoRequest()],
    "grpc.health.v1.Health/Check": [health_pb2.HealthCheckRequest(service="blockplane.v1.Inference")],
}


def call_with(channel: grpc.Channel, path: str, messages: Sequence[bytes]) -> None:
    """One call with these bytes, whatever its kind; what comes back is read for a while."""
    over = threading.Event()

    def outgoing() -> Iterator[bytes]:
        yield from messages
        over.wait(CALL_SECONDS / 3)

    call = channel.stream_stream(path)(outgoing(), timeout=CALL_SECONDS)
    with suppress(grpc.RpcError):
        # Some streams never end by themselves.
        deque(islice(call, 100), maxlen=0)
    over.set()
    call.cancel()
    assert call.code() not in UNTYPED, f"{path}: {call.details()}"


@contextmanager
def undisturbed_batch_mate(system: System) -> Iterator[None]:
    """Meanwhile somebody generates, again and again, and gets what the model says."""
    prompt, over, texts, errors = [3, 1, 4, 1, 5], threading.Event(), list[list[int]](), list[Exception]()
    expected = continue_greedily(prompt, 30, ignore_eos=True)

    def generate() -> None:
        with system.client() as client:
            while not over.is_set():
                deltas = client.generate(prompt, max_tokens=30, temperature=0, ignore_eos=True)
                texts.append([token_id for delta in deltas for token_id in delta.token_ids])

    def generate_or_tell() -> None:
        try:
            generate()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=generate_or_tell)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert errors == []
    assert len(texts) > 1
    assert all(text == expected for text in texts)


def fuzz(address: str, calls: dict[str, list[Message]], prefix: str, seconds: float) -> None:
    """Valid messages up to some point of a stream, then hostile ones."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, stop_at, num_calls = random.Random(seed), time.monotonic() + seconds, 0
    with grpc.insecure_channel(address) as channel:
        while time.monotonic() < stop_at:
            method, valid = draw.choice([*calls.items()])
            start = draw.randrange(len(valid))
            hostile = [hostile_bytes(draw, message) for message in valid[start:]]
            call_with(channel, f"/{prefix}{method}", [m.SerializeToString() for m in valid[:start]] + hostile)
            num_calls += 1
    assert num_calls > 10
    print(f"{num_calls} calls")


def requests_once_served(channel: grpc.Channel, draw: random.Random, over: threading.Event) -> None:
    """Attach as a frontend, and submit something as soon as there is a worker."""
    is_served = threading.Event()

    def batches() -> Iterator[pb.AttachFrontendRequest]:
        yield pb.AttachFrontendRequest(protocol_version=wire.PROTOCOL_VERSION)
        is_served.wait(5)
        params = sampling_to_proto(SamplingParams(draw.randint(1, 50)))
        submissions = [
            pb.Submission(stream_id=number, request_id=f"{number}", token_ids=COLUMN, sampling=params)
            for number in range(3)
        ]
        yield pb.AttachFrontendRequest(protocol_version=wire.PROTOCOL_VERSION, submissions=submissions)
        over.wait(5)

    call = EngineStub(channel).AttachFrontend(batches(), timeout=5)
    for message in call:
        if message.serving.HasField("model"):
            break
    is_served.set()
    over.wait(5)
    call.cancel()


def fuzz_attached_worker(channel: grpc.Channel, draw: random.Random) -> None:
    """Attach as a worker does, and answer the first plan with what is no answer."""
    over = threading.Event()
    answers: SimpleQueue[bytes | None] = SimpleQueue()
    frontend = threading.Thread(target=requests_once_served, args=(channel, draw, over))
    worker = channel.stream_stream("/blockplane.v1.Engine/AttachWorker")(iter(answers.get, None), timeout=5)
    try:
        hello, *_ = ENGINE_CALLS["AttachWorker"]
        answers.put(hello.SerializeToString())
        told = pb.AttachWorkerResponse.FromString(next(worker)).configure
        names = pb.WorkerReady.DESCRIPTOR.fields_by_name
        ready = pb.AttachWorkerRequest(ready=pb.WorkerReady(**{name: getattr(told, name) for name in names}))
        answers.put(ready.SerializeToString())
        frontend.start()
        next(worker)
        result = pb.StepResult(step=told.last_step + 1, token_ids=COLUMN[: draw.choice([4, 8])], epoch=told.epoch)
        for _ in range(draw.randint(1, 3)):
            answers.put(hostile_bytes(draw, pb.AttachWorkerRequest(result=result)))
        answers.put(None)
        with suppress(grpc.RpcError):
            deque(worker, maxlen=0)
        assert worker.code() not in (*UNTYPED, grpc.StatusCode.DEADLINE_EXCEEDED), worker.details()
    finally:
        over.set()
        answers.put(None)
        worker.cancel()
        frontend.join()


def check_attached_workers(seconds: float) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, stop_at, num_attached = random.Random(seed), time.monotonic() + seconds, 0
    system = System("--max-model-len=2048", "--num-seqs-buckets=8")
    try:
        engine = system.start("engine")
        with grpc.insecure_channel(system.engine_address) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
            while time.monotonic() < stop_at:
                fuzz_attached_worker(channel, draw)
                num_attached += 1
        assert engine.poll() is None
        log = system.log("engine")
        assert not any(fault in log for fault in FAULTS), log[-5000:]
        assert num_attached > 10
        print(f"{num_attached} attached")
    finally:
        system.close()


def check_port(
    address_of: Callable[[System], str], calls: dict[str, list[Message]], prefix: str, seconds: float
) -> None:
    with running_system("--max-model-len=2048", "--num-seqs-buckets=8") as system:
        with undisturbed_batch_mate(system):
            fuzz(address_of(system), calls, prefix, seconds)
        for kind in ("engine", "frontend", "worker"):
            assert [process.poll() for process in system.processes(kind)] == [None], f"the {kind} lives"
            log = system.log(kind)
            assert not any(fault in log for fault in FAULTS), log[-5000:]
        wait_for(lambda: is_empty(system), "nothing is left of what the calls asked for")
        with suppress(StopIteration), system.client() as client:
            next(client.generate([1], max_tokens=1))


def check_engine(seconds: float) -> None:
    check_port(lambda system: system.engine_address, ENGINE_CALLS, "blockplane.v1.Engine/", seconds)


def check_frontend(seconds: float) -> None:
    check_port(lambda system: system.address, FRONTEND_CALLS, "", seconds)


def test_the_engine_takes_any_bytes() -> None:
    check_engine(SECONDS)


def test_the_frontend_takes_any_bytes() -> None:
    check_frontend(SECONDS)


def test_an_attached_worker_may_answer_anything() -> None:
    check_attached_workers(SECONDS)


@pytest.mark.slow
def test_an_attached_worker_may_answer_anything_for_a_minute() -> None:
    check_attached_workers(60)


@pytest.mark.slow
def test_the_engine_takes_any_bytes_for_a_minute() -> None:
    check_engine(60)


@pytest.mark.slow
def test_the_frontend_takes_any_bytes_for_a_minute() -> None:
    check_frontend(60)
