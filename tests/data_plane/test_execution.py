"""How a step's tokens are chosen: without logits where no more than each row's likeliest is asked for."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sampling_cases import CONFIGURE, Case, batch_of
from torch import Tensor

from blockplane.data_plane.backends.cpu import CPU
from blockplane.data_plane.execution import ForwardThenSample
from blockplane.data_plane.sampler import SamplingBatch
from blockplane.protos.sampling import SamplingParams

CHEAP, OF_LOGITS = 7, 3


class Model:
    """Tells by the token which way it was asked."""

    vocab_size = 40

    def __init__(self, cheap: list[int] | None) -> None:
        self.cheap = cheap

    def forward(self, *_inputs: object) -> Tensor:
        raise AssertionError("hidden states are given")

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        return None if self.cheap is None else torch.tensor(self.cheap)[hidden[:, 0].long()]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.eye(self.vocab_size)[OF_LOGITS].expand(len(hidden), -1).clone()


def batch(*params: SamplingParams) -> SamplingBatch:
    logits = np.zeros(40, np.float32)
    return batch_of([Case(each, 0, [1], [], logits) for each in params])[1]


def tokens(model: Model, asked: SamplingBatch) -> list[int]:
    execution = ForwardThenSample(model, CONFIGURE, CPU)
    rows = torch.arange(len(asked.seed) + 1.0)[:, None]
    execution._forward = lambda _part: rows
    part = SimpleNamespace(logits_indices=torch.arange(len(asked.seed)) + 1)
    samples, hidden = execution.run([part], asked)
    assert hidden == [rows]
    assert execution.computed_at
    assert samples.token_ids.dtype == np.int32
    return samples.token_ids.tolist()


GREEDY = SamplingParams(5)


def test_greedy_rows_need_no_logits():
    # The model gives each sampled row's own: of the part's three rows the last two.
    assert tokens(Model([0, CHEAP, -1]), batch(GREEDY, GREEDY)) == [CHEAP, -1]


def test_a_model_without_a_cheaper_way_gives_logits():
    assert tokens(Model(None), batch(GREEDY, GREEDY)) == [OF_LOGITS] * 2


@pytest.mark.parametrize(
    "more",
    [
        replace(GREEDY, temperature=0.01),
        replace(GREEDY, logprobs=0),
        replace(GREEDY, logit_bias=((1, 0.5),)),
        replace(GREEDY, min_tokens=2),
    ],
)
def test_one_row_that_asks_for_more_has_logits_made_for_all(more):
    assert tokens(Model([0, CHEAP, CHEAP]), batch(GREEDY, more))[0] == OF_LOGITS
