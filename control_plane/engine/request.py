"""One request as the engine sees it, from acceptance to its end; knows neither steps nor streams' transport."""

from dataclasses import dataclass, field
from typing import Any

from blockplane.control_plane.engine.prefix_cache import BlockContent
from blockplane.protos.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """A growing list of tokens with a place in the KV cache. Written by the scheduler and its `KVBlocks` only.

    Attributes:
        request_id: the caller's.
        token_ids: prompt and output; grows by one for each answered token.
        params: as the caller set them.
        seed: the caller's, or drawn once, when the request was accepted.
        owner: whoever submitted it; handed back with each output, never looked into.
        row: its row in the worker group, None while it waits.
        num_computed_tokens: tokens whose KV is in the cache.
        num_cached_tokens: prompt tokens whose KV others had computed, when it was first admitted; None before.
        block_ids: its blocks, in logical order.
        contents: what its full blocks hold, as far as it is keyed; may run ahead of `block_ids` or behind.
        cache_salt: only requests of the same salt share blocks.
        ended: nothing of it may be delivered or scheduled any more.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    owner: Any = None
    row: int | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    block_ids: list[int] = field(default_factory=list)
    contents: list[BlockContent] = field(default_factory=list)
    cache_salt: str = ""
    ended: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV is still to be computed: 1 while it decodes, more while it is prefilled."""
        return len(self.token_ids) - self.num_computed_tokens
