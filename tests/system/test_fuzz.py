"""Whatever bytes come in on whichever port: a typed error, the process lives, and a batch-mate hears nothing of it."""

import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue

import grpc
import pytest
from chaos import is_empty
from fuzzing import FAULTS, UNTYPED, assert_all_live, assert_serves, fuzz, undisturbed_batch_mate
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from mutated_messages import hostile_bytes
from processes import System, running_system, wait_for
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from blockplane.protos import wire
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.sampling_wire import sampling_to_proto
from blockplane.v1 import admin_pb2, inference_pb2
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.admin_pb2_grpc import AdminStub
from blockplane.v1.engine_pb2_grpc import EngineStub

SECONDS = 6.0
COLUMN = b"\1\0\0\0\2\0\0\0"

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
ADMIN_CALLS: dict[str, list[Message]] = {
    "ListWorkers": [admin_pb2.ListWorkersRequest()],
    "DrainWorker": [admin_pb2.DrainWorkerRequest(group=7)],
    "UndrainWorker": [admin_pb2.UndrainWorkerRequest(group=0)],
    "ReloadWeights": [admin_pb2.ReloadWeightsRequest(model="no such model")],
    "GetSteps": [admin_pb2.GetStepsRequest(num_steps=3)],
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
    "vllm.grpc.engine.VllmEngine/Generate": [
        vllm.GenerateRequest(
            request_id="c",
            tokenized=vllm.TokenizedInput(original_text="x", input_ids=[1, 2, 3]),
            stream=True,
            sampling_params=vllm.SamplingParams(
                max_tokens=4,
                temperature=1.0,
                seed=3,
                stop=["x"],
                stop_token_ids=[7],
                logprobs=2,
                n=2,
                logit_bias={5: 1.0},
            ),
        )
    ],
    "vllm.grpc.engine.VllmEngine/Abort": [vllm.AbortRequest(request_ids=["c"])],
    "vllm.grpc.engine.VllmEngine/GetLoads": [vllm.GetLoadsRequest(dp_rank=0, include=["core"])],
    "vllm.grpc.engine.VllmEngine/GetTokenizer": [common.GetTokenizerRequest()],
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": [common.SubscribeKvEventsRequest()],
    "vllm.grpc.engine.VllmEngine/FlushCache": [common.FlushCacheRequest(timeout_s=1.0)],
    "grpc.health.v1.Health/Check": [health_pb2.HealthCheckRequest(service="blockplane.v1.Inference")],
}


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
        assert_all_live(system)
        wait_for(lambda: is_empty(system), "nothing is left of what the calls asked for")
        with suppress(StopIteration), system.client() as client:
            next(client.generate([1], max_tokens=1))


def check_engine(seconds: float) -> None:
    check_port(lambda system: system.engine_address, ENGINE_CALLS, "blockplane.v1.Engine/", seconds)


def check_admin(seconds: float) -> None:
    """Some calls are sound by chance, and empty the one worker there is: it serves on once it is told to."""
    with running_system("--max-model-len=2048", "--num-seqs-buckets=8") as system:
        fuzz(system.engine_address, ADMIN_CALLS, "blockplane.v1.Admin/", seconds)
        assert_all_live(system)
        with grpc.insecure_channel(system.engine_address) as channel:
            AdminStub(channel).UndrainWorker(admin_pb2.UndrainWorkerRequest(group=0))
        assert_serves(system)


def check_frontend(seconds: float) -> None:
    check_port(lambda system: system.address, FRONTEND_CALLS, "", seconds)


def test_the_engine_takes_any_bytes() -> None:
    check_engine(SECONDS)


def test_operators_port_takes_any_bytes() -> None:
    check_admin(SECONDS / 2)


def test_the_frontend_takes_any_bytes() -> None:
    check_frontend(SECONDS)


def test_an_attached_worker_may_answer_anything() -> None:
    check_attached_workers(SECONDS)


@pytest.mark.slow
def test_an_attached_worker_may_answer_anything_for_a_minute() -> None:
    check_attached_workers(60)


@pytest.mark.slow
def test_operators_port_takes_any_bytes_for_a_minute() -> None:
    check_admin(60)


@pytest.mark.slow
def test_the_engine_takes_any_bytes_for_a_minute() -> None:
    check_engine(60)


@pytest.mark.slow
def test_the_frontend_takes_any_bytes_for_a_minute() -> None:
    check_frontend(60)
