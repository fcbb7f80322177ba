"""Tokens that a graph draws are those that the sampler on the host draws, and a row's way depends on itself alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bound_shapes import bound
from drafting import SETTINGS, target
from planes_in_process import Planes
from test_packing import TinyModel

from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.drawing import draw_from_all
from blockplane.data_plane.fused_sampling import LARGEST_NOISE, draw
from blockplane.data_plane.sampler import NOT_FINITE
from blockplane.protos.sampling import SamplingParams

FUSED = replace(CPU, is_compiled=True, fuses_sampling=True, build=bound)
GREEDY = SamplingParams(12, ignore_eos=True)
REQUESTS = {
    "greedy": GREEDY,
    "hot": replace(GREEDY, temperature=1.0),
    "top-k": replace(GREEDY, temperature=1.0, top_k=7),
    "top-p": replace(GREEDY, temperature=0.8, top_p=0.7),
    "min-p": replace(GREEDY, temperature=0.8, min_p=0.1),
    "a truncation that greed ignores": replace(GREEDY, top_k=3),
    "log-probabilities": replace(GREEDY, temperature=1.0, logprobs=3),
    "of the prompt too": replace(GREEDY, prompt_logprobs=2),
    "penalties": replace(GREEDY, repetition_penalty=1.5, presence_penalty=0.5),
    "bad words": replace(GREEDY, bad_words=((3,), (77,)), temperature=1.0),
    "at least": replace(GREEDY, min_tokens=3, ignore_eos=False, stop_token_ids=(9,)),
}


def planes(backend: Any, **settings: Any) -> Planes:
    return Planes(TinyModel(), {**SETTINGS, "num_blocks": 200, **settings}, backend=backend)


def outputs(planes: Planes, requests: dict[str, SamplingParams]) -> tuple[list[list[int]], list[Any]]:
    numbers = [
        planes.submit([(11 * index + at) % 250 for at in range(3 + 9 * index)], params, seed=index)
        for index, params in enumerate(requests.values())
    ]
    planes.run()
    told = [
        [value.tolist() for value in (part.num_entries, part.token_ids, part.logprobs)]
        for result in planes.results
        for part in (result.logprobs, result.prompt_logprobs)
        if part is not None
    ]
    return [planes.texts[number] for number in numbers], told


@pytest.mark.parametrize("settings", [{}, {"num_draft_tokens": 2}], ids=["plainly", "with drafts"])
def test_every_kind_of_request_says_the_same_as_on_the_host(settings: dict[str, Any]) -> None:
    (texts, told), (fused_texts, fused_told) = (
        outputs(planes(backend, **settings), REQUESTS) for backend in (CPU, FUSED)
    )
    assert fused_texts == texts
    assert [part[:2] for part in fused_told] == [part[:2] for part in told]
    for fused, plain in zip(fused_told, told, strict=True):
        np.testing.assert_allclose(fused[2], plain[2], atol=1e-5)


@pytest.mark.parametrize("name", ["greedy", "hot", "top-k", "penalties"])
def test_batch_mates_change_nothing(name: str) -> None:
    alone = outputs(planes(FUSED), {name: REQUESTS[name]})[0][0]
    together = planes(FUSED)
    number = together.submit([at % 250 for at in range(3)], REQUESTS[name], seed=0)
    for params in REQUESTS.values():
        together.submit([5, 6, 7], params, seed=9)
    together.run()
    assert together.texts[number] == alone


def test_a_model_of_drafts_is_fused_as_well() -> None:
    settings = {**SETTINGS, "num_draft_tokens": 3, "draft_source": "model", "draft_model": "a twin"}
    texts = []
    for backend in CPU, FUSED:
        pair = Planes(target(), settings, backend=backend, draft_model=type(target())("float32"))
        number = pair.submit(list(range(40, 60)), replace(GREEDY, temperature=0.7), seed=3)
        pair.run()
        texts.append(pair.texts[number])
        statistics = pair.scheduler.statistics()
        assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 0
    assert texts[0] == texts[1]


def test_a_draw_is_the_host_s_but_for_rounding() -> None:
    torch.manual_seed(0)
    logits, noise = 3 * torch.randn(500, 1000), torch.rand(500)
    temperature = torch.full((500,), 0.7)
    drawn = draw(logits, temperature, noise)
    right = draw_from_all(logits, temperature.double(), noise.double())
    assert (drawn == right).float().mean() > 0.99


def test_frequencies_are_the_softmax_s() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0]).expand(20_000, -1)
    counts = torch.bincount(draw(logits, torch.full((20_000,), 0.5), torch.rand(20_000)), minlength=4)
    expected = torch.softmax(logits[0] / 0.5, dim=0)
    assert torch.allclose(counts / 20_000, expected, atol=0.01)


def test_greedy_takes_the_first_of_the_likeliest_and_no_noise() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]])
    for noise in 0.0, 0.5, float(LARGEST_NOISE):
        assert draw(logits, torch.zeros(1), torch.tensor([noise])).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_told_and_its_neighbour_is_not_touched(temperature: float) -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 9.0], [0.0, float("inf")], [float("-inf"), 9.0]])
    drawn = draw(logits, torch.full((4,), temperature), torch.full((4,), 0.5))
    assert drawn.tolist() == [NOT_FINITE, 1, NOT_FINITE, NOT_FINITE]


@pytest.mark.parametrize("noise", [0.0, float(LARGEST_NOISE)])
def test_the_ends_of_the_noise_draw_tokens_of_some_weight(noise: float) -> None:
    logits = torch.tensor([[-200.0, 0.0, 1.0, -200.0]])
    assert draw(logits, torch.ones(1), torch.tensor([noise])).tolist() == [1 if noise == 0 else 2]
