"""The worker's gRPC edge over a real socket, with an engine that does not wait for answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from scripted_attaches import lone_worker
from synthetic_oracle import continue_greedily

from blockplane.data_plane.models.synthetic import SyntheticModel, synthetic_model_info
from blockplane.data_plane.models.synthetic_arithmetic import EOS_TOKEN_ID
from blockplane.protos import wire
from blockplane.protos.errors import ConfigurationError
from blockplane.protos.plan import Admission, Configure, StepPlan
from blockplane.protos.sampling import SamplingParams
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

CONFIGURE = Configure(4, 16, 64, num_batched_tokens_buckets=(16,), num_seqs_buckets=(2,))
PROMPT = [7, 8, 9, 10, 11]


class HastyEngine(EngineServicer):
    """Sends its configuration and all plans before it reads an answer, then refuses the worker for good."""

    def __init__(self, configure: Configure, plans: list[StepPlan]) -> None:
        self.plans = plans
        self.configure = configure
        self.answers: list[pb.AttachWorkerRequest] = []

    def AttachWorker(  # noqa: N802
        self, requests: Iterator[pb.AttachWorkerRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachWorkerResponse]:
        yield pb.AttachWorkerResponse(configure=wire.configure_to_proto(self.configure))
        for plan in self.plans:
            yield pb.AttachWorkerResponse(plan=wire.plan_to_proto(plan))
        for _ in range(2 + len(self.plans)):
            self.answers.append(next(requests))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "that was all.")


def serve(engine: HastyEngine) -> None:
    """Serve the engine until it refuses the worker."""
    server = grpc.server(ThreadPoolExecutor(1))
    add_EngineServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ConfigurationError, match=r"that was all\."):
            lone_worker(SyntheticModel("float32"), synthetic_model_info(64), 1 << 20).serve(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


def test_plans_that_are_sent_before_any_answer_is_read_are_answered_in_order() -> None:
    first = StepPlan(
        1,
        admissions=(Admission(1, np.array(PROMPT, np.int32), len(PROMPT), 0, SamplingParams(1), 0),),
        block_rows=np.full(4, 1, np.int32),
        block_ids=np.arange(1, 5, dtype=np.int32),
        prefill_rows=np.array([1], np.int32),
        prefill_num_tokens=np.array([len(PROMPT)], np.int32),
    )
    steady = [StepPlan(step) for step in range(3, 9)]
    engine = HastyEngine(CONFIGURE, [first, StepPlan(2, decode_rows=np.array([1], np.int32)), *steady])
    serve(engine)
    hello, ready, *results = engine.answers
    assert hello.hello.protocol_version == wire.PROTOCOL_VERSION
    assert hello.hello.bucket_rules.prefill_multiple_of == 1
    assert [layer.name for layer in hello.hello.layers] == [f"layers.{index}.self_attn" for index in range(3)]
    assert ready.ready == pb.WorkerReady(
        num_blocks=16, num_batched_tokens_buckets=[16], num_seqs_buckets=[2], kv_segment_size=512
    )
    answers = [wire.result_from_proto(result.result) for result in results]
    assert [answer.step for answer in answers] == list(range(1, 9))
    assert [int(answer.token_ids[0]) for answer in answers] == continue_greedily(PROMPT, 8, ignore_eos=True)


def test_the_model_s_end_of_text_does_not_come_before_min_tokens() -> None:
    params = SamplingParams(9, min_tokens=2, logit_bias=((EOS_TOKEN_ID, 100.0),))
    first = StepPlan(
        1,
        admissions=(Admission(1, np.array(PROMPT, np.int32), len(PROMPT), 0, params, 0),),
        block_rows=np.full(4, 1, np.int32),
        block_ids=np.arange(1, 5, dtype=np.int32),
        prefill_rows=np.array([1], np.int32),
        prefill_num_tokens=np.array([len(PROMPT)], np.int32),
    )
    engine = HastyEngine(CONFIGURE, [first, StepPlan(2, decode_rows=np.array([1], np.int32)), StepPlan(3)])
    serve(engine)
    token_ids = [int(wire.result_from_proto(answer.result).token_ids[0]) for answer in engine.answers[-3:]]
    assert [token_id == EOS_TOKEN_ID for token_id in token_ids] == [False, False, True]
