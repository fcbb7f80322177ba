"""The Python client of `blockplane.v1.Inference`, synchronous and typed; knows neither terminals nor processes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from blockplane.protos.channel import PEER_OPTIONS
from blockplane.protos.delivery_wire import FINISH_REASON_FROM_PROTO
from blockplane.protos.errors import (
    BlockplaneError,
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    UnavailableError,
    error_of_status,
)
from blockplane.protos.finish import FinishReason
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

_RETRY_PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata, gRPC's own: milliseconds (https://github.com/grpc/proposal, A6, "Pushback")."""

_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *PEER_OPTIONS,
    # A server that has just come up is found within a second, not after gRPC's growing pauses.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request; the prompt's include the BOS token that the server put before it.

    `num_cached_tokens` of the prompt were found in the server's prefix cache and not computed.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What a continuation gained since the last one; `finish_reason` and `usage` are None in all but the last."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client may know of the model. `bos_token_id` is None where text prompts get none."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


class Client:
    """One connection to a frontend; made when first used, and made again when lost.

    Its calls raise the errors of `blockplane.protos.errors` and no other: the server's refusals with the server's
    sentence, UnavailableError where no server answers. Any thread may call it.
    """

    def __init__(self, address: str) -> None:
        """Say where the frontend listens: host:port or unix:PATH."""
        self._address = address
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
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

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        skip_prefix_cache: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Delta]:
        """Continue one prompt, given as text or as token ids.

        The call starts with the first `next`. Leaving the iterator before its end cancels the request.

        Args:
            max_tokens: output tokens at most; None = as many as the context has room for.
            temperature: 0 = greedy; None = the model's own default.
            seed: 64 bits; None = the server draws one.
            stop: one text or several that end the output; neither they nor what follows arrives.
            stop_token_ids: ids that end the text, besides the model's.
            ignore_eos: go on past the model's end-of-text ids.
            request_id: for `abort`; unique among live requests; None = the server draws one.
            priority: less comes first; a request that waits gains on all that come later.
            cache_salt: only requests of the same salt share cached prefixes.
            skip_prefix_cache: neither use cached prefixes nor leave any.
            timeout: seconds that the whole request may take, waiting included; None = no limit.

        Raises:
            InvalidRequestError: a value that the protocol cannot carry, at once; or that the server refuses, on `next`.
            CapacityError: the server has no room, on `next`; `retry_after_seconds` says when it may have.
            DeadlineError: `timeout` has passed, on `next`.
            BlockplaneError: any other refusal or failure, on `next`.
        """
        try:
            params = pb.SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop=[stop] if isinstance(stop, str) else stop,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            )
            request = pb.GenerateRequest(
                request_id=request_id or "",
                sampling_params=params,
                priority=priority,
                cache_salt=cache_salt,
                skip_prefix_cache=skip_prefix_cache,
            )
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
        except ValueError as error:
            raise InvalidRequestError(f"the request cannot be sent: {error}; correct that value.") from None
        return self._stream(request, timeout)

    def _stream(self, request: pb.GenerateRequest, timeout: float | None) -> Iterator[Delta]:
        with self._typed_errors():
            call = self._inference.Generate(request, timeout=timeout)
            try:
                for response in call:
                    yield _delta(response)
            finally:
                call.cancel()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests by their ids, whoever streams them; unknown and ended ids are fine."""
        with self._typed_errors():
            self._inference.Abort(pb.AbortRequest(request_ids=request_ids))

    def model_info(self) -> ServedModel:
        with self._typed_errors():
            response = self._inference.GetModelInfo(pb.GetModelInfoRequest())
        return ServedModel(
            name=response.name,
            vocab_size=response.vocab_size,
            max_model_len=response.max_model_len,
            eos_token_ids=tuple(response.eos_token_ids),
            bos_token_id=response.bos_token_id if response.HasField("bos_token_id") else None,
        )

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

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """The one edge at which gRPC's failures become ours."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._error(error) from None

    def _error(self, failure: grpc.RpcError) -> BlockplaneError:
        status, details = failure.code(), failure.details() or ""
        # Our servers speak in sentences; other words are gRPC's own account of a connection.
        if not details.endswith("."):
            if status is grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineError(f"{self._address} did not answer in time; retry, or allow more time.")
            if status is grpc.StatusCode.UNAVAILABLE:
                cause = details.rpartition(": ")[2]
                return UnavailableError(f"no server answers on {self._address} ({cause}); start it, or name another.")
        error = error_of_status(status, details)
        if isinstance(error, CapacityError):
            error.retry_after_seconds = _retry_after_seconds(failure)
        return error


def _retry_after_seconds(failure: grpc.RpcError) -> float | None:
    """When the server would be called again; None where it does not say, or says never, which is a negative number."""
    for item in failure.trailing_metadata() or ():
        if item.key == _RETRY_PUSHBACK and isinstance(item.value, str) and item.value.isdecimal():
            return int(item.value) / 1000
    return None


def _delta(response: pb.GenerateResponse) -> Delta:
    token_ids, reason, usage = tuple(response.token_ids), response.finish_reason, response.usage
    if reason == pb.FINISH_REASON_UNSPECIFIED:
        return Delta(token_ids, response.text, finish_reason=None, usage=None)
    if reason not in FINISH_REASON_FROM_PROTO:
        raise ProtocolError(f"unknown finish reason {reason}; run the same version of client and server.")
    return Delta(
        token_ids,
        response.text,
        finish_reason=FINISH_REASON_FROM_PROTO[reason],
        usage=Usage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens),
    )
