"""The Python client of `blockplane.v1.Inference`, synchronous and typed; knows neither terminals nor processes."""

import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from blockplane.client.failures import typed_errors
from blockplane.client.reattach import reattaching
from blockplane.client.values import Delta, ServedModel, delta_from_proto, served_model_from_proto
from blockplane.protos.channel import CALLER, PEER_OPTIONS
from blockplane.protos.errors import (
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
)
from blockplane.v1 import inference_pb2 as pb
from blockplane.v1.inference_pb2_grpc import InferenceStub

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *PEER_OPTIONS,
    # A server that has just come up is found within a second, not after gRPC's growing pauses.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


_Request = TypeVar("_Request", pb.GenerateRequest, pb.ResumeRequest)


class Client:
    """One connection to a frontend; made when first used, and made again when lost.

    Its calls raise the errors of `blockplane.protos.errors` and no other: the server's refusals with the server's
    sentence, UnavailableError where no server answers. Any thread may call it.
    """

    def __init__(self, address: str, caller: str = "") -> None:
        """Say where the frontend listens: host:port or unix:PATH; and who asks, printable ASCII.

        Only the same caller can resume a request; nobody checks who calls by that name.
        """
        self._address = address
        self._metadata = ((CALLER, caller),) if caller else ()
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
        num_samples: int = 1,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: str | Sequence[str] = (),
        bad_word_token_ids: Sequence[Sequence[int]] = (),
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        skip_prefix_cache: bool = False,
        timeout: float | None = None,
        reattach_seconds: float = 0.0,
    ) -> Iterator[Delta]:
        """Continue one prompt, given as text or as token ids.

        The call starts with the first `next`. Leaving the iterator before its end cancels the request. What is None
        takes the model's own default, which is to change nothing where no other is named.

        Args:
            num_samples: continuations of the prompt, at most 64, each with draws of its own. Their deltas come as their
                tokens do, and the iterator ends once all have ended.
            max_tokens: output tokens at most; None = as many as the context has room for.
            min_tokens: output tokens before which neither an end of text nor a stop id may come.
            temperature: 0 = greedy.
            top_k: draw from the k likeliest; 0 = from all.
            top_p: draw from the likeliest that together have this probability; 1 = from all.
            min_p: draw from those with at least this share of the likeliest one's probability; 0 = from all.
            seed: 64 bits; the same one gives the same continuations; None = the server draws one.
            presence_penalty: taken from the logit of every id that the output holds; -2 to 2.
            frequency_penalty: taken from it once for each time; -2 to 2.
            repetition_penalty: divides the positive and multiplies the negative logits of ids in prompt or output; at
                most 2; 1 = none.
            logit_bias: by id, what is added to its logit; -100 to 100.
            allowed_token_ids: only these may come; None = all.
            bad_words: one text or several that may not come, behind a space or none.
            bad_word_token_ids: id sequences of which none may be completed.
            stop: one text or several that end the output; neither they nor what follows arrives.
            stop_token_ids: ids that end the text, besides the model's.
            ignore_eos: go on past the model's end-of-text ids.
            logprobs: tell of each output token how likely it was, and as many of the likeliest ids, at most 20; None =
                tell nothing.
            prompt_logprobs: the same of each token of the prompt but the first.
            request_id: for `abort` and `resume`; unique among live requests; None = one is drawn.
            priority: less comes first; a request that waits gains on all that come later.
            cache_salt: only requests of the same salt share cached prefixes.
            skip_prefix_cache: neither use cached prefixes nor leave any.
            timeout: seconds that the whole request may take, waiting included; None = no limit.
            reattach_seconds: if the call ends UNAVAILABLE, resume it until nothing came for so long; each token comes
                once. Log-probabilities of tokens that had not arrived by then are lost. The server needs a journal.

        Raises:
            InvalidRequestError: a value that the protocol cannot carry, at once; or that the server refuses, on `next`.
            CapacityError: the server has no room, on `next`; `retry_after_seconds` says when it may have.
            DeadlineError: `timeout` has passed, on `next`.
            BlockplaneError: any other refusal or failure, on `next`; of one of several samples once all have ended.
        """
        try:
            params = pb.SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
                logit_bias=logit_bias,
                allowed_token_ids=None if allowed_token_ids is None else pb.TokenIds(ids=allowed_token_ids),
                bad_words=_several(bad_words),
                bad_word_token_ids=[pb.TokenIds(ids=ids) for ids in bad_word_token_ids],
                stop=_several(stop),
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            request = pb.GenerateRequest(
                request_id=request_id or (secrets.token_hex(8) if reattach_seconds > 0 else ""),
                sampling_params=params,
                num_samples=num_samples,
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
        if reattach_seconds <= 0:
            return self._generate(request, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        return reattaching(
            partial(self._generate, request, deadline=deadline),
            partial(self._resume, request.request_id, deadline=deadline),
            max(1, num_samples),
            reattach_seconds,
        )

    def resume(
        self, request_id: str, from_tokens: Sequence[int] = (), *, timeout: float | None = None
    ) -> Iterator[Delta]:
        """Stream the rest of a request whose stream broke; one that is still open elsewhere ends.

        Args:
            from_tokens: how many tokens of each sample have arrived; none = begin with the first.
            timeout: seconds that this call may take; the request keeps the deadline that it began with.

        Raises:
            NotFoundError: this caller has no request of that id, or its end is too long ago, or there is no journal.
            DataLossError: more has arrived than the server knows of; begin anew.
            BlockplaneError: as of `generate`, on `next`.
        """
        return self._resume(request_id, from_tokens, timeout)

    def _generate(
        self, request: pb.GenerateRequest, timeout: float | None = None, deadline: float | None = None
    ) -> Generator[Delta, None, None]:
        return self._stream(self._inference.Generate, request, _seconds_left(timeout, deadline))

    def _resume(
        self, request_id: str, from_tokens: Sequence[int], timeout: float | None = None, deadline: float | None = None
    ) -> Generator[Delta, None, None]:
        request = pb.ResumeRequest(request_id=request_id, from_tokens=from_tokens)
        return self._stream(self._inference.Resume, request, _seconds_left(timeout, deadline))

    def _stream(
        self,
        method: "grpc.UnaryStreamMultiCallable[_Request, pb.GenerateResponse]",
        request: _Request,
        timeout: float | None,
    ) -> Generator[Delta, None, None]:
        with self._typed_errors():
            call = method(request, timeout=timeout, metadata=self._metadata)
            try:
                for response in call:
                    yield delta_from_proto(response)
            finally:
                call.cancel()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests by their ids, whoever streams them; unknown and ended ids are fine."""
        with self._typed_errors():
            self._inference.Abort(pb.AbortRequest(request_ids=request_ids))

    def model_info(self) -> ServedModel:
        with self._typed_errors():
            response = self._inference.GetModelInfo(pb.GetModelInfoRequest())
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


def _seconds_left(timeout: float | None, deadline: float | None) -> float | None:
    """Until whichever of the two there is: seconds from now, or a time of the monotonic clock; None = for ever."""
    return timeout if deadline is None else max(0.0, deadline - time.monotonic())


def _several(texts: str | Sequence[str]) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts
