"""A server of `blockplane.v1.Inference` that answers as it is told; no engine is behind it."""

import threading
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2

from blockplane.client.dialling import SERVICE
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceServicer

WAIT_SECONDS = 60.0


@dataclass
class FakeInference(InferenceServicer):
    """Streams `responses`, then goes on until the client leaves if `endless`, or ends as `failure` says.

    A failure brings `trailing_metadata` along. `parts` are the calls that end before that, Generate or Resume, each
    with its responses and how it fails.
    """

    responses: tuple[pb.GenerateResponse, ...] = ()
    failure: tuple[grpc.StatusCode, str] | None = None
    trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
    endless: bool = False
    parts: list[tuple[tuple[pb.GenerateResponse, ...], tuple[grpc.StatusCode, str] | None]] = field(
        default_factory=list
    )
    resumptions: list[pb.ResumeRequest] = field(default_factory=list)
    callers: list[object] = field(default_factory=list)
    tokens: list[object] = field(default_factory=list)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    model: pb.GetModelInfoResponse = field(
        default_factory=lambda: pb.GetModelInfoResponse(
            name="fake", vocab_size=300, max_model_len=64, eos_token_ids=[1, 2]
        )
    )
    model_info_failures: list[tuple[grpc.StatusCode, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request, context):  # noqa: N802 - named by the .proto
        self.requests.append(request)
        yield from self._stream(context)

    def Resume(self, request, context):  # noqa: N802 - named by the .proto
        self.resumptions.append(request)
        yield from self._stream(context)

    def _note(self, context):
        metadata = dict(context.invocation_metadata())
        self.callers.append(metadata.get("blockplane-caller"))
        self.tokens.append(metadata.get("authorization"))

    def _stream(self, context):
        self._note(context)
        if self.parts:
            responses, failure = self.parts.pop(0)
            yield from responses
            if failure is not None:
                context.set_trailing_metadata(self.trailing_metadata)
                context.abort(*failure)
            return
        yield from self.responses
        if self.failure is not None:
            context.set_trailing_metadata(self.trailing_metadata)
            context.abort(*self.failure)
        if self.endless:
            context.add_callback(self.cancelled.set)
            while not self.cancelled.wait(0.01):
                yield pb.GenerateResponse(token_ids=[7], text="x")

    def Abort(self, request, context):  # noqa: N802 - named by the .proto
        self._note(context)
        self.aborted.extend(request.request_ids)
        return pb.AbortResponse()

    def GetModelInfo(self, request, context):  # noqa: N802 - named by the .proto
        self._note(context)
        if self.model_info_failures:
            context.abort(*self.model_info_failures.pop())
        return self.model


@dataclass(frozen=True)
class FakeServer:
    """A FakeInference on a real socket."""

    address: str
    inference: FakeInference
    health: health.HealthServicer

    def set_serving(self, serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        self.health.set(SERVICE, statuses.SERVING if serving else statuses.NOT_SERVING)
