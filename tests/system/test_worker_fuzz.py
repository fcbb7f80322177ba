"""Whatever bytes an engine sends a worker: the worker says what is wrong with them, lives, and attaches again."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import grpc
import numpy as np
import pytest
from mutated_messages import hostile_bytes
from processes import System
from synthetic_oracle import continue_greedily

from blockplane.protos import wire
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb

SECONDS, ANSWER_SECONDS = 6.0, 10
PROMPT = [7, 8, 9, 10, 11]
CONFIGURE = Configure(4, 64, 64, num_batched_tokens_buckets=(16,), num_seqs_buckets=(2,), heartbeat_milliseconds=100)
PLANS = [
    StepPlan(
        1,
        admissions=(Admission(1, np.array(PROMPT, np.int32), len(PROMPT), 0, SamplingParams(9), 0),),
        block_rows=np.full(4, 1, np.int32),
        block_ids=np.arange(1, 5, dtype=np.int32),
        prefill_rows=np.array([1], np.int32),
        prefill_num_tokens=np.array([len(PROMPT)], np.int32),
    ),
    StepPlan(2, decode_rows=np.array([1], np.int32)),
    StepPlan(3),
    StepPlan(4, block_rows=np.array([1], np.int32), block_ids=np.array([5], np.int32)),
]


def encoded(configure: Configure) -> list[pb.AttachWorkerResponse]:
    return [
        pb.AttachWorkerResponse(configure=wire.configure_to_proto(configure)),
        *(pb.AttachWorkerResponse(plan=wire.plan_to_proto(plan)) for plan in PLANS),
    ]


class HostileEngine(grpc.GenericRpcHandler):
    """Sends every worker that attaches what the test says, then ends the stream. Keeps what the worker answered.

    What it sends comes with the number of answers that are sure to come.
    """

    def __init__(self) -> None:
        self.to_send: SimpleQueue[tuple[list[bytes], int]] = SimpleQueue()
        self.answered: SimpleQueue[list[pb.AttachWorkerRequest]] = SimpleQueue()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(self._attach)

    def _attach(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        (messages, num_sure), answers = self.to_send.get(), list[pb.AttachWorkerRequest]()
        yield from messages
        # One answer for each, or a word on what is wrong; a hostile message may be one that asks for none.
        stop_at = time.monotonic() + 0.5
        with suppress(grpc.RpcError):
            for data in requests:
                answer = pb.AttachWorkerRequest.FromString(data)
                kind = answer.WhichOneof("message")
                if kind != "heartbeat":
                    answers.append(answer)
                if len(answers) == len(messages) or kind == "fault":
                    break
                if len(answers) >= num_sure and time.monotonic() > stop_at:
                    break
        self.answered.put(answers)
        context.abort(grpc.StatusCode.UNAVAILABLE, "that was all.")


def check_worker(seconds: float) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, num_attached, num_faults = random.Random(seed), 0, 0
    system, engine = System("--max-model-len=64"), HostileEngine()
    server = grpc.server(ThreadPoolExecutor(4), handlers=[engine])
    server.add_insecure_port(system.engine_address)
    server.start()

    def attach(valid: list[pb.AttachWorkerResponse], hostile: Sequence[bytes] = ()) -> list[pb.AttachWorkerRequest]:
        engine.to_send.put(([*(message.SerializeToString() for message in valid), *hostile], len(valid)))
        return engine.answered.get(timeout=ANSWER_SECONDS)

    worker = system.start("worker")
    try:
        attach(encoded(CONFIGURE))
        stop_at = time.monotonic() + seconds
        while time.monotonic() < stop_at:
            valid = encoded(CONFIGURE)
            start = draw.choice([0, 1, 1, 2, 3, 4])
            hostile = [hostile_bytes(draw, message) for message in valid[start : start + 2]]
            answers = attach(valid[:start], hostile)
            num_faulty = sum(answer.WhichOneof("message") == "fault" for answer in answers)
            assert len(answers) - num_faulty >= start, "what is valid is answered"
            num_attached += 1
            num_faults += num_faulty
        *_, first, second, third, fourth = attach(encoded(CONFIGURE))
        token_ids = [wire.result_from_proto(answer.result).token_ids[0] for answer in (first, second, third, fourth)]
        assert token_ids == continue_greedily(PROMPT, 4, ignore_eos=True)
        assert worker.poll() is None
        log = system.log("worker")
        assert "Traceback" not in log, log[-5000:]
        assert num_faults > 2
        print(f"{num_attached} attached, {num_faults} faults")
    except BaseException:
        print(f"the worker's status is {worker.poll()}; its log:\n{system.log('worker')[-5000:]}")
        raise
    finally:
        system.close()
        server.stop(None).wait()


def test_a_worker_takes_any_bytes() -> None:
    check_worker(SECONDS)


@pytest.mark.slow
def test_a_worker_takes_any_bytes_for_a_minute() -> None:
    check_worker(60)
