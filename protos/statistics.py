"""What an engine tells of its worker groups' work; knows no gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """How it stands now, and what was counted since the engine started; counts never go down.

    Of one worker group as long as its cache lives, or of all together, those before them included.

    Attributes:
        num_running, num_waiting: requests with a row and without.
        num_parked: requests that do neither, since their clients do not read.
        num_waiting_tokens: known tokens of those without.
        kv_cache_usage: 1 - free / usable blocks. Blocks that are only cached count as free.
        num_common_prefix_blocks: per KV cache group, leading blocks that all running requests share; none for several
            worker groups together.
        num_admitted, num_prompt_tokens: requests that got a row at least once, and the tokens of their prompts.
        num_cached_tokens: of these tokens, how many were found in the prefix cache then.
        num_preemptions: how often a request lost its row to others.
        num_draft_tokens, num_accepted_tokens: tokens that the worker guessed, and how many of its guesses were right:
            what rows got beyond one token a step. Counted as the worker answers, so that those count too which come
            behind a request's end and are dropped.
        num_discarded_tokens: tokens that came behind their request's end.
        num_steps, num_plan_bytes: steps that were answered, and the bytes of their plans.
        step_seconds: from each one's sending, or its predecessor's answer where that came later, to its answer.
        idle_seconds: in which nothing was in flight at a group though requests ran there.
        num_computed_tokens, num_bucket_tokens: tokens that those steps computed, and tokens of the buckets that they
            were padded to.
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
    num_parked: int = 0
    num_discarded_tokens: int = 0
    num_steps: int = 0
    num_plan_bytes: int = 0
    step_seconds: float = 0.0
    idle_seconds: float = 0.0
    num_computed_tokens: int = 0
    num_bucket_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """All worker groups together, and each by its number.

    Attributes:
        num_lost_workers: how often a worker that was ready was lost.
        num_dropped_results: results of another attach, or of steps that had their answers.
        num_held: requests at no group: none is ready, or they may have killed a worker and wait for their turn, or
            their blocks move.
        num_suspects: requests that were in the step when a worker was lost, and got no token since.
        num_transfers, num_failed_transfers: requests that went on at another group with their blocks, or without since
            these could not be had.
        num_transferred_blocks: that moved.
    """

    total: Statistics
    groups: Mapping[int, Statistics]
    num_lost_workers: int = 0
    num_dropped_results: int = 0
    num_held: int = 0
    num_suspects: int = 0
    num_transfers: int = 0
    num_failed_transfers: int = 0
    num_transferred_blocks: int = 0
