"""Tokens between the link that gets them and the call that sends them on, bounded. Knows neither text nor gRPC."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from blockplane.control_plane.frontend.request_counts import Stopwatch
from blockplane.protos.delivery import Resumed
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs import Logprobs, join


class News(NamedTuple):
    """What a stream has got since it was last looked at; `outcome` is None while it goes on.

    `logprobs` are those of `token_ids`, `prompt_logprobs` those of the prompt's next tokens, from its second on; None =
    nothing is told.
    """

    token_ids: list[int]
    outcome: FinishReason | BlockplaneError | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class Reader:
    """The call that reads a request's streams: woken by what comes, given up where it leaves them parked too long.

    Inside `async with reader:` the call is cancelled, and ends with TimeoutError, `parked_seconds` after a stream was
    parked, or after the last time that one of several parked ones was read again.
    """

    def __init__(self, parked_seconds: float) -> None:
        self.began_at = time.monotonic()
        self.filled = asyncio.Event()
        """Set whenever something comes on any of the streams, so that one wait is for them all."""
        self._parked_seconds = parked_seconds
        self._patience = asyncio.Timeout(None)
        self._num_parked = 0

    async def __aenter__(self) -> Reader:
        await self._patience.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._patience.__aexit__(kind, raised, trace)

    def parked(self) -> None:
        self._num_parked += 1
        if self._num_parked == 1:
            self._wait_on()

    def unparked(self) -> None:
        self._num_parked -= 1
        self._wait_on()

    def _wait_on(self) -> None:
        if not self._patience.expired():
            now = asyncio.get_running_loop().time()
            self._patience.reschedule(now + self._parked_seconds if self._num_parked else None)


class TokenStream:
    """Tokens of one sample on their way to its client. Filled by the link, emptied by the call; coalesces between.

    What is told of tokens counts as much as they do: an entry of log-probabilities is a token more. A stream on which
    more comes while it holds more than its limit is parked: the engine sends nothing new until it is emptied below a
    quarter of that. So it holds the limit and what was under way at most, and whoever reads in time is never parked,
    however much comes at once.
    """

    def __init__(
        self, stream_id: int, reader: Reader, limit: int, set_parked: Callable[[int, bool], None] | None = None
    ) -> None:
        """`limit` counts tokens; `set_parked` tells the engine, by the stream's id."""
        self.stream_id = stream_id
        self.num_cached_tokens = 0
        """Known at the end: tokens of the prompt that were not computed."""
        self.num_held = 0
        """Tokens, and entries of log-probabilities, that the call has not taken."""
        self.is_parked = False
        self.resumed: Resumed | None = None
        """What was before all that comes, where the stream goes on for an earlier one."""
        self.stopwatch: Stopwatch | None = None
        """What measures it; None = nothing does."""
        self._reader, self._limit, self._set_parked = reader, limit, set_parked
        self._tokens: deque[tuple[list[int], Logprobs | None]] = deque()
        self._prompt_logprobs: deque[Logprobs] = deque()
        self._outcome: FinishReason | BlockplaneError | None = None

    @property
    def has_ended(self) -> bool:
        return self._outcome is not None

    def put_resumed(self, resumed: Resumed) -> None:
        self.resumed = resumed
        self._reader.filled.set()

    def put(self, token_ids: list[int], logprobs: Logprobs | None = None) -> None:
        # Beside streams that are told of, others get columns without entries.
        if logprobs is not None and not logprobs.token_ids.size:
            logprobs = None
        self._hold(len(token_ids) + _num_entries(logprobs))
        self._tokens.append((token_ids, logprobs))

    def put_prompt_logprobs(self, logprobs: Logprobs) -> None:
        self._hold(_num_entries(logprobs))
        self._prompt_logprobs.append(logprobs)

    def end(self, outcome: FinishReason | BlockplaneError, num_cached_tokens: int = 0) -> None:
        self._outcome, self.num_cached_tokens = outcome, num_cached_tokens
        self._reader.filled.set()

    def take(self) -> News:
        """Take what has come, or about a quarter of the limit of it: the reader is then woken for the rest.

        The outcome is told with the last of it.
        """
        quarter = self._limit // 4
        token_ids: list[int] = []
        logprobs: list[Logprobs] = []
        prompt_logprobs: list[Logprobs] = []
        num_taken = 0
        while self._prompt_logprobs and num_taken <= quarter:
            prompt_logprobs.append(self._prompt_logprobs.popleft())
            num_taken += _num_entries(prompt_logprobs[-1])
        while self._tokens and num_taken <= quarter:
            new, told = self._tokens.popleft()
            token_ids += new
            num_taken += len(new) + _num_entries(told)
            if told is not None:
                logprobs.append(told)
        self.num_held -= num_taken
        if self.is_parked and self.num_held <= quarter:
            self._change_parked(False)
        has_more = bool(self._tokens or self._prompt_logprobs)
        if has_more:
            self._reader.filled.set()
        return News(
            token_ids,
            None if has_more else self._outcome,
            join(logprobs) if logprobs else None,
            join(prompt_logprobs) if prompt_logprobs else None,
        )

    def _hold(self, num_new: int) -> None:
        if self.num_held > self._limit and not self.is_parked:
            self._change_parked(True)
        self.num_held += num_new
        self._reader.filled.set()

    def _change_parked(self, is_parked: bool) -> None:
        self.is_parked = is_parked
        (self._reader.parked if is_parked else self._reader.unparked)()
        if self._set_parked is not None and not self.has_ended:
            self._set_parked(self.stream_id, is_parked)


def _num_entries(logprobs: Logprobs | None) -> int:
    return 0 if logprobs is None else logprobs.token_ids.size
