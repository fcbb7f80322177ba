"""The Python client of `blockplane.v1.Inference` for event loops; knows neither terminals nor processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from blockplane.client.attempts import Attempts
from blockplane.client.dialling import CHANNEL_OPTIONS, PLAIN, SERVICE, call_metadata
from blockplane.client.failures import typed_errors
from blockplane.client.requests import Generation, generation, takes
from blockplane.client.values import Delta, ServedModel, delta_from_proto, served_model_from_proto
from blockplane.protos.access import Access
from blockplane.protos.errors import AbortedError, BlockplaneError, DeadlineError, UnavailableError
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    # Stubs alone know the type of a stub whose channel is asynchronous.
    from blockplane.v1.inference_pb2_grpc import InferenceAsyncStub


class AsyncClient:
    """`Client` for an event loop: the same calls, awaited, and the same errors. Make and use it in one running loop.

    What is sent again by itself: `abort` and `model_info`, which change nothing the second time, wherever no server
    can be reached; and a request, only as long as nothing of it has come, where no server was reached or one said that
    it cannot now and when it can, `max_retries` times. Behind its first token a request goes on by `Resume` alone, if
    `reattach_seconds` says so.
    """

    def __init__(self, address: str, caller: str = "", access: Access = PLAIN) -> None:
        """As of `Client`."""
        self._address = address
        self._metadata = call_metadata(access, address, caller)
        self._channel = access.aio_channel(address, CHANNEL_OPTIONS)
        self._inference: InferenceAsyncStub = InferenceStub(self._channel)
        self._health = HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection, and with it every open call."""
        await self._channel.close()

    @takes(generation)
    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Continue one prompt: `async for delta in client.generate(...)`.

        The call starts with the first `anext`. Leaving the iterator before its end cancels the request, as does
        cancelling the task that reads it; whoever keeps the iterator closes it: `await deltas.aclose()`.
        """
        return self._generate(generation)

    def resume(
        self, request_id: str, from_tokens: Sequence[int] = (), *, timeout: float | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Stream the rest of a request whose stream broke, as `Client.resume` does."""
        return self._stream(pb.ResumeRequest(request_id=request_id, from_tokens=from_tokens), timeout)

    async def _generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        attempts = Attempts(generation)
        while True:
            try:
                async with aclosing(self._stream(attempts.request, attempts.seconds_left())) as deltas:
                    async for delta in deltas:
                        if attempts.is_new(delta):
                            yield delta
                return
            except BlockplaneError as error:
                pause = attempts.pause_after(error)
            await asyncio.sleep(pause)

    async def _stream(
        self, request: pb.GenerateRequest | pb.ResumeRequest, timeout: float | None
    ) -> AsyncGenerator[Delta, None]:
        with self._typed_errors():
            call = self._call(request, timeout)
            try:
                async for response in call:
                    yield delta_from_proto(response)
            finally:
                call.cancel()

    def _call(
        self, request: pb.GenerateRequest | pb.ResumeRequest, timeout: float | None
    ) -> grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]:
        if isinstance(request, pb.ResumeRequest):
            return self._inference.Resume(request, timeout=timeout, metadata=self._metadata)
        return self._inference.Generate(request, timeout=timeout, metadata=self._metadata)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests by their ids, whoever streams them; unknown and ended ids are fine."""
        with self._typed_errors():
            await self._inference.Abort(pb.AbortRequest(request_ids=request_ids), metadata=self._metadata)

    async def model_info(self) -> ServedModel:
        with self._typed_errors():
            response = await self._inference.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
        return served_model_from_proto(response)

    async def wait_until_serving(self, timeout: float) -> None:
        """Return once the server can take requests; it need not be up yet.

        Raises:
            UnavailableError: that did not come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                if await self._watched_until_serving(left):
                    return
            except (UnavailableError, DeadlineError):
                await asyncio.sleep(min(left, 0.1))
        raise UnavailableError(f"{self._address} is not serving after {timeout:g} s; is a worker attached?")

    async def _watched_until_serving(self, seconds: float) -> bool:
        """Whether the server said SERVING within so long, before the stream's end."""
        with self._typed_errors():
            watch = self._health.Watch(  # type: ignore[attr-defined] # the published stubs lack it
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=seconds, wait_for_ready=True
            )
            try:
                async for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return True
            finally:
                watch.cancel()
        return False

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            with typed_errors(self._address):
                yield
        except asyncio.CancelledError:
            # A call that falls with its channel looks cancelled, though nobody cancelled its task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise AbortedError("the client was closed before the call's end; make another one.") from None
