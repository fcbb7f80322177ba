"""When a request ends by itself, as one pure rule; knows neither streams nor blocks."""

from typing import Literal

from blockplane.protos.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cache_full"]
"""stop: an end-of-text or stop id came. length: max_tokens or max_model_len. cache_full: the KV cache holds no more."""


def finish_reason(
    token_id: int,
    num_output_tokens: int,
    num_tokens: int,
    params: SamplingParams,
    *,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
    cache_capacity: int,
) -> FinishReason | None:
    """Say whether a request ends with the token it just got.

    Args:
        token_id: the newest token, counted in the two numbers that follow.
        num_output_tokens, num_tokens: of the output, and of prompt and output together.
        max_model_len: tokens, prompt and output together.
        cache_capacity: tokens whose KV the whole cache can hold. The last token needs no KV: only tokens that are
            followed by another do.
    """
    if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
        return "stop"
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return "length"
    return "cache_full" if num_tokens > cache_capacity else None
