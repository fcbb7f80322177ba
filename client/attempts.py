"""One request over several calls: which comes next, and which of its deltas are new. Makes no call itself.

A request is sent again only as long as nothing of it has come, and only where no server answered, or one said that it
cannot now and when it can; its tokens would otherwise come from two runs. Behind its first token it goes on by
`Resume` alone, which tells each token once.
"""

import time
from collections import Counter

from blockplane.client.failures import UnreachableError
from blockplane.client.requests import Generation
from blockplane.client.values import Delta
from blockplane.protos.errors import BlockplaneError, DuplicateError, NotFoundError, UnavailableError
from blockplane.v1 import inference_pb2 as pb

PAUSE_SECONDS = 0.2
"""Between two calls, where the server did not say how long."""
MAX_PAUSE_SECONDS = 10.0
"""Who is told to wait longer has better things to do."""


class Attempts:
    """A request's way through its calls.

    Use: call with `request` and `seconds_left()`; hand the caller what `is_new`; behind an error, call again after
    `pause_after(error)` seconds.
    """

    def __init__(self, generation: Generation) -> None:
        """The request's time begins to run."""
        self._generation = generation
        self._deadline = None if generation.timeout is None else time.monotonic() + generation.timeout
        # What has come of each sample, and which of them have ended.
        self._num_tokens = Counter[int]()
        self._ended = set[int]()
        self._has_come = False
        self._resumes = False
        self._num_retries = 0
        self._give_up: float | None = None

    @property
    def request(self) -> pb.GenerateRequest | pb.ResumeRequest:
        """What the next call sends."""
        request = self._generation.request
        if self._resumes:
            from_tokens = [self._num_tokens[index] for index in range(max(1, request.num_samples))]
            return pb.ResumeRequest(request_id=request.request_id, from_tokens=from_tokens)
        return request

    def seconds_left(self) -> float | None:
        """What the next call may take; None = any time."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def is_new(self, delta: Delta) -> bool:
        """Note what came. The end of a sample is told by every call that streams the request, and is new once."""
        self._has_come, self._give_up = True, None
        if delta.sample_index in self._ended:
            return False
        self._num_tokens[delta.sample_index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._ended.add(delta.sample_index)
        return True

    def pause_after(self, error: BlockplaneError) -> float:
        """How many seconds to wait before the next call. Raises `error` where there shall be none."""
        if self._generation.reattach_seconds > 0:
            self._resume_after(error)
            return PAUSE_SECONDS
        return self._retry_after(error)

    def _resume_after(self, error: BlockplaneError) -> None:
        if isinstance(error, NotFoundError) and self._resumes and not any(self._num_tokens.values()):
            # It was lost before it reached the journal; as long as nothing of it was seen it may begin again.
            self._resumes = False
            return
        if not isinstance(error, UnavailableError):
            raise error
        now = time.monotonic()
        self._give_up = self._give_up or now + self._generation.reattach_seconds
        if now >= self._give_up:
            raise error
        self._resumes = True

    def _retry_after(self, error: BlockplaneError) -> float:
        # A call of ours that broke may not have ended at the server, where it has the id.
        is_own = isinstance(error, DuplicateError) and self._num_retries > 0
        pause = _asked_pause(error)
        if pause is None and is_own:
            pause = PAUSE_SECONDS
        if pause is None or self._has_come or self._num_retries >= self._generation.max_retries:
            raise error
        left = self.seconds_left()
        if pause > MAX_PAUSE_SECONDS or (left is not None and pause >= left):
            raise error
        self._num_retries += 1
        return pause


def _asked_pause(error: BlockplaneError) -> float | None:
    """Seconds after which the same request may be sent again; None = it may not."""
    if isinstance(error, UnreachableError):
        return PAUSE_SECONDS
    return error.retry_after_seconds if isinstance(error, UnavailableError) else None
