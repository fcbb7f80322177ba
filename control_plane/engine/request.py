"""One request as the engine sees it, from acceptance to its end; knows neither steps nor streams' transport."""

from dataclasses import dataclass, field

import numpy as np

from blockplane.protos.plan import Int32Array
from blockplane.protos.sampling import SamplingParams

EXPECTED_OUTPUT_TOKENS = 256
"""So much output at most is reckoned with: a text may end with any token, and `max_tokens` is often far off."""


@dataclass(slots=True, eq=False)
class Request:
    """A growing list of tokens. Written by the scheduler and its `KVBlocks`, and where it is by `Placement`.

    Attributes:
        request_id: the caller's; the samples of one prompt have it in common.
        token_ids: int32, prompt and output as far as known when it last had no row; a row keeps its own.
        caller: whom it belongs to; empty = anybody.
        traceparent: W3C trace context of its call; empty = it had none.
        params: as the caller set them.
        seed: the caller's, or drawn once, when the request was accepted.
        owner, stream_id: whoever submitted it and their number for it; handed back with each output, never looked into.
        priority: less comes first.
        rank: its place in the order of service, less is first: the queue sorts by it and the largest is preempted.
        cache_salt: only requests of the same salt share blocks.
        skip_prefix_cache: it shares none.
        group: the number of the worker group that it is at; None = it is held until one may serve it.
        row: its row in the worker group, None while it waits.
        keys: the prefix cache's keys of its full blocks, behind that of its root; empty where it shares none.
        num_cached_tokens: prompt tokens whose KV others had computed, when it was first admitted; None before.
        num_expected_tokens: leading ones that it was expected to share where it was placed.
        num_prompt_told: leading prompt tokens that need no telling any more: the first, which follows none, and those
            whose log-probabilities were handed out.
        behind: a request that computes the blocks which this one needs next, and how many those are; None = nobody.
        last_step: the last step that may still answer for it while it waits.
        weights: the fingerprint of those that its output was computed with; empty = nobody knows, or there is none.
        is_parked: its client does not read; it has no row and does not wait for one either, until that is over.
        ended: nothing of it may be delivered or scheduled any more.
    """

    request_id: str
    token_ids: Int32Array
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    owner: int = 0
    stream_id: int = 0
    caller: str = ""
    traceparent: str = ""
    priority: int = 0
    rank: tuple[float, int] = (0.0, 0)
    cache_salt: str = ""
    skip_prefix_cache: bool = False
    group: int | None = None
    row: int | None = None
    keys: list[bytes] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_expected_tokens: int = 0
    num_prompt_told: int = 1
    behind: tuple["Request", int] | None = None
    last_step: int = 0
    weights: bytes = b""
    is_parked: bool = False
    ended: bool = False

    @property
    def num_tokens(self) -> int:
        """Known tokens, as of when it last had no row."""
        return len(self.token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether it has output, as of when it last had no row."""
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that are left to compute, as far as one can know, as of when it last had no row."""
        num_outputs_left = self.params.max_tokens + self.num_prompt_tokens - self.num_tokens
        return self.num_tokens - self.num_expected_tokens + min(num_outputs_left, EXPECTED_OUTPUT_TOKENS)

    def append(self, token_id: int) -> None:
        """Take a token that was computed in a row which the request has lost."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))
