"""A request says the same with drafts as without, whoever guesses, however well, and however it is scheduled."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from drafting import GREEDY, imperfect_twin, num_drafted, perfect_twin, planes_with, text_of
from planes_in_process import Planes
from synthetic_oracle import continue_greedily
from test_runner_sampling import PARAMS
from torch import Tensor

from blockplane.data_plane.attention import AttentionBatches
from blockplane.data_plane.models.interface import Model
from blockplane.data_plane.models.synthetic import SyntheticModel
from blockplane.protos.errors import ModelOutputError
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import StructuredOutput

SOURCES: dict[str, Callable[[], Model | None]] = {
    "ngram": lambda: None,
    "perfect": perfect_twin,
    "imperfect": imperfect_twin,
}
PROMPTS = [[(length * 31 + index * 7) % 250 for index in range(length)] for length in (45, 1, 16, 30)]
"""Beyond the window of 48 or up to it, at a block's end and inside one."""
WARM = replace(GREEDY, temperature=1.0)
MIXED = [GREEDY, WARM, WARM, GREEDY]
ALL_PARAMS = [replace(params, max_tokens=24, ignore_eos=True) for params in PARAMS.values()]
DRAFTED = [*(("imperfect", num) for num in range(1, 6)), ("perfect", 4), ("ngram", 3)]


def together(planes: Planes, requests: list[SamplingParams], num_ahead: int = 1) -> list[list[int]]:
    """Requests at once, each with a prompt and noise of its own."""
    for number, params in enumerate(requests):
        planes.submit(PROMPTS[number % len(PROMPTS)], params, seed=number)
    planes.run(num_ahead)
    return list(planes.texts.values())


@cache
def undrafted() -> list[list[int]]:
    return together(planes_with(), MIXED)


@cache
def undrafted_with_all_params() -> list[list[int]]:
    return together(planes_with(num_seqs_buckets=(8,)), ALL_PARAMS)


@pytest.mark.parametrize(("source", "num_draft_tokens"), DRAFTED)
def test_one_to_five_drafts_change_no_token(source: str, num_draft_tokens: int) -> None:
    """Case 29, across block boundaries: two greedy rows, and two at temperature 1."""
    planes = planes_with(num_draft_tokens, SOURCES[source]())
    assert together(planes, MIXED) == undrafted()
    num_drafts, num_accepted = num_drafted(planes)
    assert num_drafts > 0
    if source == "perfect":
        assert num_accepted == num_drafts
    if source == "imperfect":
        assert 0.1 * num_drafts < num_accepted < num_drafts


@pytest.mark.parametrize("source", SOURCES)
def test_drafts_change_no_token_whatever_a_request_asks(source: str) -> None:
    planes = planes_with(3, SOURCES[source](), num_seqs_buckets=(8,))
    assert together(planes, ALL_PARAMS) == undrafted_with_all_params()
    num_drafts, num_accepted = num_drafted(planes)
    assert num_drafts > 0
    if source == "perfect":
        assert num_accepted == num_drafts, "the draft model takes the row's noise, penalties and words too"


@pytest.mark.parametrize(("source", "num_draft_tokens"), DRAFTED)
def test_a_text_goes_up_to_the_last_place_of_max_model_len(source: str, num_draft_tokens: int) -> None:
    """Case 29, in the last window; two plans are in flight."""
    planes = planes_with(num_draft_tokens, SOURCES[source](), max_model_len=64)
    prompts = [list(range(length)) for length in (54, 63, 62)]
    for prompt in prompts:
        planes.submit(prompt, replace(GREEDY, max_tokens=99))
    planes.run()
    expected = [continue_greedily(prompt, 64 - len(prompt), ignore_eos=True) for prompt in prompts]
    assert list(planes.texts.values()) == expected
    num_drafts, num_accepted = num_drafted(planes)
    assert source != "perfect" or num_drafts == num_accepted > 0


@pytest.mark.parametrize(("source", "num_ahead"), [("ngram", 1), ("perfect", 2), ("imperfect", 1), ("imperfect", 2)])
def test_rows_that_give_way_and_resume_say_the_same(source: str, num_ahead: int) -> None:
    num_blocks = 56 if source == "ngram" else 110
    planes = planes_with(3, SOURCES[source](), num_blocks=num_blocks, max_model_len=72)
    assert together(planes, MIXED, num_ahead) == undrafted()
    assert planes.scheduler.statistics().num_preemptions > 0
    num_drafts, num_accepted = num_drafted(planes)
    assert source != "perfect" or num_drafts == num_accepted > 0


