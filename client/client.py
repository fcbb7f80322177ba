"""The Python client of `blockplane.v1.Inference`, synchronous and typed; knows neither terminals nor processes."""

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing
from types import TracebackType
from typing import Self

from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from blockplane.client.attempts import Attempts
from blockplane.client.dialling import CHANNEL_OPTIONS, PLAIN, SERVICE, call_metadata
from blockplane.client.failures import typed_errors
from blockplane.client.requests import Generation, generation, takes
from blockplane.client.values import Delta, ServedModel, delta_from_proto, served_model_from_proto
from blockplane.protos.access import Access
from blockplane.protos.errors import BlockplaneError, DeadlineError, UnavailableError
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub


class Client:
    """One connection to a frontend; made when first used, and made again when lost.

    Its calls raise the errors of `blockplane.protos.errors` and no other: the server's refusals with the server's
    sentence, UnavailableError where no server answers. Any thread may call it. What it sends again by itself is told
    at `AsyncClient`.
    """

    def __init__(self, address: str, caller: str = "", access: Access = PLAIN) -> None:
        """Say where the frontend listens: host:port or unix:PATH; who asks, printable ASCII; and what that is shown by.

        Only the same caller can resume or abort a request. A name that neither a token nor a certificate shows is
        believed where the server asks for none.
        """
        self._address = address
        self._metadata = call_metadata(access, address, caller)
        self._channel = access.channel(address, CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)
        self._health = HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and with it every open call."""
        self._channel.close()

    @takes(generation)
    def generate(self, generation: Generation) -> Generator[Delta, None, None]:
        """Continue one prompt.

        The call starts with the first `next`. Leaving the iterator before its end cancels the request.
        """
        return self._generate(generation)

    def resume(
        self, request_id: str, from_tokens: Sequence[int] = (), *, timeout: float | None = None
    ) -> Generator[Delta, None, None]:
        """Stream the rest of a request whose stream broke; one that is still open elsewhere ends.

        Args:
            from_tokens: how many tokens of each sample have arrived; none = begin with the first.
            timeout: seconds that this call may take; the request keeps the deadline that it began with.

        Raises:
            NotFoundError: this caller has no request of that id, or its end is too long ago, or there is no journal.
            DataLossError: more has arrived than the server knows of; begin anew.
            BlockplaneError: as of `generate`, on `next`.
        """
        return self._stream(pb.ResumeRequest(request_id=request_id, from_tokens=from_tokens), timeout)

    def _generate(self, generation: Generation) -> Generator[Delta, None, None]:
        attempts = Attempts(generation)
        while True:
            try:
                with closing(self._stream(attempts.request, attempts.seconds_left())) as deltas:
                    yield from filter(attempts.is_new, deltas)
                return
            except BlockplaneError as error:
                pause = attempts.pause_after(error)
            time.sleep(pause)

    def _stream(
        self, request: pb.GenerateRequest | pb.ResumeRequest, timeout: float | None
    ) -> Generator[Delta, None, None]:
        with self._typed_errors():
            if isinstance(request, pb.ResumeRequest):
                call = self._inference.Resume(request, timeout=timeout, metadata=self._metadata)
            else:
                call = self._inference.Generate(request, timeout=timeout, metadata=self._metadata)
            try:
                for response in call:
                    yield delta_from_proto(response)
            finally:
                call.cancel()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests by their ids, whoever streams them; unknown and ended ids are fine."""
        with self._typed_errors():
            self._inference.Abort(pb.AbortRequest(request_ids=request_ids), metadata=self._metadata)

    def model_info(self) -> ServedModel:
        with self._typed_errors():
            response = self._inference.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
        return served_model_from_proto(response)

    def wait_until_serving(self, timeout: float) -> None:
        """Return once the server can take requests; it need not be up yet.

        Raises:
            UnavailableError: that did not come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._watched_until_serving(left):
                    return
            except (UnavailableError, DeadlineError):
                time.sleep(min(left, 0.1))
        raise UnavailableError(f"{self._address} is not serving after {timeout:g} s; is a worker attached?")

    def _watched_until_serving(self, timeout: float) -> bool:
        """Whether the server said SERVING before `timeout` or the stream's end."""
        with self._typed_errors():
            watch = self._health.Watch(  # type: ignore[attr-defined] # the published stubs lack it
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout, wait_for_ready=True
            )
            try:
                return any(response.status == health_pb2.HealthCheckResponse.SERVING for response in watch)
            finally:
                watch.cancel()

    def _typed_errors(self) -> AbstractContextManager[None]:
        return typed_errors(self._address)
