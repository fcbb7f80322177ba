"""What calls of all services share: the model they are for, and how they stream, wait and end. Knows no messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any, TypeAlias

import grpc

from blockplane.control_plane.frontend.call_counts import CallCounts
from blockplane.control_plane.frontend.delta import Delta
from blockplane.control_plane.frontend.door import Door
from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.grammar_checks import GrammarChecks
from blockplane.control_plane.frontend.output import Output, TextParams
from blockplane.control_plane.frontend.quotas import Quotas
from blockplane.control_plane.frontend.request_counts import RequestCounts, Stopwatch
from blockplane.control_plane.frontend.sample import Sample
from blockplane.control_plane.frontend.text import Text
from blockplane.control_plane.frontend.token_stream import Reader, TokenStream
from blockplane.protos.config import Config
from blockplane.protos.delivery import Submission
from blockplane.protos.errors import BlockplaneError, CapacityError, QueueFullError, UnavailableError
from blockplane.protos.model import ModelInfo

logger = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
"""When a caller whom a stopping frontend refuses may find another one in its place."""

LONG_TEXT = 4096
"""Characters that a prompt's text may have to be read in the event loop; a millisecond's work."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Calls:
    """Serves the calls of every service over one link to the engine."""

    def __init__(self, link: EngineLink, config: Config) -> None:
        self.link = link
        self._config = config
        self._is_draining = False
        self._served: tuple[ModelInfo, Text] | None = None
        self._grammar_checks = GrammarChecks()
        self._door = Door()
        self._long_texts = ThreadPoolExecutor(1, "long-texts")
        self.quotas = Quotas(config.max_caller_requests, config.max_caller_tokens)
        self.counts = CallCounts()
        self.request_counts: dict[str, RequestCounts] = {}
        """By the model's name; none are kept where nobody could ask for them."""
        self.has_served = False
        """Whether there was a model, ever."""

    def serve_model(self, served: tuple[ModelInfo, Text] | None) -> None:
        """Take requests for this model from now on; None = for none."""
        self._served = served
        self.has_served = self.has_served or served is not None
        if served is not None and self._config.metrics_address:
            model, _ = served
            # From the beginning, so that whoever reads them sees the first one come.
            self.request_counts.setdefault(model.name, RequestCounts(model.max_model_len))

    @property
    def is_serving(self) -> bool:
        """Whether requests can be served."""
        return self._served is not None and not self._is_draining

    def require_served(self) -> tuple[ModelInfo, Text]:
        """Raises UnavailableError where no request can be served."""
        if self._is_draining:
            raise UnavailableError("this frontend is stopping; call another one, or this one again.", RESTART_SECONDS)
        if self._served is None:
            raise UnavailableError("no worker is ready; retry once the service's health is SERVING.")
        return self._served

    def require_room(self) -> tuple[ModelInfo, Text]:
        """The same for a request. Raises QueueFullError where the engine has just refused others, before it is read."""
        served = self.require_served()
        self._door.check()
        return served

    async def understood(self, num_characters: int, understand: Callable[[], Submission]) -> Submission:
        """What a request with a text of that length means, as `understand` has it.

        Long ones are read one after the other in a thread of their own, while the event loop serves others.
        """
        if num_characters <= LONG_TEXT:
            return understand()
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, run, understand)

    async def drain(self) -> None:
        """Take no more calls, and wait for the ends of those that are open; what outlives the time, or us, is ended."""
        self._is_draining = True
        try:
            async with asyncio.timeout(self._config.drain_seconds):
                await self.link.wait_until_idle()
        except TimeoutError:
            logger.warning("ending what has not ended within drain_seconds, %d", self._config.drain_seconds)
        finally:
            self.link.end_streams(
                UnavailableError("the frontend stopped before the request's end; send it again.", RESTART_SECONDS)
            )
            await self._grammar_checks.stop()
            self._long_texts.shutdown(wait=False, cancel_futures=True)

    async def stream(self, call: Callable[[Reader], Awaitable[None]]) -> None:
        """Have a call stream. Raises what it raises, and CapacityError where nobody reads it."""
        with self.counts.counted():
            try:
                async with Reader(self._config.parked_seconds) as reader:
                    await call(reader)
            except TimeoutError:
                raise CapacityError(
                    f"nothing of the stream was read for {self._config.parked_seconds} s while more than"
                    f" {self._config.stream_buffer_tokens} tokens waited; send the request again, and read faster."
                ) from None

    @asynccontextmanager
    async def submitted(
        self, submission: Submission, text: Text, params: TextParams, reader: Reader
    ) -> AsyncIterator[list[Sample]]:
        """A request's samples as the engine has them compute; whichever is not over in the end is aborted.

        Raises as `GrammarChecks.check` does where its output is to be structured.
        """
        if submission.params.structured is not None:
            model, _ = self.require_served()
            await self._grammar_checks.check(submission.params.structured, model)
        prompt = submission.prompt_token_ids.tolist()
        with self.quotas.held(submission.caller, self._most_tokens(submission)):
            streams = self.link.open(submission, reader)
            self._measure(streams, reader)
            try:
                samples = [
                    Sample(index, len(prompt), stream, Output(text, prompt, params), self.link.stop, params.is_whole)
                    for index, stream in enumerate(streams)
                ]
                yield samples
                if isinstance(samples[0].failure, QueueFullError):
                    self._door.shut(samples[0].failure)
            finally:
                for stream in streams:
                    self.link.close(stream)
                    if stream.stopwatch is not None:
                        stream.stopwatch.left()

    def _measure(self, streams: Sequence[TokenStream], reader: Reader) -> None:
        """Have a request's streams counted from its call's beginning, if anybody can ask for the counts."""
        model, _ = self.require_served()
        if (counts := self.request_counts.get(model.name)) is not None:
            for stream in streams:
                stream.stopwatch = Stopwatch(counts, reader.began_at)

    def _most_tokens(self, submission: Submission) -> int:
        """What a request may come to: the prompt and the most output of each sample."""
        model, _ = self.require_served()
        num_tokens = len(submission.prompt_token_ids) + submission.params.max_tokens
        return submission.num_samples * min(num_tokens, model.max_model_len)


async def tell(
    samples: Sequence[Sample], reader: Reader, write: Callable[[int, Delta], Awaitable[None]]
) -> BlockplaneError | None:
    """Write what comes, by sample index, until all samples have ended. Returns the error of the first that failed."""
    failure: BlockplaneError | None = None
    while samples:
        await reader.filled.wait()
        reader.filled.clear()
        for sample in samples:
            if (delta := sample.advance()) is not None:
                await write(sample.index, delta)
            failure = failure or sample.failure
        samples = [sample for sample in samples if not sample.has_ended]
    return failure