@pytest.mark.parametrize("source", SOURCES)
def test_prompts_in_segments_beside_rows_that_decode_say_the_same(source: str) -> None:
    """Prompts come one by one, cut into segments of 16 tokens; some share a prefill."""
    planes = planes_with(4, SOURCES[source](), num_batched_tokens_buckets=(16,))
    for number, params in enumerate(MIXED):
        planes.submit(PROMPTS[number], params, seed=number)
        for _ in range(number):
            planes.step(num_ahead=1)
    planes.run(num_ahead=1)
    assert list(planes.texts.values()) == undrafted()
    num_drafts, num_accepted = num_drafted(planes)
    if source == "perfect":
        assert num_drafts == num_accepted > 0
        drafted = [result for result in planes.results if result.num_tokens is not None]
        assert any(len(result.token_ids) > np.sum(result.num_tokens) for result in drafted), "both in one step"


# -- case 30: drafts that may not be ----------------------------------------------------------------------------------


FORBIDDEN: dict[str, dict[str, Any]] = {
    "as a word": {"bad_words": ((5, 6), (5, 5), (5, 9), (9, 9), (7, 9))},
    "as an id": {"allowed_token_ids": (5, 7, 9), "bad_words": ((5, 5), (5, 9), (9, 9), (7, 9))},
    "by a grammar": {"structured": StructuredOutput("regex", r"\x09(\x05\x07)+"), "ignore_eos": False},
}


@pytest.mark.parametrize("how", FORBIDDEN)
def test_a_forbidden_second_draft_ends_what_is_accepted_at_one_and_mates_notice_nothing(how: str) -> None:
    """The text said 9 5 6 7 once; now 9 comes again, and 6 may not come after 5."""
    biases = (9, 100.0), (5, 90.0), (6, 85.0), (7, 80.0)
    params = SamplingParams(6, **{"ignore_eos": True, "logit_bias": biases, **FORBIDDEN[how]})
    prompt = [9, 5, 6, 7, 8]
    planes = planes_with(3)
    mate = planes.submit(PROMPTS[0], WARM, seed=1)
    planes.step(num_ahead=1)
    number = planes.submit(prompt, params)
    planes.step(num_ahead=1)
    assert planes.texts[number] == [9]
    planes.step(num_ahead=1)
    assert planes.texts[number] == [9, 5, 7], "5 was accepted, 6 was not, and what the target says instead came with it"
    assert planes.results[-1].num_draft_tokens >= 3
    planes.run()
    assert planes.texts[number] == text_of(planes_with(), prompt, params)
    assert planes.texts[mate] == text_of(planes_with(), PROMPTS[0], WARM, seed=1)


# -- what fails --------------------------------------------------------------------------------------------------------


LONG = replace(GREEDY, max_tokens=40)


class Failing(SyntheticModel):
    """Its logits are no numbers once it has said a token that is divisible by 5; it takes no token that is none."""

    def forward(self, input_ids: Tensor, positions: Tensor, batches: AttentionBatches) -> Tensor:
        assert (input_ids >= 0).all()
        return super().forward(input_ids, positions, batches)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return torch.where((hidden[:, 1] % 5 == 0)[:, None], torch.nan, logits)


def test_a_row_that_fails_among_its_drafts_ends_there_alone() -> None:
    expected = text_of(planes_with(), PROMPTS[2], LONG)
    num_before = next(index for index, token in enumerate(expected) if token % 5 == 0) + 1
    assert num_before > 1
    planes = planes_with(4, perfect_twin(), model=Failing("float32"))
    number = planes.submit(PROMPTS[2], LONG)
    mate = planes.submit([3, 1], replace(LONG, allowed_token_ids=tuple(range(1, 258, 5))))
    planes.run()
    assert planes.texts[number] == expected[:num_before]
    assert isinstance(planes.outcomes[number], ModelOutputError)
    assert len(planes.texts[mate]) == 40
    assert max(planes.num_in_step) > 2


def test_a_draft_model_that_fails_changes_no_token() -> None:
    planes = planes_with(3, Failing("float32"))
    assert together(planes, MIXED) == undrafted()
    num_drafts, num_accepted = num_drafted(planes)
    assert 0 < num_accepted < num_drafts


# -- what the engine is told ------------------------------------------------------------------------------------------


def test_a_step_in_which_nothing_is_guessed_says_nothing_of_drafts() -> None:
    planes = planes_with(3)
    planes.submit([1], replace(GREEDY, logit_bias=((7, 100.0),)))
    planes.step(num_ahead=1)
    planes.step(num_ahead=1)
    assert [(result.num_tokens, result.num_draft_tokens) for result in planes.results] == [(None, 0)] * 2


def test_every_draft_is_counted_and_every_token_beyond_a_row_s_one() -> None:
    planes = planes_with(3, imperfect_twin())
    text = text_of(planes, PROMPTS[0])
    drafted = [result for result in planes.results if result.num_tokens is not None]
    num_accepted = sum(int(np.sum(result.num_tokens)) - 1 for result in drafted)
    assert num_drafted(planes) == (sum(result.num_draft_tokens for result in drafted), num_accepted)
    assert len(text) == 24 == num_accepted + len(planes.results)
