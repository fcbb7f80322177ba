"""When a request ends by itself: each limit to the token, and which reason wins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockplane.protos.finish import FinishReason, finish_reason
from blockplane.protos.sampling import SamplingParams

EOS, STOP, OTHER = 2, 7, 5


def reason(
    token_id: int = OTHER,
    *,
    num_output_tokens: int = 1,
    num_tokens: int = 10,
    max_tokens: int = 100,
    max_model_len: int = 1000,
    cache_capacity: int = 1000,
    ignore_eos: bool = False,
) -> FinishReason | None:
    return finish_reason(
        token_id,
        num_output_tokens,
        num_tokens,
        SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP, 8), ignore_eos=ignore_eos),
        eos_token_ids=(EOS, 3),
        max_model_len=max_model_len,
        cache_capacity=cache_capacity,
    )


def test_a_request_far_from_every_limit_goes_on() -> None:
    assert reason() is None


@pytest.mark.parametrize("token_id", [EOS, 3, STOP, 8])
def test_end_of_text_and_stop_ids_stop(token_id: int) -> None:
    assert reason(token_id) == "stop"


@pytest.mark.parametrize(("token_id", "expected"), [(EOS, None), (3, None), (STOP, "stop"), (8, "stop")])
def test_ignore_eos_passes_the_model_s_ids_and_not_the_request_s(token_id: int, expected: str | None) -> None:
    assert reason(token_id, ignore_eos=True) == expected


def test_max_tokens_counts_output_tokens_the_newest_included() -> None:
    assert reason(num_output_tokens=4, max_tokens=5) is None
    assert reason(num_output_tokens=5, max_tokens=5) == "length"
    assert reason(num_output_tokens=1, max_tokens=1) == "length"


def test_max_model_len_counts_prompt_and_output() -> None:
    assert reason(num_tokens=15, max_model_len=16) is None
    assert reason(num_tokens=16, max_model_len=16) == "length"


def test_the_last_token_needs_no_kv() -> None:
    # A cache of 16 tokens computes positions 0 to 15 and so yields a 17th token, which nothing can follow.
    assert reason(num_tokens=16, cache_capacity=16) is None
    assert reason(num_tokens=17, cache_capacity=16) == "cache_full"


def test_stop_wins_over_length_and_length_over_cache_full() -> None:
    at_all_limits = {"num_output_tokens": 5, "max_tokens": 5, "num_tokens": 17, "cache_capacity": 16}
    assert reason(EOS, **at_all_limits) == "stop"
    assert reason(OTHER, **at_all_limits) == "length"
    assert reason(OTHER, **{**at_all_limits, "max_tokens": 6}) == "cache_full"
    assert reason(OTHER, num_tokens=17, max_model_len=17, cache_capacity=16) == "length"


@given(
    num_prompt_tokens=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    max_model_len=st.integers(1, 40),
    cache_capacity=st.integers(1, 40),
)
def test_a_request_gets_exactly_as_many_tokens_as_its_tightest_limit_allows(
    num_prompt_tokens: int, max_tokens: int, max_model_len: int, cache_capacity: int
) -> None:
    ended = None
    num_output_tokens = 0
    while ended is None:
        num_output_tokens += 1
        ended = reason(
            num_output_tokens=num_output_tokens,
            num_tokens=num_prompt_tokens + num_output_tokens,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            cache_capacity=cache_capacity,
        )
    room = min(max_model_len, cache_capacity + 1) - num_prompt_tokens
    assert num_output_tokens == min(max_tokens, max(1, room))
