"""The worker's gRPC edge: dials the engine, takes its configuration and plans, answers. Knows not what a step does."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import grpc

from blockplane.data_plane.attention import BUCKET_RULES
from blockplane.data_plane.kv_cache import layer_kv_specs
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.runner import Runner
from blockplane.protos import wire
from blockplane.protos.channel import PEER_OPTIONS, RECONNECT_SECONDS
from blockplane.protos.errors import ProtocolError, error_of_status
from blockplane.protos.model import ModelInfo
from blockplane.v1 import engine_pb2 as pb
from blockplane.v1.engine_pb2_grpc import EngineStub

logger = logging.getLogger(__name__)

_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses of a stream that say nothing against this worker: the engine is away, restarting, or has another worker."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A loaded model that serves whichever engine it is attached to.

    Attributes:
        available_memory: bytes that it gives to KV, its draft model's too.
        num_draft_tokens, draft_model: as `Runner` has them; the draft model's vocabulary is the model's.
    """

    model: Model
    info: ModelInfo
    available_memory: int
    num_draft_tokens: int = 0
    draft_model: Model | None = None

    def serve(self, engine_address: str) -> None:
        """Attach, compute until the stream ends, attach again, for ever.

        Raises:
            BlockplaneError: the engine refuses this worker for good; the message is the engine's.
        """
        last_reason = None
        while True:
            try:
                with grpc.insecure_channel(engine_address, options=PEER_OPTIONS) as channel:
                    self._serve_attached(channel)
                reason = "the engine closed the stream"
            except grpc.RpcError as error:
                if error.code() not in _PASSING:
                    raise error_of_status(error.code(), error.details() or "") from None
                reason = error.details() or ""
            except ProtocolError as error:
                reason = str(error)
            if reason != last_reason:
                logger.warning("not attached to %s: %s; trying again", engine_address, reason)
            last_reason = reason
            time.sleep(RECONNECT_SECONDS)

    def _serve_attached(self, channel: grpc.Channel) -> None:
        """One attach, from hello to the stream's end."""
        answers: SimpleQueue[pb.AttachWorkerRequest | None] = SimpleQueue()
        answers.put(pb.AttachWorkerRequest(hello=self._hello()))
        stream = EngineStub(channel).AttachWorker(iter(answers.get, None))
        try:
            for answer in self._answers(stream):
                answers.put(answer)
        finally:
            answers.put(None)
            stream.cancel()

    def _answers(self, messages: Iterator[pb.AttachWorkerResponse]) -> Iterator[pb.AttachWorkerRequest]:
        """Answer in order: ready to the configuration, a result to each plan, however many plans are there already."""
        first = next(messages, None)
        if first is None:
            return
        runner = Runner(
            self.model,
            wire.configure_from_proto(first.configure),
            self.info.eos_token_ids,
            num_draft_tokens=self.num_draft_tokens,
            draft_model=self.draft_model,
        )
        yield pb.AttachWorkerRequest(ready=_ready(runner))
        logger.info("attached, with %d KV blocks", runner.configure.num_blocks)
        for message in messages:
            result = runner.step(wire.plan_from_proto(message.plan))
            yield pb.AttachWorkerRequest(result=wire.result_to_proto(result))

    def _hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(
            protocol_version=wire.PROTOCOL_VERSION,
            model=wire.model_info_to_proto(self.info),
            layers=[wire.layer_to_proto(spec) for spec in layer_kv_specs(self.model, self.draft_model)],
            available_memory=self.available_memory,
            bucket_rules=wire.bucket_rules_to_proto(BUCKET_RULES),
        )


def _ready(runner: Runner) -> pb.WorkerReady:
    """The manifest of what was built, for the engine to compare with what it asked for."""
    configure, shapes = runner.configure, runner.graphs.num_runs.keys()
    return pb.WorkerReady(
        num_blocks=configure.num_blocks,
        num_batched_tokens_buckets=sorted(shape.num_tokens for shape in shapes if not shape.num_seqs),
        num_seqs_buckets=sorted({shape.num_seqs for shape in shapes} - {0}),
        decode_context_length_buckets=sorted({shape.context_len for shape in shapes} - {0}),
        kv_segment_size=configure.kv_segment_size,
        num_draft_tokens=configure.num_draft_tokens,
    )
