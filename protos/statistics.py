"""What an engine tells of its one worker group's work; knows no gRPC."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """How it stands now, and what was counted since the worker attached; counts never go down.

    Attributes:
        num_running, num_waiting: requests with a row and without.
        num_waiting_tokens: known tokens of those without.
        kv_cache_usage: 1 - free / usable blocks. Blocks that are only cached count as free.
        num_common_prefix_blocks: per KV cache group, leading blocks that all running requests share.
        num_admitted, num_prompt_tokens: requests that got a row at least once, and the tokens of their prompts.
        num_cached_tokens: of these tokens, how many were found in the prefix cache then.
        num_preemptions: how often a request lost its row to others.
        num_draft_tokens, num_accepted_tokens: tokens that the worker guessed, and how many of its guesses were right:
            what rows got beyond one token a step. Counted as the worker answers, so that those count too which come
            behind a request's end and are dropped.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_cache_usage: float
    num_common_prefix_blocks: tuple[int, ...]
    num_admitted: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
